"""The file of temperatures: SGLang's keys, and what says which drafter they belong to."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from dspark_jax.decode.file_checks import is_number, positive_faults, read_object
from dspark_jax.errors import ConfigError, raise_all

AGAIN = "calibrate this model again (dspark-jax calibrate)"
_KEYS = ("temperatures", "dataset", "num_samples", "ece_before", "ece_after")  # SGLang's
_OURS = ("auc_before", "auc", "ece_floor", "model")


@dataclass(frozen=True)
class Calibration:
    """Temperatures by draft position, how they were found, and what they changed.

    Attributes:
      temperatures: T_k in c_k = sigmoid(logit_k / T_k).
      dataset: where the prompts came from.
      num_samples: rounds that the temperatures were fitted on.
      ece_before, ece_after: expected calibration error by position, or one number, on other rounds than those.
      auc_before, auc: by position with T = 1 and with the temperatures; None where all rounds went the same way.
      ece_floor: the error that perfect confidences would show in as many rounds.
      model: digest of the drafter's confidence head; None in files that do not say.
    """

    temperatures: tuple[float, ...]
    dataset: str
    num_samples: int
    ece_before: tuple[float, ...]
    ece_after: tuple[float, ...]
    auc_before: tuple[float | None, ...] = ()
    auc: tuple[float | None, ...] = ()
    ece_floor: tuple[float, ...] = ()
    model: str | None = None

    def check(self, block_size: int, model: str, *, unsigned: bool = False, source: str = "temperatures") -> None:
        """Raises ConfigError unless they belong to this drafter; a file without a digest only passes if `unsigned`."""
        found = []
        if len(self.temperatures) != block_size:
            found.append(f"there are {len(self.temperatures)}; expected {block_size}, one a draft position: {AGAIN}")
        if self.model is None and not unsigned:
            found.append(f"nothing says which model they belong to; {AGAIN}, or accept them as they are (unsigned)")
        elif self.model is not None and self.model != model:
            found.append(f"model is {self.model[:12]}…; this drafter's confidence head is {model[:12]}…: {AGAIN}")
        raise_all(ConfigError, source, found)

    def write(self, path: Path) -> None:
        """Writes the file, whole or not at all."""
        part = path.with_name(path.name + ".part")
        part.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n", encoding="utf-8")
        os.replace(part, path)


def head_digest(params: nnx.State | Mapping[str, jax.Array]) -> str:
    """64 hexadecimal digits of the confidence head's weights: temperatures fit one training of it only.

    Raises:
      ConfigError: the model has no confidence head.
    """
    digest, leaves = hashlib.sha256(), 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if any("confidence" in str(getattr(key, "key", "")) for key in path):
            digest.update(np.asarray(leaf, np.float32).tobytes())
            leaves += 1
    if not leaves:
        raise ConfigError(
            "the model has no confidence head, so there is nothing to calibrate; choose one with mtp.* stages, or a DSpark"
            " drafter that has one"
        )
    return digest.hexdigest()


def read_calibration(path: Path) -> Calibration:
    """Reads our file or SGLang's; `Calibration.check` then says whether it belongs here.

    Raises:
      ConfigError: the file cannot be read, is cut off, or holds anything impossible: all faults in one message.
    """
    value = read_object(path, "temperatures", AGAIN)
    raise_all(ConfigError, str(path), list(_faults(value)))
    return Calibration(
        temperatures=tuple(float(t) for t in value["temperatures"]),
        dataset=value["dataset"],
        num_samples=value["num_samples"],
        model=value.get("model"),
        **{key: _tuple(value.get(key, [])) for key in ("ece_before", "ece_after", "auc_before", "auc", "ece_floor")},
    )


def _tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list) else (value,)


def _faults(value: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"{key} is missing; expected {', '.join(_KEYS)}" for key in _KEYS if key not in value)
    known = (*_KEYS, *_OURS)
    yield from (f"{key} is unknown; expected {', '.join(known)}" for key in value if key not in known)
    if "temperatures" in value:
        yield from positive_faults("temperatures", value["temperatures"])
    if not isinstance(value.get("dataset", ""), str):
        yield f"dataset is {value['dataset']!r:.60}; expected a text"
    count = value.get("num_samples", 1)
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        yield f"num_samples is {count!r:.60}; expected an integer above 0"
    for key in ("ece_before", "ece_after", "auc_before", "auc", "ece_floor"):
        if key in value:
            yield from _share_faults(key, value[key], none="auc" in key)
    if not isinstance(value.get("model"), str | None):
        yield f"model is {value['model']!r:.60}; expected a digest"


def _share_faults(name: str, value: Any, none: bool) -> Iterator[str]:
    """Of one number in [0, 1], or a list of them."""
    given = [x for x in _tuple(value) if not (none and x is None)]
    bad = [x for x in given if not (is_number(x) and 0 <= x <= 1)]
    if bad:
        yield f"{name} holds {bad[0]!r:.60}; expected numbers in 0 … 1"
