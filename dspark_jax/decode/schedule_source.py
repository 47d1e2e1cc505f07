"""A schedule as the user asks for it: a scheduler's name, a file of step times, a file of temperatures.

Names and files are read first, before a model is; `ScheduleSource.check` then compares them with the model and the mesh
before anything is placed on a device. Nothing that is wrong, foreign or cut off is replaced by a default.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from dspark_jax.config_dense import ModelConfig
from dspark_jax.config_drafter import AnyDraftConfig
from dspark_jax.decode.calibration_file import Calibration, head_digest, read_calibration
from dspark_jax.decode.profile_table import Fingerprint, ProfileTable, read_profile
from dspark_jax.decode.schedule import EarlyStop, FixedLength, Ordered, Schedule, Scheduler, StaleRate, StaleSize, Threshold
from dspark_jax.eplb.placement import Placement
from dspark_jax.errors import ConfigError, described, raise_all
from dspark_jax.parallel.mesh import EXPERT, PIPE

FORMS = "fixed:LENGTH, threshold:CONFIDENCE, early-stop, stale-size[:LAG] or stale-rate[:LAG]"
_STALE = {"stale-size": StaleSize, "stale-rate": StaleRate}
_WEIGHING = ("early-stop", *_STALE)  # these need step times
MEASURE = "measure"  # in place of a file of step times


@dataclass(frozen=True)
class ScheduleSource:
    """What `schedule_source` has read.

    Attributes:
      name: of the scheduler; "" where a whole Schedule was given.
      setting: the number behind the name; None where there is none.
      given: that Schedule.
      table: step times.
      calibration: temperatures.
      unsigned: files that do not say what they belong to are accepted.
      measure: step times are to be measured before the schedule is used; `measured` then has them.
      sources: where table and calibration came from, for messages.
    """

    name: str = ""
    setting: float | None = None
    given: Schedule | None = None
    table: ProfileTable | None = None
    calibration: Calibration | None = None
    unsigned: bool = False
    measure: bool = False
    sources: tuple[str, str] = ("step times", "temperatures")

    def check(self, draft: AnyDraftConfig | None, fingerprint: Fingerprint, params: nnx.State) -> None:
        """Whether all of it belongs to this model, mesh and placement.

        Args:
          draft: the drafter that will run; None: there is none.
          fingerprint: of what will run.
          params: the model's parameters, on the host or on devices.

        Raises:
          ConfigError: naming everything that does not fit.
        """
        if draft is None:
            raise ConfigError("scheduler is given, but there is no drafter whose drafts it could count; leave it out")
        raise_all(ConfigError, "scheduler", list(self._faults(draft.block_size, fingerprint, params)))

    def check_table(self, fingerprint: Fingerprint) -> None:
        """Raises ConfigError unless the step times, if there are any, were measured on this."""
        if self.table is not None:
            self.table.check(fingerprint, unsigned=self.unsigned, source=self.sources[0])

    def _faults(self, gamma: int, fingerprint: Fingerprint, params: nnx.State) -> Iterator[str]:
        try:
            self.check_table(fingerprint)
        except ConfigError as error:
            yield str(error)
        try:
            if self.calibration is not None:
                self.calibration.check(gamma, head_digest(params), unsigned=self.unsigned, source=self.sources[1])
        except ConfigError as error:
            yield str(error)
        given = self.given.scheduler if self.given else None
        length = given.length if isinstance(given, FixedLength) else self.setting if self.name == "fixed" else None
        if length is not None and length > gamma:
            yield f"the fixed length is {length}; expected 0 … {gamma}, the drafts of a block"
        temperatures = self.given.temperatures if self.given else None
        if temperatures is not None and len(temperatures) != gamma:
            yield f"the Schedule has {len(temperatures)} temperatures; expected {gamma}, one a draft position"

    def schedule(self, slots: int, gamma: int) -> Schedule:
        """For `slots` requests on each expert rank; while step times are still to be measured, one for measuring.

        Raises:
          ConfigError: the step times end before the requests' anchors do.
        """
        if self.measure:
            return Ordered()
        end = slots if self.table is None or self.table.max_rows is None else self.table.max_rows
        if end < slots:
            raise ConfigError(
                f"{self.sources[0]}: ends at {end} rows, and {slots} requests on an expert rank have {slots} anchors; measure"
                " more rows, or decode fewer requests side by side"
            )
        if self.given is not None:
            return self.given
        temperatures = self.calibration.temperatures if self.calibration else None
        return Schedule(self._scheduler(slots, gamma), temperatures)

    def _scheduler(self, slots: int, gamma: int) -> Scheduler:
        if self.name == "fixed":
            return FixedLength(None if self.setting is None else int(self.setting))
        if self.name == "threshold":
            assert self.setting is not None
            return Threshold(self.setting)
        assert self.table is not None
        cost = self.table.cost(slots, slots * (gamma + 1))
        if self.name == "early-stop":
            return EarlyStop(cost)
        kind = _STALE[self.name]
        return kind(cost) if self.setting is None else kind(cost, int(self.setting))

    def measured(self, table: ProfileTable) -> "ScheduleSource":
        """With the step times that were to be measured."""
        return replace(self, table=table, measure=False)

    @property
    def buckets(self) -> tuple[int, ...] | None:
        """The row counts that were measured; None where no table names them."""
        if self.table is None or self.table.verify.rule != "stairs":
            return None
        return tuple(n for n in self.table.verify.points if n > 0)


SchedulerOption = str | Schedule | ScheduleSource
_NOT_HERE = (
    f"profile is {MEASURE!r}, which only an Engine of one process does (`bench serve` has one); give a file of step times"
)


def schedule_source(
    scheduler: SchedulerOption | None,
    profile: str | Path | None = None,
    temperatures: str | Path | None = None,
    unsigned: bool = False,
    *,
    measurable: bool = False,
) -> ScheduleSource | None:
    """Reads what was asked for; None for whole blocks, where no scheduler is named.

    Args:
      scheduler: "fixed:2", "threshold:0.6", "early-stop", "stale-size" or "stale-size:1" (its lag), "stale-rate" as well,
        or a Schedule. A ScheduleSource is handed back.
      profile: file of step times (`profile_table`), which early-stop, stale-size and stale-rate need. Its rows are the
        buckets. Where the caller is `measurable`, MEASURE instead: it will measure them itself.
      temperatures: file that `dspark-jax calibrate` writes; without it confidences are taken as they are.
      unsigned: accept files that do not say which model, mesh and placement they belong to.

    Raises:
      ConfigError: naming everything that is wrong with the name, the files and their combination.
    """
    rest = {"profile": profile, "temperatures": temperatures, "unsigned": unsigned or None}
    extra = [name for name, value in rest.items() if value is not None]
    if scheduler is None:
        faults = [f"{name} is given without a scheduler, and would do nothing; add one of {FORMS}" for name in extra]
        raise_all(ConfigError, "scheduler", faults)
        return None
    if not isinstance(scheduler, str):
        if not isinstance(scheduler, Schedule | ScheduleSource):
            raise ConfigError(f"scheduler is {scheduler!r:.60}; expected a Schedule, or one of {FORMS}")
        what = type(scheduler).__name__
        faults = [f"{name} is given beside a {what}, which is complete; leave one of them out" for name in extra]
        if isinstance(scheduler, ScheduleSource) and scheduler.measure and not measurable:
            faults.append(_NOT_HERE)
        raise_all(ConfigError, "scheduler", faults)
        return scheduler if isinstance(scheduler, ScheduleSource) else ScheduleSource(given=scheduler)
    name, setting, faults = _named(scheduler)
    measure = profile == MEASURE
    if measure:
        profile = None
        if not measurable:
            faults.append(_NOT_HERE)
        elif name not in _WEIGHING:
            faults.append(f"profile is {MEASURE!r}, and scheduler {name} does not use step times; leave profile out")
    if name in _WEIGHING and profile is None and not measure:
        faults.append(f"{name} weighs tokens against step times; give a file of them (profile)")
    found: dict[str, Any] = {}
    name_of = {"table": "profile", "calibration": "temperatures"}
    readers = (("table", profile, read_profile), ("calibration", temperatures, read_calibration))
    for key, path, read in readers:
        try:
            if not isinstance(path, str | Path | None):
                raise ConfigError(f"{name_of[key]} is {described(path)}; expected the path of a file")
            found[key] = None if path is None else read(Path(path))
        except ConfigError as error:
            faults.append(str(error))
    raise_all(ConfigError, "scheduler", faults)
    sources = ("the step times measured here" if measure else str(profile), str(temperatures))
    return ScheduleSource(name, setting, None, **found, unsigned=unsigned, measure=measure, sources=sources)


def _named(text: str) -> tuple[str, float | None, list[str]]:
    """Name and setting of a scheduler, and what is wrong with them."""
    name, colon, value = text.strip().partition(":")
    if name not in ("fixed", "threshold", *_WEIGHING):
        return name, None, [f"scheduler is {text!r}; expected {FORMS}"]
    if name == "early-stop":
        return name, None, [f"scheduler is {text!r}; early-stop has no setting"] if colon else []
    if not colon:
        missing = [f"scheduler is {text!r}; expected threshold:CONFIDENCE, as in threshold:0.6"]
        return name, None, missing if name == "threshold" else []
    try:
        setting = float(value) if name == "threshold" else int(value)
        {"fixed": FixedLength, "threshold": Threshold}.get(name, _lag)(setting)
    except ValueError as error:  # ConfigError is one
        return name, None, [f"scheduler is {text!r}; {error if isinstance(error, ConfigError) else f'expected {FORMS}'}"]
    return name, setting, []


def _lag(lag: int) -> None:
    if lag < 1:
        raise ConfigError(f"lag is {lag}; expected at least 1 round")


def fingerprint_of(
    config: ModelConfig,
    draft: AnyDraftConfig | None,
    dtype: jax.typing.DTypeLike,
    mesh: Mesh,
    *,
    ranges: tuple[tuple[int, int], ...] | None = None,
    placement: Placement | None = None,
) -> Fingerprint:
    """What a table of step times must have been measured on.

    Args:
      dtype: of the model: its embedding's.
      ranges: layers of the pipe ranks, where there are several.
    """
    shape = f"{mesh.shape[PIPE]}x{mesh.shape[EXPERT]}"
    if ranges is not None and len(ranges) > 1:
        shape += " " + ",".join(f"{first}-{end - 1}" for first, end in ranges)
    device = mesh.devices.flat[0].device_kind
    return Fingerprint.of(config, draft, dtype=jnp.dtype(dtype).name, mesh=shape, device=device, placement=placement)
