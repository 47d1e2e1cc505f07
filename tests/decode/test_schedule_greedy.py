"""Greedy text under every scheduler is plain greedy text, with verify lengths that change from round to round."""

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.decode.schedule import EarlyStop, FixedLength, Schedule, StaleRate, StaleSize, StepCost, Threshold
from dspark_jax.testing import LookupTarget
from helpers.scheduling import KeyedDrafter, Plan, Retrospective, decode
from helpers.speculation import state

VOCAB, GAMMA, SLOTS, TICKS = 12, 3, 24, 12
COST = StepCost((0, 1, 1, 1, 1, 1.3, 1.6, 1.7, 1.8, 2.4, 2.5, 2.6, *[3.2] * 5))
PLANS = {
    "fixed": Plan(Schedule(FixedLength(2))),
    "threshold": Plan(Schedule(Threshold(0.5))),
    "early stop": Plan(Schedule(EarlyStop(StepCost(tuple(0.6 + 0.1 * rows for rows in range(17))))), 4),
    "stale size": Plan(Schedule(StaleSize(COST)), 4),
    "stale rate": Plan(Schedule(StaleRate(COST)), 4),
    "calibrated": Plan(Schedule(StaleSize(COST, lag=1), (0.5, 1.5, 3.0)), 4),
    "retrospective": Plan(Schedule(Retrospective(COST)), 4),  # spoils a law, but a greedy text has none to spoil
}

RNG = np.random.default_rng(0)
# The token before the last one matters a little, and a draft, which does not see it, is often right.
_BASE = RNG.normal(0, 1.5, (VOCAB, VOCAB))
TARGET = LookupTarget(jnp.asarray(_BASE + RNG.normal(0, 0.5, (VOCAB,) * 3), jnp.float32))
DRAFTER = KeyedDrafter.of(np.tile(_BASE, (GAMMA, 1, 1)), RNG.normal(0.5, 2.0, (GAMMA, VOCAB)))
PROMPT = (np.arange(SLOTS) % VOCAB).astype(np.int32)


def plain(first: int, count: int) -> list[int]:
    """One argmax after the other."""
    line = [0, first]
    for _ in range(count):
        line.append(int(np.asarray(TARGET.table)[line[-2], line[-1]].argmax()))
    return line[2:]


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.long
def test_the_text_is_plain_decodings(name):
    tokens, verified = decode(
        TARGET, DRAFTER, state(SLOTS, temperature=0.0), tuple(PLANS.values()), list(PLANS).index(name), prompt=PROMPT,
        ticks=TICKS,
    )  # fmt: skip
    count = (tokens >= 0).sum(axis=1)
    for r in range(SLOTS):
        assert tokens[r, : count[r]].tolist() == plain(int(PROMPT[r]), count[r])
    assert count.min() >= TICKS and count.max() > TICKS + 3  # some drafts were accepted
    if name != "fixed":
        assert (np.diff(verified[1:], axis=0) != 0).mean() > 0.2, verified
