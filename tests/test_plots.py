"""The plots draw the numbers of a round, and nothing else."""

import io
import subprocess
import sys

import numpy as np
import pytest

from dspark_jax import RequestError, plots
from dspark_jax.serve.engine import Tick
from dspark_jax.testing import DummyTokenizer
from dspark_jax.trace import RoundTrace

GAMMA, VOCAB = 4, 16
decode = DummyTokenizer.letters(VOCAB).decode


def trace(accepted: int, verified: int = GAMMA, seed: int = 0) -> RoundTrace:
    """A round with random laws; only its counts are chosen."""
    rng = np.random.default_rng(seed)
    drafts = rng.integers(0, VOCAB, GAMMA)
    return RoundTrace(
        position=9,
        anchor=3,
        drafts=drafts,
        q=rng.dirichlet(np.ones(VOCAB), GAMMA),
        p=rng.dirichlet(np.ones(VOCAB), GAMMA + 1),
        confidence=rng.random(GAMMA),
        uniform=rng.random(GAMMA),
        verified=verified,
        accepted=accepted,
        tokens=(*(int(t) for t in drafts[:accepted]), 7),
        finish_reason=None,
    )


@pytest.mark.parametrize(("accepted", "verified"), [(0, 4), (2, 4), (4, 4), (2, 2), (0, 0)])
def test_plot_round(accepted: int, verified: int):
    shown = trace(accepted, verified)
    (axes,) = plots.plot_round(shown, decode).axes
    heights = [bar.get_height() for bar in axes.patches]
    np.testing.assert_allclose(heights, [*shown.draft_q, *shown.draft_p])
    chance, confidence = (line.get_ydata() for line in axes.lines)
    np.testing.assert_allclose(chance, np.minimum(1, shown.draft_p / shown.draft_q))
    np.testing.assert_allclose(confidence, shown.confidence)
    labels = axes.get_xticklabels()
    assert [label.get_text() for label in labels] == [repr(decode([t])) for t in shown.drafts]
    rejected = [plots.REJECTED] * (accepted < verified)
    want = [plots.DRAFTER] * accepted + rejected + [plots.MUTED] * (GAMMA - accepted - len(rejected))
    assert [label.get_color() for label in labels] == want
    assert axes.get_title() == f"{accepted} of {verified} drafts accepted"


def test_plot_laws():
    shown = trace(1)
    (axes,) = plots.plot_laws(shown, 1, decode, top=VOCAB).axes
    q, p, residual = np.reshape([bar.get_height() for bar in axes.patches], (3, VOCAB))
    order = np.argsort(-np.maximum(shown.p[1], shown.q[1]))
    np.testing.assert_allclose(q, shown.q[1][order])
    np.testing.assert_allclose(p, shown.p[1][order])
    np.testing.assert_allclose(residual.sum(), 1)
    np.testing.assert_allclose(residual * np.maximum(p - q, 0).sum(), np.maximum(p - q, 0), atol=1e-12)
    assert f"{np.minimum(p, q).sum():.2f}" in axes.get_title() and "draft 2" in axes.get_title()
    assert len(plots.plot_laws(shown, 0, decode, top=3).axes[0].patches) == 9


def test_plot_laws_without_a_residual_shows_p():
    shown = trace(1)
    shown.q[1] = shown.p[1]
    _, p, residual = np.reshape([bar.get_height() for bar in plots.plot_laws(shown, 1, decode).axes[0].patches], (3, 10))
    np.testing.assert_array_equal(residual, p)


@pytest.mark.parametrize("draft", [-1, GAMMA])
def test_a_draft_that_is_not_there(draft: int):
    with pytest.raises(RequestError, match=f"draft is {draft}; expected 0 … 3"):
        plots.plot_laws(trace(1), draft, decode)


def test_plot_confidence_takes_the_drafts_that_were_tested():
    traces = [trace(0, seed=1), trace(4, seed=2), trace(2, 2, seed=3), trace(1, seed=4)]
    (axes,) = plots.plot_confidence(traces).axes
    x, y = axes.lines[1].get_data()
    tested = [1, 4, 2, 2]
    np.testing.assert_allclose(x, np.concatenate([t.confidence[:n] for t, n in zip(traces, tested, strict=True)]))
    overlap = [np.minimum(t.p[j], t.q[j]).sum() for t, n in zip(traces, tested, strict=True) for j in range(n)]
    np.testing.assert_allclose(y, overlap)
    assert axes.get_title() == "9 drafts of 4 rounds"


def test_plot_acceptance():
    (axes,) = plots.plot_acceptance({"a": (0.5, None), "b": (1.0, 0.25)}).axes
    np.testing.assert_equal([list(line.get_ydata()) for line in axes.lines], [[0.5, np.nan], [1.0, 0.25]])
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "b"]


def test_plot_survival():
    (axes,) = plots.plot_survival({"a": (0.5, None, 0.9), "b": (1.0, 0.25)}).axes
    assert [list(line.get_ydata()) for line in axes.lines] == [[1.0, 0.5, 0.0, 0.0], [1.0, 1.0, 0.25]]
    assert list(axes.lines[0].get_xdata()) == [0, 1, 2, 3]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a: 1.50 tokens", "b: 2.25 tokens"]


def test_plot_timeline_has_a_colour_for_every_microbatch_and_none_for_a_bubble():
    ticks = [Tick(((t % 3), (t - 1) % 3, (t - 2) % 3), (4, t % 2, 0 if t < 2 else 7)) for t in range(6)]
    (axes,) = plots.plot_timeline(ticks).axes
    shown = axes.images[0].get_array()
    assert shown.shape == (3, 6)
    for t, tick in enumerate(ticks):
        for rank in range(3):
            assert shown.mask[rank, t] == (tick.rows[rank] == 0)
            assert shown.mask[rank, t] or shown[rank, t] == tick.microbatch[rank]
    image = axes.images[0]
    drawn = [tuple(image.cmap(image.norm(m))) for m in range(3)]
    assert len(set(drawn)) == 3 and image.cmap(np.ma.masked)[3] == 0  # nothing is painted there
    legend = axes.get_legend()
    assert [text.get_text() for text in legend.get_texts()] == [f"microbatch {m}" for m in range(3)]
    assert [tuple(patch.get_facecolor()) for patch in legend.get_patches()] == drawn
    assert axes.get_title() == "6 ticks; ranks busy 100%, 50%, 67%"
    assert axes.get_ylim() == (2.5, -0.5)  # the first rank on top


def test_plot_timeline_without_a_tick():
    with pytest.raises(RequestError, match="ticks is empty"):
        plots.plot_timeline([])


def test_every_plot_can_be_saved():
    shown = trace(2)
    every = [plots.plot_round(shown, decode), plots.plot_laws(shown, 2, decode), plots.plot_confidence([shown])]
    rates = {"a": (1.0, 0.5)}
    every += [plots.plot_acceptance(rates), plots.plot_survival(rates), plots.plot_timeline([Tick((0,), (1,))])]
    for figure in every:
        file = io.BytesIO()
        figure.savefig(file, format="png")
        assert file.getvalue().startswith(b"\x89PNG")


def test_matplotlib_is_imported_late_and_its_absence_is_explained(monkeypatch: pytest.MonkeyPatch):
    code = "import sys, dspark_jax.plots; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'dspark-jax\[notebooks\]'"):
        plots.plot_round(trace(1), decode)
