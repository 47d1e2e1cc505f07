"""Resting: rounds without drafting where it does not pay, the rounds that look again, and a text that knows nothing of it."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from dspark_jax.decode.round import init_requests, rounds
from dspark_jax.decode.schedule import EarlyStop, Schedule, StaleRate, StaleSize, StepCost
from dspark_jax.decode.schedule.past import PROBE
from dspark_jax.decode.verify import COUPLED, REJECTION
from dspark_jax.errors import ConfigError
from dspark_jax.parallel.mesh import EXPERT, make_mesh
from dspark_jax.testing import LookupDrafter, LookupTarget
from helpers.blocks import block_of
from helpers.scheduling import begin
from helpers.speculation import state

# Two drafts of one request cost .5 together; drafting costs .4, so a step without it takes 1.
ROWS, PLAIN = (1.4, 1.4, 1.65, 1.9), (1.0, 1.0)
COST = StepCost(ROWS, plain=PLAIN)
POOR, GOOD = np.float32([0.3, 0.1]), np.float32([0.9, 0.8])  # rates of 1.3 / 1.65 at the best, below 1 / 1; and of 2.62 / 1.9


def planned(scheduler: Any, stale: np.ndarray, rested: list[int]) -> bool:
    block = replace(block_of(np.zeros((len(stale), 2)), stale=stale), rested=np.asarray(rested, np.int32))
    return bool(jax.jit(lambda b: scheduler.plan(b)[0])(block))


def past(*blocks: np.ndarray, depth: int = 33) -> np.ndarray:
    """The history of one slot, newest first; ones behind its blocks."""
    return np.concatenate([np.stack(blocks), np.ones((depth - len(blocks), 2), np.float32)])[None]


@pytest.mark.parametrize("kind", [StaleSize, StaleRate])
def test_a_round_rests_where_the_best_rate_is_below_plain_decodings(kind):
    poor = past(POOR, POOR)
    assert planned(kind(COST), poor, [0]) and not planned(kind(COST), past(POOR, GOOD), [0])
    assert not planned(kind(COST), np.ones((1, 33, 2), np.float32), [0])  # a new request is certain of its drafts
    edge = 1.3 / 1.65  # tokens a second, with one poor draft a round; fewer with none or two
    for seconds, rests in ((1 / edge - 1e-3, True), (1 / edge + 1e-3, False)):
        assert planned(kind(StepCost(ROWS, plain=(seconds,))), poor, [0]) == rests


def test_a_cost_without_plain_times_never_rests():
    assert not Schedule(StaleRate(StepCost(ROWS))).rests and not Schedule(EarlyStop(COST)).rests
    with pytest.raises(ConfigError, match="plain has a step of no time"):
        StepCost(ROWS, plain=(0.0, 0.0))
    with pytest.raises(ConfigError, match="probe is 0; expected at least 1 round"):
        StaleRate(COST, probe=0)


def test_the_decision_looks_at_blocks_that_are_lag_rounds_old_or_older():
    """The newest one is left out at lag 2 until a round has rested behind it, and lag 3 leaves out two."""
    two, three = StaleRate(COST, memory=1), StaleRate(COST, lag=3, memory=1)
    stale = past(GOOD, POOR, POOR, depth=3)
    assert planned(two, stale, [0]) and not planned(two, stale, [1]) and not planned(two, stale, [9])
    stale = past(GOOD, GOOD, POOR, depth=3)
    assert planned(three, stale, [0]) and not planned(three, stale, [1]) and not planned(three, stale, [2])


def test_every_sixteenth_round_drafts_and_a_better_text_is_noticed():
    schedule = Schedule(StaleRate(COST, memory=1))
    plan, step = jax.jit(schedule.plan), jax.jit(schedule.step)
    stale, drafted, one = schedule.init(1, 2), [], jnp.ones(1, jnp.int32)
    fresh = replace(init_requests(1, 2, 8, 1), active=one > 0)
    for t in range(70):
        logit = -1.0 if t < 45 else 2.0
        requests = replace(fresh, confidence=jnp.full((1, 2), logit), num_drafts=2 * one, emitted=(t + 1) * one)
        decision = plan(requests, one, stale)
        assert decision is not None
        if not decision.rest:
            drafted.append(t)
        requests, stale = step(requests, one, stale, None, decision)
        assert decision.rest <= (requests.num_drafts[0] == 0)
    # Two rounds without an old enough block; then one in sixteen. The block of round 49 is two rounds old in round 51.
    assert drafted == [0, 1, 1 + PROBE, 1 + 2 * PROBE, 1 + 3 * PROBE, *range(3 + 3 * PROBE, 70)]


def test_one_decision_on_all_ranks():
    """From the sums over the ranks; and one rank whose slots must look again makes all of them draft."""
    scheduler = StaleRate(StepCost((9, *ROWS[1:], 2.15, 2.4, 2.65), plain=PLAIN), memory=1)
    both = past(POOR, POOR, depth=2), past(GOOD, GOOD, depth=2)

    def across(first: np.ndarray, second: np.ndarray, rested: list[int]) -> list[bool]:
        block = replace(block_of(np.zeros((2, 2)), stale=np.concatenate([first, second])), rested=np.asarray(rested, np.int32))
        run = jax.shard_map(
            lambda b: scheduler.plan(b, EXPERT)[0][None], mesh=make_mesh(1, 2, jax.devices()[:2]), in_specs=P(EXPERT),
            out_specs=P(EXPERT), check_vma=False,
        )  # fmt: skip
        return np.asarray(jax.jit(run)(block)).tolist()

    assert across(both[0], both[0], [0, 0]) == [True, True]
    assert across(both[0], both[1], [0, 0]) == [False, False]  # 4.1 tokens in 1.9 s
    assert across(both[0], both[0], [0, PROBE - 1]) == [False, False]


# Inside decoding rounds.

VOCAB, GAMMA, ROUNDS, MAX_LEN = 24, 3, 60, 300


@pytest.mark.parametrize("verify", [REJECTION, COUPLED])
def test_the_text_is_plain_decodings_the_drafter_does_not_run_and_its_context_is_whole(verify, monkeypatch):
    """Confidences by token: a text that comes and goes between hope and doubt."""
    ran, propose = [], LookupDrafter.propose

    def noted(*inputs):
        jax.debug.callback(lambda: ran.append(1))
        return propose(*inputs)

    monkeypatch.setattr(LookupDrafter, "propose", noted)
    rng = np.random.default_rng(0)
    base = rng.normal(0, 1.5, (VOCAB, VOCAB))
    target = LookupTarget(jnp.asarray(base + rng.normal(0, 0.5, (VOCAB,) * 3), jnp.float32))
    said = np.where(np.arange(VOCAB) % 2, 3.0, -3.0)
    drafter = LookupDrafter(jnp.asarray(np.tile(base, (GAMMA, 1, 1)), jnp.float32), jnp.asarray(np.tile(said, (GAMMA, 1))))
    cost = StepCost(tuple(1 + 0.1 * n for n in range(9)), plain=(0.8,))
    schedule = Schedule(StaleRate(cost, memory=1, probe=4))
    fresh = begin(target, drafter, state(2, temperature=0.0), jnp.asarray([1, 2]), MAX_LEN)
    fresh = replace(fresh, stale=schedule.init(2, GAMMA))
    run = jax.jit(lambda s: rounds(target, drafter, s, MAX_LEN, ROUNDS, schedule=schedule, verify=verify))
    end, emission = jax.device_get(run(fresh))
    jax.effects_barrier()
    rested = emission.rested[:, 0].astype(bool)
    assert (emission.rested == emission.rested[:, :1]).all() and 10 < rested.sum() < ROUNDS - 10
    assert len(ran) == ROUNDS - rested.sum()
    assert (emission.verified[1:][rested[:-1]] == 0).all() and emission.verified[1:][~rested[:-1]].any()
    np.testing.assert_array_equal(end.draft_cache.length, end.requests.length)  # nothing is missing, rested or not
    for slot, first in ((0, 1), (1, 2)):
        line = [0, first]
        for token in np.concatenate([t[:n] for t, n in zip(emission.token[:, slot], emission.count[:, slot], strict=True)]):
            line.append(int(np.asarray(target.table)[line[-2], line[-1]].argmax()))
            assert line[-1] == token
