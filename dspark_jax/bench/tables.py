"""Tables of docs/performance.md out of the results beside it.

    python -m dspark_jax.bench.tables docs/performance.md

A table stands between the lines `<!-- table: FILE BENCH -->` and `<!-- end of table -->`, where FILE is a list of results
(`bench.records`) in the folder of the page's name and BENCH the one whose results are shown. All other lines stay.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dspark_jax.bench.records import Record, read_records
from dspark_jax.errors import ConfigError, DSparkError

BEGIN, END = re.compile(r"<!-- table: (\S+) (\S+) -->"), "<!-- end of table -->"

Cases = Mapping[str, Record]


def generate(text: str, folder: Path) -> str:
    """The page with its tables made anew from the files of `folder`.

    Raises ConfigError for a marker without an end, a file that cannot be read, and a bench without results.
    """
    out, lines = list[str](), iter(text.splitlines())
    for line in lines:
        out.append(line)
        if found := BEGIN.fullmatch(line):
            if END not in lines:  # takes the old table off the iterator
                raise ConfigError(f"{line} has no {END!r} behind it; add that line")
            out += [*rendered(folder / found[1], found[2]), END]
    return "\n".join(out) + "\n"


def rendered(path: Path, bench: str) -> list[str]:
    """The lines of one table. Raises ConfigError for a file that has no such results, or a case twice."""
    records = [r for r in read_records(path) if r["bench"] == bench]
    cases = {r["case"]: r for r in records}
    if len(cases) != len(records) or not records:
        problem = "has a case of two devices" if records else "has no results"
        raise ConfigError(f"{path}: bench {bench!r} {problem}; expected every case once")
    return _KINDS.get(bench, _plain)(cases)


def _lines(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    first, *others = (f"| {' | '.join(cells)} |" for cells in (head, *rows))
    return [first, "|" + "---|" * len(head), *others]


def _percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{100 * fraction:.0f} %"


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _sizes(case: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", case)}


def _plain(cases: Cases) -> list[str]:
    rows = []
    for case, r in cases.items():
        peers = ", ".join(f"{name} {us:.1f}" for name, us in r["peers"].items())
        rows.append([case, _number(r["time_us"], 1), _number(r["floor_us"], 1), _percent(r["fraction"]), peers or "-"])
    return _lines(["case", "µs", "floor, µs", "of the floor", "peers, µs"], rows)


def _experts(cases: Cases) -> list[str]:
    """Of the whole operation, then of its two products with the best of their peers."""
    formats = ("bf16", "fp8", "fp4")
    whole = [case.split() for case in cases if case.startswith("both ")]
    order = sorted(whole, key=lambda words: (formats.index(words[2]), _sizes(words[1])["T"]))
    rows = []
    for _, rows_text, kind in order:
        both = cases[f"both {rows_text} {kind}"]
        cells = [kind, rows_text[2:], _number(both["time_us"]), _percent(both["fraction"])]
        for product in ("gate_up", "down"):
            one = cases.get(f"{product} {rows_text} {kind}")
            cells += [_number(one["time_us"]), _best_peer(one["peers"])] if one else ["-", "-"]
        rows.append(cells)
    head = ["format", "T", "µs", "of the floor", "gate and up, µs", "best peer, µs", "down, µs", "best peer, µs"]
    return _lines(head, rows)


def _best_peer(peers: Mapping[str, float]) -> str:
    if not peers:
        return "-"
    name = min(peers, key=peers.__getitem__)
    return f"{peers[name]:.0f} ({name.split()[0]})"


def _hyper_connection(cases: Cases) -> list[str]:
    rows = [
        [str(_sizes(case)["T"]), _number(r["time_us"], 1), _number(r["floor_us"], 1), _number(r["peers"].get("jnp"))]
        for case, r in cases.items()
    ]
    return _lines(["rows", "µs", "floor, µs", "plain jnp, µs"], rows)


def _routing(cases: Cases) -> list[str]:
    """Experts and placement down, rows across."""
    found: dict[tuple[int, int, bool], dict[int, Record]] = {}
    for case, r in cases.items():
        size = _sizes(case)
        found.setdefault((size["E"], size["k"], "replicas" in case), {})[size["T"]] = r
    widths = sorted({t for of_kind in found.values() for t in of_kind})
    rows = []
    for (experts, top_k, replicas), by_rows in sorted(found.items(), key=lambda item: (*item[0][:2], not item[0][2])):
        cells = [f"{experts}, {top_k}", "replicas" if replicas else "none"]
        rows.append([*cells, *(_against_jnp(by_rows.get(t)) for t in widths)])
    first, *others = (f"T={t}" for t in widths)
    return _lines(["experts, chosen", "placement", f"{first}: µs (jnp)", *others], rows)


def _against_jnp(r: Record | None) -> str:
    return "-" if r is None else f"{r['time_us']:.1f} ({_number(r['peers'].get('jnp'), 1)})"


def _round(cases: Cases) -> list[str]:
    """With the fastest peer where a case has any."""
    rows, compared = [], any(r["peers"] for r in cases.values())
    for case, r in cases.items():
        memory: Mapping[str, Any] = r["memory"]
        gb = [_number(value and value / 1e9, 2) for value in (memory["peak"], memory["weights"], memory["state"])]
        times = [_number(r[name]) for name in ("time_us", "busy_us", "floor_us")]
        peer = [_fastest(r["peers"], r["time_us"])] if compared else []
        rows.append([case, *times, _percent(r["fraction"]), *peer, _number(r["launches"]), f"{gb[0]} ({gb[1]} + {gb[2]})"])
    head = ["case", "µs", "busy, µs", "floor, µs", "of the floor", *(["fastest peer, µs"] if compared else []), "launches"]
    return _lines([*head, "GB at the peak (weights + state)"], rows)


def _fastest(peers: Mapping[str, float], us: float) -> str:
    """Of several programs the fastest, its name in full, and how often ours runs in that time."""
    if not peers:
        return "-"
    name = min(peers, key=peers.__getitem__)
    return f"{peers[name]:.0f} ({name}; {peers[name] / us:.1f} times ours)"


_KINDS: dict[str, Callable[[Cases], list[str]]] = {
    "expert_mlp": _experts,
    "hyper_connection": _hyper_connection,
    "routing": _routing,
    "round": _round,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 2 on bad input."""
    parser = argparse.ArgumentParser(prog="python -m dspark_jax.bench.tables", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("page", type=Path, help="Markdown file; its results are in the folder of the same name")
    page = parser.parse_args(argv).page
    try:
        page.write_text(generate(page.read_text(encoding="utf-8"), page.with_suffix("")), encoding="utf-8")
    except DSparkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
