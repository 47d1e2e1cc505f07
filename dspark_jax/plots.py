"""Plots of decoding rounds and of the pipeline; matplotlib (`pip install dspark-jax[notebooks]`) is imported late."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dspark_jax.errors import RequestError
from dspark_jax.trace import RoundTrace, shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dspark_jax.serve.engine import Tick

Decode = Callable[[Sequence[int]], str]
TARGET, DRAFTER, REJECTED, MUTED = "#1f5fa8", "#2f9e62", "#c44536", "#b5b5b5"


def _figure(width: float, height: float) -> tuple["Figure", Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib; install it with: pip install 'dspark-jax[notebooks]'") from error
    figure = Figure(figsize=(width, height), dpi=80, layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def plot_round(trace: RoundTrace, decode: Decode) -> "Figure":
    """The drafts of a round: their probability under drafter and target, their chance, and what became of them."""
    figure, axes = _figure(7, 3.2)
    x = np.arange(len(trace.drafts))
    axes.bar(x - 0.2, trace.draft_q, 0.38, color=DRAFTER, label="q, the drafter")
    axes.bar(x + 0.2, trace.draft_p, 0.38, color=TARGET, label="p, the target")
    axes.plot(x, trace.acceptance, "k_", markersize=26, label="min(1, p/q)")
    axes.plot(x, trace.confidence, "kD", markersize=5, fillstyle="none", label="confidence")
    axes.set_xticks(x, [shown(decode, int(t)) for t in trace.drafts])
    for j, label in enumerate(axes.get_xticklabels()):
        tested = j < trace.verified and j <= trace.accepted
        label.set_color(DRAFTER if j < trace.accepted else REJECTED if tested else MUTED)
    axes.set(ylim=(0, 1.05), ylabel="probability", title=f"{trace.accepted} of {trace.verified} drafts accepted")
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def plot_laws(trace: RoundTrace, draft: int, decode: Decode, *, top: int = 10) -> "Figure":
    """p and q at one draft (0-based), and the residual max(p - q, 0) normalised, over the likeliest tokens.

    Raises RequestError for a draft that the round does not have.
    """
    if not 0 <= draft < len(trace.drafts):
        raise RequestError(f"draft is {draft}; expected 0 … {len(trace.drafts) - 1}")
    p, q = trace.p[draft], trace.q[draft]
    residual = np.maximum(p - q, 0)
    residual = residual / residual.sum() if residual.sum() > 0 else p
    tokens = np.argsort(-np.maximum(p, q))[:top]
    figure, axes = _figure(7, 3.2)
    x = np.arange(len(tokens))
    axes.bar(x - 0.27, q[tokens], 0.26, color=DRAFTER, label="q, the drafter")
    axes.bar(x, p[tokens], 0.26, color=TARGET, label="p, the target")
    axes.bar(x + 0.27, residual[tokens], 0.26, color=REJECTED, label="residual, after a rejection")
    axes.set_xticks(x, [shown(decode, int(t)) for t in tokens], rotation=40, ha="right")
    overlap = np.minimum(p, q).sum()
    axes.set(ylabel="probability", title=f"draft {draft + 1}: accepted with probability {overlap:.2f}")
    axes.legend(frameon=False)
    return figure


def plot_confidence(traces: Sequence[RoundTrace]) -> "Figure":
    """Confidence against the true chance sum min(p, q), for every draft that a round put to the test."""
    said, true = [], []
    for trace in traces:
        tested = min(trace.verified, trace.accepted + 1)
        said += list(trace.confidence[:tested])
        true += list(trace.overlap[:tested])
    figure, axes = _figure(4.2, 3.6)
    axes.plot([0, 1], [0, 1], color=MUTED, linewidth=1)
    axes.plot(said, true, "o", color=DRAFTER, markersize=4, alpha=0.7)
    axes.set(xlim=(0, 1.02), ylim=(0, 1.02), xlabel="confidence head", ylabel="sum of min(p, q)")
    axes.set_title(f"{len(said)} drafts of {len(traces)} rounds")
    return figure


def plot_acceptance(rates: dict[str, Sequence[float | None]]) -> "Figure":
    """P(draft j accepted | those before it were) by position, one line for each name."""
    figure, axes = _figure(6, 3)
    for name, values in rates.items():
        axes.plot(np.arange(1, len(values) + 1), [np.nan if v is None else v for v in values], "o-", label=name)
    axes.set(ylim=(0, 1.02), xlabel="draft position", ylabel="acceptance")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def plot_survival(rates: dict[str, Sequence[float | None]]) -> "Figure":
    """P(the first j drafts survive) by j, from the same rates as `plot_acceptance`; 1 plus a line's sum are the tokens that a
    round of whole blocks gives on average. A rate of None, of a position that was never reached, counts as 0.
    """
    figure, axes = _figure(6, 3)
    for name, values in rates.items():
        survival = np.cumprod([0.0 if v is None else v for v in values])
        axes.plot(np.arange(len(values) + 1), [1.0, *survival], "o-", label=f"{name}: {1 + survival.sum():.2f} tokens")
    axes.set(ylim=(0, 1.02), xlabel="drafts", ylabel="all of them survive")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def plot_timeline(ticks: Sequence["Tick"]) -> "Figure":
    """The pipeline, rank by tick: the colour is the microbatch that the rank worked on, bubbles are blank.

    `ticks` are consecutive ones of an engine's `timeline`. Raises RequestError if there is none.
    """
    if not ticks:
        raise RequestError("ticks is empty; expected at least one tick of an engine's timeline")
    rows = np.array([tick.rows for tick in ticks]).T
    microbatch = np.ma.masked_where(rows == 0, np.array([tick.microbatch for tick in ticks]).T)
    pipe, count = rows.shape
    figure, axes = _figure(min(3 + count / 16, 14), 1.2 + 0.4 * pipe)
    from matplotlib import colormaps
    from matplotlib.patches import Patch

    colors = colormaps["viridis"].resampled(pipe)
    axes.imshow(microbatch, aspect="auto", interpolation="nearest", cmap=colors, vmin=-0.5, vmax=pipe - 0.5)
    axes.set_yticks(range(pipe))
    axes.xaxis.get_major_locator().set_params(integer=True)
    busy = ", ".join(f"{share:.0%}" for share in (rows > 0).mean(axis=1))
    axes.set(xlabel="tick", ylabel="pipe rank", title=f"{count} ticks; ranks busy {busy}")
    labels = [Patch(color=colors(m), label=f"microbatch {m}") for m in range(pipe)]
    axes.legend(handles=labels, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return figure
