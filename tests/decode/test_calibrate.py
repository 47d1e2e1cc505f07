"""Calibration: errors and areas by hand, temperatures that are known, and the files that hold them."""

import json
import re

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dspark_jax.decode.calibrate import Rounds, auc, ece_floor, fit, quality, reliability
from dspark_jax.decode.calibration_file import Calibration, head_digest, read_calibration
from dspark_jax.errors import ConfigError


def simulated(temperatures, count: int, seed: int = 0) -> Rounds:
    """Rounds whose logits, divided by the temperatures, tell the truth."""
    rng = np.random.default_rng(seed)
    true = rng.normal(1.0, 1.5, (count, len(temperatures)))
    survives = rng.random(true.shape) < 1 / (1 + np.exp(-true))
    return Rounds(true * np.asarray(temperatures), np.cumprod(survives, axis=1).sum(axis=1))


KNOWN = (2.0, 1.0, 0.5)


@pytest.fixture(scope="module")
def known() -> Rounds:
    return simulated(KNOWN, 30_000)


def test_known_temperatures_are_recovered(known: Rounds):
    found = fit(known)
    np.testing.assert_allclose(found, KNOWN, rtol=0.1)
    fresh = simulated(KNOWN, 30_000, seed=1)
    before, after = quality(fresh), quality(fresh, found)
    floor = ece_floor(fresh, found)
    assert np.mean(before.ece) > 0.03 and max(after.ece) < 0.01
    assert np.mean(after.ece) < 1.5 * np.mean(floor) < 0.01


def test_temperatures_are_fitted_from_left_to_right(known: Rounds):
    """A position's temperature makes up for nothing that stands behind it."""
    some = known.part(np.arange(len(known)) < 2000)
    other = Rounds(np.column_stack([some.logits[:, :2], some.logits[:, 2:] * 3]), some.accepted)
    assert fit(other)[:2] == fit(some)[:2] and fit(other)[2] > 2 * fit(some)[2]


def test_few_rounds_keep_temperatures_that_do_not_matter_near_one():
    rounds = simulated((1.0, 1.0), 300)
    flat = Rounds(np.column_stack([rounds.logits[:, 0], np.full(300, 0.001)]), rounds.accepted)
    assert fit(flat)[1] == pytest.approx(1, abs=0.01)


def test_survival_is_cumulative_and_scaled():
    rounds = Rounds(np.array([[2.0, 1.0, 0.0]]), np.array([2]))
    np.testing.assert_allclose(rounds.survival()[0], [0.8808, 0.6439, 0.3220], atol=5e-5)
    np.testing.assert_allclose(rounds.survival((2, 1, 0.5))[0], [0.7311, 0.5344, 0.2672], atol=5e-5)
    assert rounds.survived().tolist() == [[True, True, False]]


def test_the_error_by_hand():
    """Two bins of two: |.15 - .5| and |.8 - 1|, of equal mass."""
    found = reliability(np.array([0.9, 0.1, 0.7, 0.2]), np.array([True, True, True, False]), bins=2)
    assert found.count == (2, 2) and found.observed == (0.5, 1.0)
    assert found.predicted == pytest.approx((0.15, 0.8)) and found.ece == pytest.approx((0.35 + 0.2) / 2)
    few = reliability(np.array([0.9, 0.1, 0.7]), np.array([True, False, True]))
    assert few.count == (1, 1, 1) and few.ece == pytest.approx((0.1 + 0.3 + 0.1) / 3)


def test_bins_have_equal_mass_and_quality_is_by_position():
    rounds = simulated((1.0, 1.0, 1.0), 1234)
    found = quality(rounds)
    assert [len(d.count) for d in found.diagrams] == [10] * 3
    assert all(sum(d.count) == 1234 and max(d.count) - min(d.count) <= 1 for d in found.diagrams)
    a, happened = rounds.survival(), rounds.survived()
    for k in range(3):
        events, others = a[happened[:, k], k], a[~happened[:, k], k]
        pairs = (events[:, None] > others).mean() + 0.5 * (events[:, None] == others).mean()
        assert found.auc[k] == pytest.approx(pairs)


def test_areas_with_ties_and_without_a_contrast():
    assert auc(np.array([0.5, 0.5, 0.5]), np.array([True, False, True])) == 0.5
    assert auc(np.array([0.1, 0.5, 0.5, 0.9]), np.array([False, False, True, True])) == pytest.approx(0.875)
    assert auc(np.array([0.1, 0.9]), np.array([True, True])) is None


