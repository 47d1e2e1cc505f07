"""`--scheduler`, `--profile`, `--temperatures` and `--unsigned`: how many drafts are verified; `--verify`: how."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from dspark_jax.decode.schedule_source import ScheduleSource

SchedulerOption = Annotated[
    str | None,
    typer.Option(
        "--scheduler",
        help="Drafts to verify: fixed:LENGTH, threshold:CONFIDENCE, early-stop, stale-size[:LAG] or stale-rate[:LAG] (all).",
    ),
]
ProfileOption = Annotated[
    Path | None,
    typer.Option(
        "--profile", help="File of step times (JSON), for early-stop, stale-size, stale-rate; bench serve also takes: measure."
    ),
]
TemperaturesOption = Annotated[
    Path | None, typer.Option("--temperatures", help="File that `dspark-jax calibrate` has written (JSON).")
]
UnsignedOption = Annotated[
    bool, typer.Option("--unsigned", help="Accept files that do not say which model and mesh they belong to.")
]
VerifyOption = Annotated[
    str,
    typer.Option("--verify", help="rejection, or coupled: a sampled text depends on prompt and seed only, for any drafter."),
]


def schedule_of(
    scheduler: str | None,
    profile: Path | None,
    temperatures: Path | None,
    unsigned: bool,
    *,
    draft: bool = True,
    measurable: bool = False,
) -> "ScheduleSource | None":
    """What the options ask for; None where they ask for nothing.

    `measurable`: step times may be measured by the engine (`--profile measure`; a file of that name needs its folder's path).

    Raises ConfigError for what is wrong in itself, and where the drafter is left out (`draft` False).
    """
    if scheduler is None and profile is None and temperatures is None and not unsigned:
        return None
    from dspark_jax.decode.schedule_source import MEASURE, schedule_source
    from dspark_jax.errors import ConfigError

    if not draft:
        raise ConfigError("--no-draft leaves nothing to schedule: it cannot go with --scheduler and its files; remove one")
    given = MEASURE if str(profile) == MEASURE else profile
    return schedule_source(scheduler, given, temperatures, unsigned, measurable=measurable)
