"""The load-balancer section: TensorRT-LLM's YAML (`MoeLoadBalancerConfig`), read and written as it is there."""

import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from dspark_jax.errors import ConfigError, raise_all

try:
    from yaml import CSafeLoader as _SafeLoader  # a map of a large model takes seconds without libyaml
except ImportError:
    from yaml import SafeLoader as _SafeLoader

Assignments = Mapping[int, Sequence[int]]


@dataclass(frozen=True)
class LoadBalancerConfig:
    """Where experts are placed. Only types are checked here; `validation` checks the values against a model.

    Attributes:
      num_slots: expert slots over all expert ranks, the same in every layer, draft stages included.
      initial_global_assignments: layer index -> expert id of every slot; slot j is on rank `j // (num_slots / ranks)`.
        None asks for automatic placement; an empty mapping is a mapping in which every layer is missing.
      layer_updates_per_iter: layers that an online balancer places anew in each iteration; 0 is static.

    Raises:
      ConfigError: listing every value of a wrong type.
    """

    num_slots: int | None = None
    initial_global_assignments: Assignments | None = field(default=None, repr=False)  # long
    layer_updates_per_iter: int = 0

    def __post_init__(self) -> None:
        raise_all(ConfigError, "load_balancer", list(_type_faults(vars(self))))
        if self.initial_global_assignments is not None:
            plain = {_layer(key): tuple(map(int, row)) for key, row in self.initial_global_assignments.items()}
            object.__setattr__(self, "initial_global_assignments", plain)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str = "load_balancer") -> "LoadBalancerConfig":
        """The section as a mapping; `source` names it in errors.

        Raises:
          ConfigError: listing every unknown key and every value of a wrong type.
        """
        known = [f.name for f in fields(cls)]
        faults = [_unknown(key, known) for key in values if key not in known]
        found = {key: value for key, value in values.items() if key in known}
        raise_all(ConfigError, source, [*faults, *_type_faults(found)])
        return cls(**found)

    def to_yaml(self) -> str:
        """The section as text, one layer a line."""
        lines = [] if self.num_slots is None else [f"num_slots: {self.num_slots}"]
        rows = self.initial_global_assignments
        if rows is not None:
            lines.append("initial_global_assignments:" + ("" if rows else " {}"))
            lines += [f"  {layer}: {list(row)}" for layer, row in rows.items()]
        return "\n".join([*lines, f"layer_updates_per_iter: {self.layer_updates_per_iter}", ""])


ConfigSource = LoadBalancerConfig | Mapping[str, Any] | str | Path


def load_config(source: ConfigSource) -> LoadBalancerConfig:
    """The section given as a YAML file's path, inline as a mapping, or as an object, which is returned.

    Raises:
      ConfigError: the file is missing or no YAML, or the section has unknown keys or values of wrong types: all of
        them in one message.
    """
    if isinstance(source, LoadBalancerConfig):
        return source
    if isinstance(source, Mapping):
        return LoadBalancerConfig.from_dict(source)
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(f"load balancer is {source!r:.80}; expected a YAML file's path, a mapping or an object")
    path = Path(source)
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); expected a load-balancer file (num_slots,"
            " initial_global_assignments, layer_updates_per_iter)"
        ) from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path}: not valid YAML ({' '.join(str(error).split())}); mend it") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: holds {values!r:.60}; expected the keys num_slots, initial_global_assignments, …")
    return LoadBalancerConfig.from_dict(values, str(path))


def save_config(config: LoadBalancerConfig, path: Path) -> None:
    """Writes the section as YAML, for `load_config` and for TensorRT-LLM.

    Raises:
      ConfigError: the file cannot be written.
    """
    try:
        path.write_text(config.to_yaml(), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror}); check the path") from error


class _Loader(_SafeLoader):  # pyright: ignore[reportGeneralTypeIssues]
    """Refuses a key that a mapping has twice: YAML would keep the last, and a layer's first list would be lost."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                line = key.start_mark.line + 1
                raise yaml.YAMLError(f"the key {key.value!r} is there twice, the second time in line {line}")
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else None)
        return super().construct_mapping(node, deep)


def _unknown(key: Any, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(str(key), known, 1)
    return f"unknown key {key!r}; expected {', '.join(known)}" + (f"; did you mean {near[0]!r}?" if near else "")


def _is_int(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _layer(key: Any) -> int:
    """Keys of an inline section that went through JSON are text."""
    return int(key)


def _type_faults(values: Mapping[str, Any]) -> Iterator[str]:
    slots = values.get("num_slots")
    if slots is not None and not _is_int(slots):
        yield f"num_slots is {slots!r}; expected an integer"
    updates = values.get("layer_updates_per_iter", 0)
    if not _is_int(updates) or updates < 0:
        yield f"layer_updates_per_iter is {updates!r}; expected an integer of at least 0"
    rows = values.get("initial_global_assignments")
    if rows is None:
        return
    if not isinstance(rows, Mapping):
        yield (
            f"initial_global_assignments is {rows!r:.60}; expected a mapping of layer index to list of expert ids,"
            " or leave it out for automatic placement"
        )
        return
    yield from _row_faults(rows)


def _row_faults(rows: Mapping[Any, Any]) -> Iterator[str]:
    seen: set[int] = set()
    for key, row in rows.items():
        name = f"initial_global_assignments[{key!r}]"
        if not _is_int(key) and not (isinstance(key, str) and key.isdecimal()):
            yield f"{name}: the key is no layer index; expected an integer"
        elif _layer(key) in seen:
            yield f"{name}: layer {_layer(key)} is there twice; keep one of its lists"
        else:
            seen.add(_layer(key))
        if not isinstance(row, Sequence | np.ndarray) or isinstance(row, str):
            yield f"{name} is {row!r:.60}; expected a list of expert ids"
        elif odd := [value for value in row if not _is_int(value)]:
            yield f"{name} holds {odd[0]!r}; expected expert ids, which are integers ({len(odd)} such entries)"