def test_the_floor_is_what_a_truthful_drafter_shows():
    """Whatever happened: it knows the confidences and the number of rounds only."""
    truthful = simulated((1.0, 1.0), 2000)
    floor = np.asarray(ece_floor(truthful, draws=20))
    shown = np.mean([quality(simulated((1.0, 1.0), 2000, seed)).ece for seed in range(20)], axis=0)
    np.testing.assert_allclose(floor, shown, rtol=0.25)
    assert ece_floor(Rounds(truthful.logits, np.zeros(2000, int)), draws=20) == tuple(floor)


@pytest.mark.parametrize(("logits", "accepted", "message"), [
    (np.zeros((3, 2)), np.zeros(2, int), r"logits \(3, 2\) and accepted \(2,\)"),
    (np.zeros((0, 2)), np.zeros(0, int), "N >= 1"),
    (np.array([[np.nan, np.inf]]), np.array([3]), "2 values that are not finite"),
    (np.zeros((2, 2)), np.array([0, 3]), r"accepted spans 0 … 3; expected 0 … 2"),
])  # fmt: skip
def test_impossible_rounds_are_refused(logits, accepted, message):
    with pytest.raises(ConfigError, match=message):
        Rounds(logits, accepted)


# Files.

SGLANG = {"temperatures": [2, 1.0, 0.5], "dataset": "mix", "num_samples": 9, "ece_before": 0.05, "ece_after": 0.01}
OURS = Calibration((2.0, 1.0), "p.jsonl", 500, (0.04, 0.05), (0.01, 0.02), (0.7, None), (0.7, None), (0.01, 0.01), "ab" * 32)


def written(path, value):
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def test_temperatures_are_read_as_they_were_written(tmp_path):
    OURS.write(tmp_path / "sts.json")
    assert read_calibration(tmp_path / "sts.json") == OURS
    assert [p.name for p in tmp_path.iterdir()] == ["sts.json"]
    OURS.check(2, "ab" * 32)


def test_sglangs_file_is_read_and_passes_only_on_request(tmp_path):
    found = read_calibration(written(tmp_path / "sts.json", SGLANG))
    assert found.temperatures == (2.0, 1.0, 0.5) and found.ece_before == (0.05,) and found.model is None
    with pytest.raises(ConfigError, match="nothing says which model"):
        found.check(3, "ab" * 32)
    found.check(3, "ab" * 32, unsigned=True)


def test_temperatures_of_another_drafter_are_refused():
    with pytest.raises(ConfigError, match=r"2 faults\n.*there are 2; expected 5(.|\n)*model is abababababab….*is cdcd"):
        OURS.check(5, "cd" * 32, unsigned=True)


@pytest.mark.parametrize(("change", "messages"), [
    ({"temperatures": [1, 0]}, [r"temperatures\[1\] is 0; expected finite numbers above 0"]),
    ({"temperatures": [], "num_samples": 0}, [r"temperatures is \[\]", "num_samples is 0"]),
    ({"temperatures": [float("inf")], "dataset": 1}, [r"temperatures\[0\] is inf", "dataset is 1"]),
    ({"ece_before": [0.1, None], "ece_after": 2}, ["ece_before holds None", "ece_after holds 2; expected numbers in 0 … 1"]),
    ({"temperature": [1], "model": 3}, ["temperature is unknown", "model is 3"]),
])  # fmt: skip
def test_faulty_files_are_refused_with_every_fault(tmp_path, change, messages):
    with pytest.raises(ConfigError) as caught:
        read_calibration(written(tmp_path / "sts.json", SGLANG | change))
    for message in (*messages, r"sts\.json"):
        assert re.search(message, str(caught.value)), (message, str(caught.value))


def test_missing_and_cut_off_files_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="ece_after is missing"):
        read_calibration(written(tmp_path / "sts.json", {k: SGLANG[k] for k in list(SGLANG)[:-1]}))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_calibration(tmp_path / "none.json")
    OURS.write(tmp_path / "whole.json")
    text = (tmp_path / "whole.json").read_text()
    for end in range(0, len(text.rstrip()), 5):
        with pytest.raises(ConfigError, match=r"sts\.json: .*calibrate this model again"):
            read_calibration(written(tmp_path / "sts.json", text[:end]))


class Head(nnx.Module):
    def __init__(self, value: float):
        self.confidence_head = nnx.Param(jnp.full((3,), value))
        self.other = nnx.Param(jnp.full((3,), 2 * value))


def test_the_digest_is_that_of_the_confidence_head():
    one, same, other = (nnx.split(Head(v))[1] for v in (1.0, 1.0, 2.0))
    assert head_digest(one) == head_digest(same) != head_digest(other)
    same["other"][...] = jnp.zeros(3)
    assert head_digest(one) == head_digest(same)
    with pytest.raises(ConfigError, match="no confidence head"):
        head_digest(nnx.split(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))[1])
