"""Figures of a placement on statistics, and the heat map."""

import numpy as np
import pytest

from dspark_jax.eplb import ExpertStatistics, LoadBalancerConfig, load_report
from dspark_jax.eplb.loads import imbalance, rank_loads
from dspark_jax.eplb.report import placed, unbalanced
from dspark_jax.errors import ConfigError
from dspark_jax.plots_eplb import plot_rank_loads, save_figure

# Layer 61 runs in one of the two iterations only.
STATISTICS = ExpertStatistics(
    4, 1, 1, {(0, 60): np.array([6, 2, 0, 0]), (1, 60): np.array([0, 0, 4, 0]), (0, 61): np.array([1, 1, 1, 1])}
)


def test_rank_loads_spread_an_expert_over_its_replicas():
    load = np.array([12, 3, 5])
    assert rank_loads(load, np.array([0, 1, 0, 2, 0, 0]), 3).tolist() == [6, 8, 6]
    np.testing.assert_array_equal(rank_loads(np.stack([load, 2 * load]), np.array([0, 1, 2, 1]), 2), [[13.5, 6.5], [27, 13]])
    assert imbalance(np.array([[1, 3], [2, 2], [0, 0]])).tolist() == [0.5, 0, 0]


def test_worked_figures():
    found = load_report(STATISTICS, unbalanced(STATISTICS, 2), 2)
    assert found.layers == (60, 61)
    # Layer 60: ranks got 8 and 0, then 0 and 4; 8 and 4 in sum.
    np.testing.assert_allclose(found.mean, [3, 2])
    np.testing.assert_allclose(found.std, [(8 / np.sqrt(2) + 4 / np.sqrt(2)) / 2, 0])
    np.testing.assert_allclose(found.imbalance, [1, 0])
    np.testing.assert_allclose(found.total, [1 / 3, 0])
    np.testing.assert_array_equal(found.loads, [[8, 4], [2, 2]])
    assert found.overall() == {"mean": 2.5, "std": found.std[0] / 2, "imbalance": 0.5, "total": pytest.approx(1 / 6)}
    assert found.overall(range(61, 64)) == {"mean": 2, "std": 0, "imbalance": 0, "total": 0}
    assert found.as_dict()["layers"]["60"]["imbalance"] == 1 and found.as_dict()["all"] == found.overall()


def test_iterations_without_rows_do_not_count():
    with_zeros = ExpertStatistics(4, 1, 1, {**STATISTICS.counts, (1, 61): np.zeros(4, int), (0, 62): np.zeros(4, int)})
    found = load_report(with_zeros, unbalanced(with_zeros, 2), 2)
    assert found.imbalance.tolist() == [1, 0, 0] and found.mean.tolist() == [3, 2, 0]


def test_one_rank():
    found = load_report(STATISTICS, unbalanced(STATISTICS, 1), 1)
    assert found.std.tolist() == [0, 0] and found.imbalance.tolist() == [0, 0]


def test_the_placement_to_compare_with():
    assert unbalanced(STATISTICS, 2).tolist() == [[0, 1, 2, 3]] * 2
    assert unbalanced(STATISTICS, 3).tolist() == [[0, 1, 1, 2, 2, 3]] * 2  # 4 experts do not divide among 3


def test_placed_takes_the_recorded_layers():
    rows = {0: [9], 60: [3, 2, 1, 0], 61: [0, 2, 1, 3]}
    assert placed(STATISTICS, LoadBalancerConfig(4, rows), 2).tolist() == [[3, 2, 1, 0], [0, 2, 1, 3]]
    assert placed(STATISTICS, LoadBalancerConfig(6), 2).tolist() == [[0, 1, 2, 2, 3, 0]] * 2
    with pytest.raises(ConfigError) as error:
        placed(STATISTICS, LoadBalancerConfig(5, {60: [0, 1, 2]}), 2)
    for part in ("4 faults", "layers [61] are in the statistics", "num_slots is 5", "3 entries", "experts [3]"):
        assert part in str(error.value)


def test_heat_map(tmp_path):
    before = load_report(STATISTICS, unbalanced(STATISTICS, 2), 2)
    after = load_report(STATISTICS, np.array([[0, 3, 1, 2], [0, 1, 2, 3]]), 2)
    figure = plot_rank_loads({"before": before, "after": after}, num_target_layers=61)
    left, right = figure.axes[:2]
    np.testing.assert_allclose(left.images[0].get_array(), [[8 / 6, 4 / 6], [1, 1]])
    assert left.images[0].get_clim() == right.images[0].get_clim() == (0, pytest.approx(4 / 3))
    assert [label.get_text() for label in left.get_yticklabels()] == ["60", "61"]
    assert left.get_title() == "before: imbalance in sum 0.167" and left.lines[0].get_ydata()[0] == 0.5
    save_figure(figure, tmp_path / "map.png")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match=r"the ending is '\.txt'; expected that of a picture: .*png"):
        save_figure(figure, tmp_path / "map.txt")
    with pytest.raises(ConfigError, match="cannot be written"):
        save_figure(figure, tmp_path / "absent" / "map.png")
