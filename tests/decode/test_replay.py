"""Schedules on recorded rounds, without a model."""

import numpy as np
import pytest

from dspark_jax.decode.calibrate import Rounds
from dspark_jax.decode.replay import replay
from dspark_jax.decode.schedule import EarlyStop, FixedLength, Schedule, StaleRate, StaleSize, StepCost, Threshold
from dspark_jax.errors import ConfigError

GAMMA = 3
RNG = np.random.default_rng(0)
LOGITS = RNG.normal(0.5, 1.5, (400, GAMMA))
ROUNDS = Rounds(LOGITS, (RNG.random((400, GAMMA)) < 1 / (1 + np.exp(-LOGITS))).cumprod(axis=1).sum(axis=1))
FREE = StepCost((1.0,) * 50)


def test_a_fixed_length():
    (found,) = replay(Schedule(FixedLength(2)), ROUNDS, [5], batches=400)
    assert (found.requests, found.drafts) == (5, 2.0)
    expected = 1 + np.minimum(ROUNDS.accepted, 2)
    assert abs(found.tokens - expected.mean()) < 5 * expected.std() / np.sqrt(2000)


def test_a_threshold_sees_calibrated_confidences():
    confidence = 1 / (1 + np.exp(-LOGITS / [2.0, 1.0, 0.5]))
    length = (confidence >= 0.6).cumprod(axis=1).sum(axis=1)
    (found,) = replay(Schedule(Threshold(0.6), (2.0, 1.0, 0.5)), ROUNDS, [1], batches=4000)
    assert abs(found.drafts - length.mean()) < 5 * length.std() / np.sqrt(4000)
    kept = 1 + np.minimum(ROUNDS.accepted, length)
    assert abs(found.tokens - kept.mean()) < 5 * kept.std() / np.sqrt(4000)


@pytest.mark.parametrize("kind", [EarlyStop, StaleSize, StaleRate])
@pytest.mark.long
def test_the_load_decides_what_drafts_are_worth(kind):
    """A step of up to 16 rows takes as long as one of one row; behind that every row costs."""
    cost = StepCost(tuple(float(max(n, 16)) for n in range(100)))
    found = replay(Schedule(kind(cost)), ROUNDS, [1, 4, 16], batches=20)
    assert [r.requests for r in found] == [1, 4, 16]
    assert found[0].drafts == found[1].drafts == GAMMA > 1 > found[2].drafts
    (all_of_them,) = replay(Schedule(kind(FREE)), ROUNDS, [4], batches=20)
    assert all_of_them.drafts == GAMMA


def test_what_cannot_be_replayed():
    for requests, batches in (([1, 0], 5), ([1], 0)):
        with pytest.raises(ConfigError, match="replay: requests and batches hold 0; expected at least 1"):
            replay(Schedule(FixedLength(2)), ROUNDS, requests, batches=batches)
    with pytest.raises(ConfigError, match="2 of them for a drafter of block size 3"):
        replay(Schedule(FixedLength(2), (1.0, 1.0)), ROUNDS, [1])
