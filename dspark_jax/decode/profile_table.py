"""Measured step times: files, checks, and the curve that schedulers look up.

Three forms are read. Our own has the seconds of a step by bucket of verified rows, of a draft by requests and of a plain step
by requests (not in files of earlier versions), with a fingerprint of what was measured. SGLang's rate form has steps a second
by tokens of the batch (floor look-up), its additive form T(requests, drafts) = bias + alpha(requests) +
theta(requests + drafts), linear between the points. Facts: docs/scheduling.md.
"""

import bisect
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dspark_jax.config_dense import ModelConfig
from dspark_jax.config_drafter import AnyDraftConfig
from dspark_jax.decode.file_checks import increasing_faults, key_faults, positive_faults, read_object
from dspark_jax.decode.schedule.cost import StepCost
from dspark_jax.eplb.placement import Placement
from dspark_jax.errors import ConfigError, raise_all

FORMAT, VERSION = "dspark-jax step times", 1
AGAIN = "measure a table for this model, mesh and placement"
_OWN = ("format", "version", "fingerprint", "draft", "verify")
_PLAIN = "plain"  # the key that files of earlier versions do not have
_RATES = ("sample_batch_tokens", "sample_steps_per_sec", "max_batch_tokens")
_ADDITIVE = ("bias_seconds", "bs_probes", "alpha_seconds", "m_probes", "theta_seconds")

Rule = Literal["stairs", "floor", "linear"]


@dataclass(frozen=True)
class Fingerprint:
    """What a table was measured on.

    Attributes:
      model: digest of the configurations and the dtype; weights do not change a step's time.
      mesh: "PxE", with the stages' layers where they were chosen.
      placement: digest of the expert placement, "" without one.
      device: kind of the devices.
    """

    model: str
    mesh: str
    placement: str
    device: str

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        draft: AnyDraftConfig | None,
        *,
        dtype: str,
        mesh: str,
        device: str,
        placement: Placement | None = None,
    ) -> "Fingerprint":
        """Of a model on a mesh."""
        parts = [dataclasses.asdict(config), dataclasses.asdict(draft) if draft else None, dtype]
        model = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
        return cls(model, mesh, placement.digest if placement else "", device)

    def differences(self, other: "Fingerprint") -> list[str]:
        """Fields of this table that are not those of `other`, a sentence each."""
        pairs = {f.name: (getattr(self, f.name), getattr(other, f.name)) for f in dataclasses.fields(self)}
        return [f"{name} is {_short(a)}; here it is {_short(b)}: {AGAIN}" for name, (a, b) in pairs.items() if a != b]


def _short(value: str) -> str:
    return repr(value if len(value) <= 24 else value[:12] + "…")


@dataclass(frozen=True)
class Curve:
    """Seconds at ascending points, and how values between them are found.

    `stairs`: the next point upwards, since a step runs with the bucket that holds it; behind the last one there is none.
    `floor`: the next point downwards. `linear`: between the neighbours, constant outside.
    """

    points: tuple[int, ...]
    seconds: tuple[float, ...]
    rule: Rule

    def at(self, value: int) -> float:
        """Seconds at `value`; with `stairs` the last point is the largest value."""
        points, seconds = self.points, self.seconds
        if self.rule == "stairs":
            return seconds[bisect.bisect_left(points, value)]
        after = bisect.bisect_right(points, value)
        if after == 0 or after == len(points) or self.rule == "floor":
            return seconds[max(after - 1, 0)]
        share = (value - points[after - 1]) / (points[after] - points[after - 1])
        return seconds[after - 1] + share * (seconds[after] - seconds[after - 1])


