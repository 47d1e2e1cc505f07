"""Plots of step times and of loads under schedulers; matplotlib (`pip install dspark-jax[notebooks]`) is imported late."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dspark_jax.plots import MUTED, _figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dspark_jax.decode.calibrate import Quality

Points = Sequence[tuple[float, float]]
PLAIN = "plain"


def plot_step_rates(rates: Mapping[int, Points]) -> "Figure":
    """Steps a second over rows of an expert rank; one line of (rows, rate) for each number of requests."""
    figure, axes = _figure(6, 3.4)
    from matplotlib import colormaps

    colors = colormaps["viridis"].resampled(max(len(rates), 2))
    for i, (requests, points) in enumerate(rates.items()):
        x, y = zip(*sorted(points), strict=True)
        axes.plot(x, y, "o-", color=colors(i), markersize=4, label=f"{requests} request{'s' * (requests != 1)}")
    axes.set(xlabel="rows of an expert rank", ylabel="steps a second", ylim=(0, None))
    axes.set_xscale("log", base=2)
    _plain_ticks(axes, sorted({rows for points in rates.values() for rows, _ in points}))
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def plot_pareto(lines: Mapping[str, Points], title: str = "") -> "Figure":
    """Tokens a second of all requests over tokens a second of one; a line for each way to decode, a point a concurrency."""
    figure, axes = _figure(7.5, 4.2)
    for name, points in lines.items():
        axes.plot(*zip(*points, strict=True), **_style(name), label=name)
    axes.set(xlabel="tokens/s of one request", ylabel="tokens/s of all requests", title=title)
    axes.set_yscale("log")
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def plot_budget(lines: Mapping[str, Points], gamma: int, title: str = "") -> "Figure":
    """Mean verified drafts of a request's round over the number of requests; the whole block is the dotted line."""
    figure, axes = _figure(7.5, 3.6)
    axes.axhline(gamma, color=MUTED, linestyle=":", label=f"whole block, {gamma}")
    for name, points in lines.items():
        axes.plot(*zip(*points, strict=True), **_style(name), label=name)
    axes.set(xlabel="concurrent requests", ylabel="verified drafts a round", ylim=(0, gamma * 1.05), title=title)
    axes.set_xscale("log", base=2)
    _plain_ticks(axes, sorted({x for points in lines.values() for x, _ in points}))
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def plot_reliability(before: "Quality", after: "Quality") -> "Figure":
    """Share of the rounds whose first j drafts survived over the mean survival that was predicted, in bins of equal mass.

    One panel before and one behind the calibration, a line for each j; on the dotted line confidences are right.
    """
    figure, axes = _figure(7.5, 3.6)
    axes.remove()
    from matplotlib import colormaps

    colors = colormaps["viridis"].resampled(max(len(before.diagrams), 2))
    for i, (title, quality) in enumerate((("before", before), ("after", after))):
        panel = figure.add_subplot(1, 2, i + 1)
        panel.plot((0, 1), (0, 1), color=MUTED, linestyle=":")
        for j, diagram in enumerate(quality.diagrams):
            panel.plot(diagram.predicted, diagram.observed, "o-", color=colors(j), markersize=3, label=f"{j + 1} drafts")
        error = sum(quality.ece) / len(quality.ece)
        panel.set(xlim=(0, 1), ylim=(0, 1), xlabel="predicted", ylabel="observed", title=f"{title}: mean ECE {error:.1%}")
        panel.set_aspect("equal")
    panel.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def _style(name: str) -> dict:
    """Fixed lengths and plain decoding stand back behind the schedulers."""
    if name == PLAIN:
        return {"marker": "s", "color": "black", "linestyle": "--", "markersize": 4}
    if name.startswith("fixed:"):
        return {"marker": ".", "color": MUTED, "linewidth": 1, "alpha": 0.8}
    return {"marker": "o", "markersize": 5}


def _plain_ticks(axes, values: Sequence[float]) -> None:
    axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.minorticks_off()
