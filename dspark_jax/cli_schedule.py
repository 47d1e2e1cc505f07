"""`--scheduler`, `--profile`, `--temperatures` and `--unsigned`: how many drafts are verified."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from dspark_jax.decode.schedule_source import ScheduleSource

SchedulerOption = Annotated[
    str | None,
    typer.Option(
        "--scheduler",
        help="Drafts to verify: fixed:LENGTH, threshold:CONFIDENCE, early-stop, stale-size[:LAG]; by default all.",
    ),
]
ProfileOption = Annotated[
    Path | None, typer.Option("--profile", help="File of step times (JSON), for early-stop and stale-size.")
]
TemperaturesOption = Annotated[
    Path | None, typer.Option("--temperatures", help="File that `dspark-jax calibrate` has written (JSON).")
]
UnsignedOption = Annotated[
    bool, typer.Option("--unsigned", help="Accept files that do not say which model and mesh they belong to.")
]


def schedule_of(
    scheduler: str | None, profile: Path | None, temperatures: Path | None, unsigned: bool, *, draft: bool = True
) -> "ScheduleSource | None":
    """What the options ask for; None where they ask for nothing.

    Raises ConfigError for what is wrong in itself, and where the drafter is left out (`draft` False).
    """
    if scheduler is None and profile is None and temperatures is None and not unsigned:
        return None
    from dspark_jax.decode.schedule_source import schedule_source
    from dspark_jax.errors import ConfigError

    if not draft:
        raise ConfigError("--no-draft leaves nothing to schedule: it cannot go with --scheduler and its files; remove one")
    return schedule_source(scheduler, profile, temperatures, unsigned)