@dataclass(frozen=True)
class ProfileTable:
    """Step times of one engine; rows and requests are those of one expert rank.

    Attributes:
      verify: seconds of the target's step by rows.
      draft: seconds that the number of requests adds.
      max_rows: the most rows of a step; None where the file names no limit.
      fingerprint: what was measured; None in the forms that do not say.
      plain: seconds of a step without drafting over the requests' anchors alone; None in files of earlier versions and in
        the foreign forms, with which schedulers never rest.
    """

    verify: Curve
    draft: Curve
    max_rows: int | None = None
    fingerprint: Fingerprint | None = None
    plain: Curve | None = None

    def cost(self, requests: int, rows: int) -> StepCost:
        """The table for schedulers of up to `requests` requests and `rows` rows; it ends where the file does."""
        end = rows if self.max_rows is None else min(rows, self.max_rows)
        return StepCost(
            rows=tuple(self.verify.at(n) for n in range(end + 1)),
            requests=tuple(self.draft.at(n) for n in range(requests + 1)),
            plain=self.plain and tuple(self.plain.at(n) for n in range(requests + 1)),
        )

    def check(self, expected: Fingerprint, *, unsigned: bool = False, source: str = "step times") -> None:
        """Raises ConfigError unless the table belongs to `expected`; one without a fingerprint only passes if `unsigned`."""
        if self.fingerprint is not None:
            raise_all(ConfigError, source, self.fingerprint.differences(expected))
        elif not unsigned:
            raise ConfigError(
                f"{source}: has no fingerprint, so nothing says that it was measured on this model, mesh and placement;"
                f" {AGAIN}, or accept it as it is (unsigned)"
            )

    def write(self, path: Path) -> None:
        """Writes our own form, whole or not at all.

        Raises:
          ConfigError: the table has no fingerprint, or is not in stairs, as tables read from other forms.
        """
        if self.fingerprint is None or self.verify.rule != "stairs":
            raise ConfigError(
                f"{path}: only measured tables with a fingerprint are written; this one was read from another form"
            )
        value = {
            "format": FORMAT,
            "version": VERSION,
            "fingerprint": dataclasses.asdict(self.fingerprint),
            "draft": {"requests": self.draft.points, "seconds": self.draft.seconds},
            "verify": {"rows": self.verify.points, "seconds": self.verify.seconds},
        }
        if self.plain is not None:
            value[_PLAIN] = {"requests": self.plain.points, "seconds": self.plain.seconds}
        part = path.with_name(path.name + ".part")
        part.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
        os.replace(part, path)


def measured(
    verify: Mapping[int, float], draft: Mapping[int, float], fingerprint: Fingerprint, plain: Mapping[int, float] | None = None
) -> ProfileTable:
    """A table from seconds by bucket, by requests, and of plain steps by requests."""

    def curve(seconds: Mapping[int, float], rule: Rule) -> Curve:
        return Curve(tuple(sorted(seconds)), tuple(seconds[n] for n in sorted(seconds)), rule)

    stairs = curve(verify, "stairs")
    return ProfileTable(
        stairs, curve(draft, "linear"), stairs.points[-1], fingerprint, curve(plain, "linear") if plain else None
    )


def read_profile(path: Path) -> ProfileTable:
    """Reads any of the three forms; `ProfileTable.check` then says whether it belongs here.

    Raises:
      ConfigError: the file cannot be read, is cut off, or holds anything impossible: all faults in one message.
    """
    value = read_object(path, "step times", AGAIN)
    forms: list[tuple[tuple[str, ...], Callable[[Mapping[str, Any]], Iterator[str]], Callable[[Any], ProfileTable]]] = [
        (_OWN, _own_faults, _own),
        (_RATES, _rate_faults, _rates),
        (_ADDITIVE, _additive_faults, _additive),
    ]
    keys, faults, make = max(forms, key=lambda form: len(set(form[0]) & set(value)))
    if not set(keys) & set(value):
        known = "; ".join(", ".join(form[0]) for form in forms)
        raise ConfigError(f"{path}: is no table of step times; expected an object with the keys of one form: {known}")
    if keys is _OWN and _PLAIN in value:
        keys = (*keys, _PLAIN)
    found = list(key_faults(value, keys))
    raise_all(ConfigError, str(path), found or list(faults(value)))
    return make(value)


