"""The reliability diagram of `dspark-jax calibrate --plot`."""

import io

import numpy as np

from dspark_jax.decode.calibrate import Rounds, quality
from dspark_jax.plots_schedule import plot_reliability


def test_both_panels_show_the_bins_of_every_draft():
    rng = np.random.default_rng(0)
    rounds = Rounds(rng.normal(0, 1, (60, 3)), rng.integers(0, 4, 60))
    pair = quality(rounds), quality(rounds, (2.0, 1.0, 0.5))
    figure = plot_reliability(*pair)
    assert len(figure.axes) == 2
    for axes, shown, name in zip(figure.axes, pair, ("before", "after"), strict=True):
        diagonal, *lines = axes.lines
        assert list(diagonal.get_xdata()) == list(diagonal.get_ydata()) == [0, 1]
        for line, diagram in zip(lines, shown.diagrams, strict=True):
            np.testing.assert_array_equal(line.get_xdata(), diagram.predicted)
            np.testing.assert_array_equal(line.get_ydata(), diagram.observed)
        assert axes.get_title() == f"{name}: mean ECE {np.mean(shown.ece):.1%}"
    assert [text.get_text() for text in figure.axes[1].get_legend().get_texts()] == ["1 drafts", "2 drafts", "3 drafts"]
    file = io.BytesIO()
    figure.savefig(file, format="png")
    assert file.getvalue().startswith(b"\x89PNG")
