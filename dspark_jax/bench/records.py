"""Results of benchmarks as they are kept under docs/performance/: a JSON list with one object a case.

Keys of an object: bench, case, device, date, commit, time_us, floor_us, ceiling, fraction (floor over time) and peers
{name: time_us}; a bench may add others. What was not measured is null. `dspark_kernels.timing.Records` writes the same form.
"""

import datetime
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dspark_jax.errors import ConfigError
from dspark_kernels.timing import commit

Record = Mapping[str, Any]


def record(bench: str, case: str, device: str, time_us: float, floor_us: float | None, ceiling: str | None) -> dict[str, Any]:
    """One case of today and of the commit that is checked out, without peers."""
    return {
        "bench": bench,
        "case": case,
        "device": device,
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "time_us": round(time_us, 2),
        "floor_us": None if floor_us is None else round(floor_us, 2),
        "ceiling": ceiling,
        "fraction": None if floor_us is None else round(floor_us / time_us, 3),
        "peers": {},
    }


def read_records(path: Path) -> list[dict[str, Any]]:
    """Raises ConfigError for a file that is no JSON list of objects with bench, case and device."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); check the path") from None
    except ValueError as error:
        raise ConfigError(f"{path}: is not JSON ({error}); give what a benchmark's --out has written") from None
    if not isinstance(found, list) or not all(isinstance(r, dict) and {"bench", "case", "device"} <= set(r) for r in found):
        raise ConfigError(
            f"{path}: expected a list of objects with bench, case and device; give what a benchmark's --out has written"
        )
    return found


def merge(path: Path, new: Sequence[Record]) -> None:
    """Writes `new` behind what the file has; a record of the same bench, case and device takes the old one's place.

    Raises ConfigError for a file of another form.
    """
    kept = {(r["bench"], r["case"], r["device"]): r for r in (read_records(path) if path.exists() else [])}
    kept |= {(r["bench"], r["case"], r["device"]): r for r in new}
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(list(kept.values()), indent=1) + "\n")
    os.replace(part, path)


def check_out(path: Path | None) -> None:
    """Raises ConfigError, before anything is measured, for a file that could not be written or added to."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise ConfigError(f"--out: there is no folder {str(path.parent)!r}; make it, or choose another")
    if path.exists():
        read_records(path)


def table(records: Sequence[Record]) -> str:
    """A line for every case: times and floor in us, peers behind them; "-" where nothing was measured."""
    profiled = any("busy_us" in r for r in records)
    lines = [["bench", "case", "us", "floor", "ceiling", "of it", *(["busy", "launches"] if profiled else []), "peers"]]
    for r in records:
        fraction = "-" if r["fraction"] is None else f"{r['fraction']:.1%}"
        cells = [r["bench"], r["case"], f"{r['time_us']:.1f}", _number(r["floor_us"]), r["ceiling"] or "-", fraction]
        if profiled:
            cells += [_number(r.get("busy_us")), _number(r.get("launches"))]
        lines.append([*cells, ", ".join(f"{name} {us:.1f}" for name, us in r["peers"].items()) or "-"])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = {0, 1, len(widths) - 1}
    shown = [
        "  ".join(cell.ljust(w) if i in texts else cell.rjust(w) for i, (cell, w) in enumerate(zip(cells, widths, strict=True)))
        for cells in lines
    ]
    return "\n".join(map(str.rstrip, shown))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