def _curve_faults(name: str, points: tuple[str, Any], seconds: tuple[str, Any], *, above_zero: bool = True) -> Iterator[str]:
    """Of two lists, each with its key."""
    yield from increasing_faults(f"{name}{points[0]}", points[1])
    yield from positive_faults(f"{name}{seconds[0]}", seconds[1], above_zero=above_zero)
    if isinstance(points[1], list) and isinstance(seconds[1], list) and len(points[1]) != len(seconds[1]):
        yield f"{name}{points[0]} has {len(points[1])} entries and {seconds[0]} {len(seconds[1])}; expected as many"


def _own_faults(value: Mapping[str, Any]) -> Iterator[str]:
    if value["format"] != FORMAT:
        yield f"format is {value['format']!r:.60}; expected {FORMAT!r}"
    if value["version"] != VERSION:
        yield f"version is {value['version']!r:.60}; this release reads version {VERSION}: {AGAIN}"
    for section, points in (("draft", "requests"), ("verify", "rows"), (_PLAIN, "requests")):
        if section not in value:  # a file of an earlier version
            continue
        part = value[section]
        if not isinstance(part, dict):
            yield f"{section} is {part!r:.60}; expected an object with {points} and seconds"
            continue
        missing = list(key_faults(part, (points, "seconds"), f"{section}."))
        yield from missing
        if not missing:
            above = section != "draft"
            yield from _curve_faults(f"{section}.", (points, part[points]), ("seconds", part["seconds"]), above_zero=above)
    print_of, names = value["fingerprint"], tuple(f.name for f in dataclasses.fields(Fingerprint))
    if not isinstance(print_of, dict):
        yield f"fingerprint is {print_of!r:.60}; expected an object with {', '.join(names)}"
        return
    yield from key_faults(print_of, names, "fingerprint.")
    yield from (f"fingerprint.{k} is {v!r:.60}; expected a text" for k, v in print_of.items() if not isinstance(v, str))


def _own(value: Any) -> ProfileTable:
    verify, draft = value["verify"], value["draft"]
    stairs = Curve(_ints(verify["rows"]), _floats(verify["seconds"]), "stairs")
    line = Curve(_ints(draft["requests"]), _floats(draft["seconds"]), "linear")
    own = value.get(_PLAIN)
    plain = own and Curve(_ints(own["requests"]), _floats(own["seconds"]), "linear")
    return ProfileTable(stairs, line, stairs.points[-1], Fingerprint(**value["fingerprint"]), plain)


def _rate_faults(value: Mapping[str, Any]) -> Iterator[str]:
    tokens, rates, most = (value[key] for key in _RATES)
    yield from _curve_faults("", (_RATES[0], tokens), (_RATES[1], rates))
    last = tokens[-1] if isinstance(tokens, list) and tokens and isinstance(tokens[-1], int) else 1
    if not isinstance(most, int) or isinstance(most, bool) or most < last:
        yield f"max_batch_tokens is {most!r:.60}; expected an integer >= {last}, the last of sample_batch_tokens"


def _rates(value: Any) -> ProfileTable:
    seconds = tuple(1 / rate for rate in value["sample_steps_per_sec"])
    floor = Curve(_ints(value["sample_batch_tokens"]), seconds, "floor")
    return ProfileTable(floor, Curve((0,), (0.0,), "linear"), value["max_batch_tokens"])


def _additive_faults(value: Mapping[str, Any]) -> Iterator[str]:
    yield from positive_faults("bias_seconds", [value["bias_seconds"]])
    yield from _curve_faults("", ("bs_probes", value["bs_probes"]), ("alpha_seconds", value["alpha_seconds"]), above_zero=False)
    yield from _curve_faults("", ("m_probes", value["m_probes"]), ("theta_seconds", value["theta_seconds"]), above_zero=False)


def _additive(value: Any) -> ProfileTable:
    bias = float(value["bias_seconds"])
    theta = Curve(_ints(value["m_probes"]), tuple(bias + float(x) for x in value["theta_seconds"]), "linear")
    return ProfileTable(theta, Curve(_ints(value["bs_probes"]), _floats(value["alpha_seconds"]), "linear"))


def _ints(values: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(x) for x in values)


def _floats(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(float(x) for x in values)
