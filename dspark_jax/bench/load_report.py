"""What `bench.load` has found: medians, how schedulers compare, a table and two plots."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dspark_jax.bench.contest import WEIGHING
from dspark_jax.bench.load_run import PLAIN, Run
from dspark_jax.errors import ConfigError, raise_all

ALL_UP_TO = 64  # concurrencies at which plain decoding should be beaten


def competitor(runs: Sequence[Run], requests: int) -> dict[str, Any]:
    """Figures of one competitor at one concurrency, for JSON; rates are medians over the runs."""
    whole = Run.sum(runs)
    rate = float(np.median([run.rate for run in runs]))
    return {
        "tokens_per_second": rate,
        "tokens_per_second_per_user": rate / requests,
        "seconds_per_tick": float(np.median([run.seconds / run.ticks for run in runs])),
        "tokens_per_round": whole.tokens / whole.rounds,
        "verified_per_round": whole.verified / whole.rounds,
        "accepted_per_round": whole.accepted / whole.rounds,
        "rested_share": whole.rested / whole.rounds,
        "runs": [vars(run) for run in runs],
    }


def comparison(found: Mapping[str, Mapping[str, Any]], gamma: int) -> dict[str, Any]:
    """The best fixed length, and every scheduler's rate over it, over whole blocks and over plain decoding."""
    rate = {name: one["tokens_per_second"] for name, one in found.items()}
    best = max((name for name in rate if name.startswith("fixed:")), key=rate.__getitem__)
    adaptive = [name for name in rate if name != PLAIN and not name.startswith("fixed:")]
    over = {"of_best_fixed": rate[best], "of_whole_blocks": rate[f"fixed:{gamma}"], "of_plain": rate[PLAIN]}
    return {"best_fixed": best, **{name: {k: rate[name] / r for k, r in over.items()} for name in adaptive}}


def verdict(points: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Over all concurrencies, by scheduler: the least share of the best fixed length, the most over whole blocks, and the
    least over plain decoding, at all concurrencies up to ALL_UP_TO. `plain_requests` are these concurrencies.
    """
    done = [point for point in points if "comparison" in point]
    if not done:
        return {}
    few = [point for point in done if point["requests"] <= ALL_UP_TO]

    def ratios(name: str, key: str, chosen: Sequence[Mapping[str, Any]]) -> list[float]:
        return [point["comparison"][name][key] for point in chosen]

    names = [name for name in done[0]["comparison"] if name != "best_fixed"]
    return {
        name: {
            "least_of_best_fixed": min(ratios(name, "of_best_fixed", done)),
            "most_of_whole_blocks": max(ratios(name, "of_whole_blocks", done)),
            "least_of_plain": min(ratios(name, "of_plain", few), default=None),
            "plain_requests": [point["requests"] for point in few],
        }
        for name in names
    }


def merged(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One report out of several of the same settings, each with concurrencies of its own.

    Raises ConfigError naming every setting that differs, and a concurrency that is there twice.
    """
    foreign = [str(i) for i, report in enumerate(reports, 1) if not isinstance(report.get("points"), list)]
    raise_all(ConfigError, "--draw", [f"report {i} has no points; give what bench load --out has written" for i in foreign])
    first, own = reports[0], ("command", "date", "points", "verdict", "seconds")
    faults = [
        f"{key} is {first.get(key)!r} in the first report and {other.get(key)!r} in report {i}; draw them one by one"
        for i, other in enumerate(reports[1:], 2)
        for key in sorted({*first, *other})
        if key not in own and first.get(key) != other.get(key)
    ]
    points = sorted((point for report in reports for point in report["points"]), key=lambda point: point["requests"])
    counts = [point["requests"] for point in points]
    twice = sorted({n for n in counts if counts.count(n) > 1})
    faults += [f"{n} requests were measured in two reports; leave one of them out" for n in twice]
    raise_all(ConfigError, "--draw", faults)
    dates = [report["date"] for report in reports]
    seconds = sum(report["seconds"] for report in reports)
    found = {"command": "; ".join(report["command"] for report in reports), "date": max(dates), "seconds": seconds}
    return {**first, **found, "points": points, "verdict": verdict(points)}


def lines(points: Sequence[Mapping[str, Any]], x: str, y: str) -> dict[str, list[tuple[float, float]]]:
    """(x, y) by competitor, over the concurrencies; x may be `requests`."""
    found: dict[str, list[tuple[float, float]]] = {}
    for point in points:
        for name, one in point.get("competitors", {}).items():
            found.setdefault(name, []).append((point["requests"] if x == "requests" else one[x], one[y]))
    return found


def draw(report: Mapping[str, Any], folder: Path) -> None:
    """Writes pareto.png and budget.png."""
    from dspark_jax.plots_schedule import plot_budget, plot_pareto

    points, gamma = report["points"], report["gamma"]
    title = f"{report['model']}, {report['device']}"
    if report["synthetic"]:
        title += "\nsynthetic acceptance, drawn from recorded rounds"
    rates = lines(points, "tokens_per_second_per_user", "tokens_per_second")
    plot_pareto(rates, title).savefig(folder / "pareto.png")
    budget = lines(points, "requests", "verified_per_round")
    adaptive = {name: line for name, line in budget.items() if name in WEIGHING or name.startswith("threshold:")}
    plot_budget(adaptive, gamma, title).savefig(folder / "budget.png")


def table(report: Mapping[str, Any]) -> str:
    """Tokens a second by concurrency and competitor, then the verdict."""
    points = [point for point in report["points"] if "competitors" in point]
    if not points:
        return "nothing was measured"
    names = list(points[0]["competitors"])
    rows = [["requests", *names]]
    for point in points:
        rows.append([str(point["requests"]), *(f"{point['competitors'][n]['tokens_per_second']:.1f}" for n in names)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    text = ["tokens/s of all requests" + (", synthetic acceptance" if report["synthetic"] else "")]
    text += ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    for name, one in report["verdict"].items():
        least = one["least_of_plain"]
        text.append(
            f"{name}: at least {one['least_of_best_fixed']:.1%} of the best fixed length, at most"
            f" {one['most_of_whole_blocks']:.1%} of whole blocks"
            + ("" if least is None else f", at least {least:.1%} of plain decoding{_at(one.get('plain_requests'))}")
        )
    return "\n".join(text)


def _at(concurrencies: Sequence[int] | None) -> str:
    """Where something was measured; reports of earlier versions do not say it."""
    if not concurrencies:
        return ""
    return f" (at {', '.join(map(str, concurrencies))} request{'s' * (list(concurrencies) != [1])})"
