"""Checks that the JSON files of measured step times and of temperatures share: each returns every fault, with its remedy."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dspark_jax.errors import ConfigError


def read_object(path: Path, what: str, remedy: str) -> dict[str, Any]:
    """The JSON object that a file holds.

    Raises:
      ConfigError: naming the file, for one that is missing, no UTF-8, cut off, or no object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); expected a file of {what}: check the path") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is not JSON ({error}), perhaps cut off; {remedy}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: holds {value!r:.60}; expected a JSON object with {what}: {remedy}")
    return value


def is_number(value: Any) -> bool:
    """A finite int or float, no bool."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer too large for a float
        return False


def key_faults(value: Mapping[str, Any], keys: Sequence[str], prefix: str = "") -> Iterator[str]:
    """Keys that are missing, and unknown ones."""
    yield from (f"{prefix}{key} is missing" for key in keys if key not in value)
    yield from (f"{prefix}{key} is unknown; expected {', '.join(keys)}" for key in value if key not in keys)


def positive_faults(name: str, values: Any, *, above_zero: bool = True) -> Iterator[str]:
    """Of a list that should hold finite numbers above 0 (or from 0 on)."""
    expected = "finite numbers " + ("above 0" if above_zero else ">= 0")
    if not isinstance(values, list) or not values:
        yield f"{name} is {values!r:.60}; expected a list of {expected}"
        return
    bad = [i for i, x in enumerate(values) if not is_number(x) or x < 0 or (above_zero and x == 0)]
    if bad:
        yield f"{name}[{bad[0]}] is {values[bad[0]]!r:.60}; expected {expected} ({len(bad)} such entries)"


def increasing_faults(name: str, values: Any) -> Iterator[str]:
    """Of a list that should hold strictly increasing integers from 0 on."""
    if not isinstance(values, list) or not values:
        yield f"{name} is {values!r:.60}; expected a list of strictly increasing integers"
        return
    bad = [x for x in values if not isinstance(x, int) or isinstance(x, bool) or x < 0]
    if bad:
        yield f"{name} holds {bad[0]!r:.60}; expected integers >= 0"
    elif any(a >= b for a, b in zip(values, values[1:], strict=False)):
        yield f"{name} is {values!r:.60}; expected strictly increasing integers"
