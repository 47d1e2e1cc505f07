"""The benchmarks of `dspark_kernels`, one after the other, and their results in one list."""

import importlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

import dspark_kernels
from dspark_jax.bench.records import merge, read_records
from dspark_jax.errors import ConfigError


def available() -> list[str]:
    """Operations that have a benchmark."""
    assert dspark_kernels.__file__ is not None
    return sorted(path.parent.name for path in Path(dspark_kernels.__file__).parent.glob("*/bench.py"))


def chosen(only: str | None) -> list[str]:
    """The operations of a list with commas, all for None. Raises ConfigError for one without a benchmark."""
    names = available() if only is None else list(dict.fromkeys(word.strip() for word in only.split(",")))
    if unknown := [name for name in names if name not in available()]:
        raise ConfigError(f"--only has {', '.join(map(repr, unknown))}; expected {', '.join(available())}")
    return names


def run(names: Sequence[str], out: Path | None = None, arguments: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Runs the benchmarks' own main functions with these arguments; what they measured, also merged into `out`.

    What an interrupted benchmark has measured before is in `out` too.

    Raises ConfigError without a GPU.
    """
    if jax.default_backend() != "gpu":
        raise ConfigError(
            f"bench kernels times kernels on a GPU, and JAX has none here (it runs on {jax.default_backend()}); run it on a"
            " machine with an NVIDIA GPU, after pip install 'dspark-jax[cuda12]'"
        )
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            part = Path(folder) / f"{name}.json"
            try:
                importlib.import_module(f"dspark_kernels.{name}.bench").main([*arguments, "--out", str(part)])
            finally:
                if part.exists():
                    new = read_records(part)
                    found += new
                    if out is not None:
                        merge(out, new)
    return found
