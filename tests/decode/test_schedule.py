"""What each scheduler chooses: worked numbers, the rule about what a choice may know, ties, padding, ranks."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.decode.round import init_requests
from dspark_jax.decode.schedule import (
    Block,
    EarlyStop,
    FixedLength,
    Schedule,
    Scheduler,
    StaleRate,
    StaleSize,
    StepCost,
    Threshold,
    expected_rate,
    survival,
)
from dspark_jax.decode.schedule.order import admission_rank, admitted
from dspark_jax.errors import ConfigError
from helpers.blocks import JAGGED, RISING, STAIRS, THREE, block_of, lengths, random_block, stale_of, thresholds_of
from helpers.scheduling import Retrospective


@partial(jax.jit, static_argnums=0)
def sized(scheduler: StaleSize, block: Block):
    """Rates by number of drafts, the drafts there are, and the size."""
    return *scheduler.rates(block), scheduler.size(block)


# Worked numbers, by vLLM's rule.


def test_survival_is_the_product_of_the_confidences():
    np.testing.assert_allclose(
        survival(jnp.asarray(THREE)), [[0.9, 0.72, 0.36], [0.6, 0.3, 0.27], [0.95, 0.855, 0.72675]], rtol=1e-6
    )
    assert survival(jnp.asarray([[np.nan, 1.0], [0.5, np.nan]])).tolist() == [[0, 0], [0.5, 0]]


def test_rounding_never_makes_survival_rise():
    confidence = np.random.default_rng(0).uniform(1 - 1e-6, 1, (20_000, 7)).astype(np.float32)
    assert (np.diff(jax.jit(survival)(confidence), axis=1) <= 0).all()


def test_the_size_of_the_worked_example():
    block = block_of(THREE, stale=stale_of(THREE))
    rate, drafts, size = sized(StaleSize(STAIRS), block)
    expected = [0.5, 0.6583, 0.7462, 0.8777, 0.9895, 1.1003, 0.7752, 0.8112, 0.8412, 0.8682]
    np.testing.assert_allclose(rate, expected, atol=6e-5)
    assert int(drafts) == 9 and int(size) == 5
    assert lengths(StaleSize(STAIRS), block) == [2, 0, 3]
    # The packed batch: rows up to each request's end, as vLLM's cu_num_logits.
    assert np.cumsum([0, *(1 + n for n in lengths(StaleSize(STAIRS), block))]).tolist() == [0, 3, 4, 8]


def test_a_cliff_stops_algorithm_1_and_not_the_global_search():
    block = block_of(THREE, stale=stale_of(THREE))
    rate, _, size = sized(StaleSize(JAGGED), block)
    assert float(rate[0]) == pytest.approx(0.5) and float(rate[1]) == pytest.approx(0.4817, abs=5e-5)
    assert int(size) == 5 and float(rate[5]) == pytest.approx(0.8617, abs=5e-5)
    assert lengths(StaleSize(JAGGED), block) == [2, 0, 3]
    assert lengths(EarlyStop(JAGGED), block) == [0, 0, 0]
    # Within four rows every draft pays, and the next step costs too much at once.
    assert lengths(EarlyStop(STAIRS), block) == [2, 0, 3]


def test_the_size_is_chosen_by_the_older_round_and_the_drafts_by_todays():
    old, today = np.asarray(THREE), np.asarray(THREE)[::-1]
    stale = np.stack([stale_of(today)[:, 0], stale_of(old)[:, 0]], axis=1)  # newest first
    stale[:, 0] = 0  # the last round would have chosen 0
    assert int(sized(StaleSize(STAIRS), block_of(today, stale=stale))[-1]) == 5
    assert lengths(StaleSize(STAIRS), block_of(today, stale=stale)) == [3, 0, 2]
    assert int(sized(StaleSize(STAIRS, lag=1, memory=1), block_of(today, stale=stale))[-1]) == 0


# The paper's appendix A: one request, gamma = 2; and the same with other numbers.

PAPER = StepCost.of_rates((1, 0.5, 0.45))


@pytest.mark.parametrize(("second", "rates", "retrospective"), [
    (0.9, [1, 0.9, 1.134], 2), (0.0, [1, 0.9, 0.81], 0), (0.95, [1, 0.9, 1.152], 2),
])  # fmt: skip
def test_the_papers_counterexample(second, rates, retrospective):
    block = block_of([[0.8, second]])
    tokens = 1 + jnp.concatenate([jnp.zeros(1), jnp.cumsum(survival(block.confidence)[0])])
    np.testing.assert_allclose(expected_rate(PAPER, jnp.asarray(1), tokens), rates, rtol=1e-6)
    assert lengths(EarlyStop(PAPER), block) == [0]
    assert lengths(Retrospective(PAPER), block) == [retrospective]


def test_the_counterexample_costs_a_law():
    """Pr(A) when the length is 2 behind A and 0 behind B: q(A) min(1, p/q) + q(B) p(A)."""
    for p, q, spoiled in [((0.7, 0.3), (0.5, 0.5), 0.85), ((0.6, 0.4), (0.4, 0.6), 0.76)]:
        assert q[0] * min(1, p[0] / q[0]) + q[1] * p[0] == pytest.approx(spoiled)


# Ties: higher survival, then smaller position, then smaller slot.


def test_ties_go_to_the_smaller_position_then_to_the_smaller_slot():
    block = block_of([[0.5, 1.0, 1.0]] * 2)
    rank, gains = admission_rank(survival(block.confidence), block.candidates)
    assert rank.tolist() == [[0, 2, 4], [1, 3, 5]] and gains.tolist() == [0.5] * 6
    chosen = [admitted(rank, block.candidates, jnp.asarray(k)).tolist() for k in range(7)]
    assert chosen == [[0, 0], [1, 0], [1, 1], [2, 1], [2, 2], [3, 2], [3, 3]]


def test_equal_rates_go_to_the_smaller_size():
    even = StepCost((0, 1, 2, 3))  # every draft brings one token and costs one second
    assert lengths(StaleSize(even), block_of([[1.0, 1.0]])) == [0]
    assert lengths(EarlyStop(even), block_of([[1.0, 1.0]])) == [0]


def test_no_size_is_planned_that_the_drafts_cannot_fill():
    """Three rows would be cheap, but there is one draft, and it promises nothing."""
    valley = StepCost((0, 10, 10, 1, 1))
    assert lengths(StaleSize(valley), block_of([[1.0, 1.0, 1.0]], room=[1], stale=np.zeros((1, 2, 3)))) == [0]
    assert lengths(StaleSize(valley), block_of([[1.0, 1.0, 1.0]], room=[3], stale=np.zeros((1, 2, 3)))) == [2]


# One slot at a time.


def test_fixed_length_and_threshold():
    block = block_of([[0.9, 0.8, 0.5], [0.6, 0.5, 0.9], [0.2, 0.9, 0.9], [0.9, np.nan, 0.9]], room=[3, 3, 3, 3])
    assert lengths(FixedLength(2), block) == [2] * 4
    assert lengths(FixedLength(), block) == [3] * 4
    assert lengths(Threshold(0.6), block) == [2, 1, 0, 1]
    assert lengths(Threshold(0.0), block) == lengths(Threshold(-1.0), block) == [3] * 4
    short = replace(block, room=jnp.asarray([1, 0, 2, 3]))
    assert lengths(FixedLength(2), short) == [1, 0, 2, 2]
    assert lengths(Threshold(0.1), short) == [1, 0, 2, 1]


# Algorithm 1 word for word.


def algorithm_1(confidence: np.ndarray, room: np.ndarray, seconds: np.ndarray) -> list[int]:
    a = np.cumprod(confidence, axis=1)
    ready = [(-a[r, j], j, r) for r in range(len(a)) for j in range(room[r]) if a[r, j] > 0]
    live, rows = len(a), len(a)
    tokens = float(live)
    best, chosen = tokens / seconds[rows], [0] * live
    for survives, _, r in sorted(ready):
        tokens, rows = tokens - survives, rows + 1
        if tokens / seconds[rows] <= best:
            break
        best = tokens / seconds[rows]
        chosen[r] += 1
    return chosen


def test_early_stop_is_algorithm_1():
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(200):
        block = random_block(rng)
        expected = algorithm_1(np.asarray(block.confidence, np.float64), np.asarray(block.room), np.asarray(RISING.rows))
        assert lengths(EarlyStop(RISING), block) == expected
        seen.add(tuple(expected))
    assert len(seen) > 40


# The rule: whether a draft is verified does not depend on the confidences behind its own.

RULED: dict[str, Scheduler] = {
    "fixed": FixedLength(2), "threshold": Threshold(0.5), "early stop": EarlyStop(RISING), "stale": StaleSize(RISING),
    "stale rate": StaleRate(RISING), "stale by one": StaleSize(BROAD := StepCost((*[1.0] * 5, *[1.6] * 4, *[1.9] * 16)), lag=1),
}  # fmt: skip


def told(scheduler: Scheduler, cases: int = 2000) -> int:
    """How many decisions change with a confidence that has seen the draft in question."""
    rng = np.random.default_rng(1)
    block = jax.tree.map(lambda *x: np.stack(x), *[random_block(rng) for _ in range(cases)])
    other, case = np.array(block.confidence), np.arange(cases)
    slot, draft = rng.integers(4, size=cases), rng.integers(4, size=cases)
    behind = np.arange(5) > draft[:, None]
    other[case, slot] = np.where(behind, rng.choice(np.float32([0, 0.5, 1]), behind.shape), other[case, slot])
    run = jax.jit(jax.vmap(scheduler.lengths))
    before, after = (np.asarray(run(b))[case, slot] for b in (block, replace(block, confidence=other)))
    return int(((before > draft) != (after > draft)).sum())


@pytest.mark.parametrize("name", RULED)
def test_a_draft_is_not_judged_by_what_has_seen_it(name):
    assert told(RULED[name]) == 0


def test_the_forbidden_search_breaks_the_rule():
    assert told(Retrospective(BROAD)) > 30


# Padding and idle slots.


@pytest.mark.parametrize("name", RULED)
def test_idle_slots_hold_anything_and_count_for_nothing(name):
    scheduler = RULED[name]
    rng = np.random.default_rng(2)
    for _ in range(30):
        block = random_block(rng)
        some = lengths(scheduler, block)
        idle = lambda x, bad: np.concatenate([x, np.full((2, *x.shape[1:]), bad, x.dtype)])  # noqa: E731
        for bad in (np.nan, np.inf):
            wide = Block(idle(block.confidence, bad), idle(block.room, 0), idle(block.active, False), idle(block.stale, bad))
            assert lengths(scheduler, wide) == [*some, 0, 0]


def test_no_active_slot_verifies_nothing():
    block = replace(block_of(np.ones((4, 5)), np.zeros(4)), active=np.zeros(4, bool))  # programs of these sizes are there
    for scheduler in (*RULED.values(), EarlyStop(PAPER), StaleSize(PAPER), StaleRate(PAPER)):
        assert lengths(scheduler, block) == [0] * 4


def test_a_batch_behind_the_tables_end_is_never_planned():
    block = block_of([[1.0, 1.0, 1.0]] * 2)
    flat = StepCost((0, 1, 1, 1, 1))  # up to four rows; free until then
    for kind in (EarlyStop, StaleSize, StaleRate):
        assert lengths(kind(flat), block) == [1, 1]


# What earlier blocks promised.


def tokens_of(scheduler: StaleSize, block: Block) -> np.ndarray:
    return np.asarray(jax.jit(lambda b: scheduler.expected(b).tokens)(block))


@pytest.mark.long
def test_few_requests_are_judged_by_the_mean_of_many_rounds():
    flat = StepCost((1.0,) * 400)
    old = np.float32([[[0.1, 0.0], [0.9, 0.5], [0.7, 0.1], [0.2, 0.0]]])  # one slot, newest first
    block = block_of([[0.5, 0.5]], stale=old)
    assert tokens_of(StaleSize(flat, lag=1, memory=2), block) == pytest.approx([1, 1.5, 1.75])
    assert tokens_of(StaleSize(flat, memory=2), block) == pytest.approx([1, 1.8, 2.1])
    assert tokens_of(StaleSize(flat, memory=9), block) == pytest.approx([1, 1.6, 1.8])
    assert tokens_of(StaleSize(flat), block_of([[0.5, 0.5]])) == pytest.approx([1, 2, 3])  # nothing is known
    # Rounds are ordered one by one: two requests that take turns are two drafts worth while in every round.
    turns = np.float32([[[0, 0], [0.9, 0.8], [0, 0]], [[0, 0], [0, 0], [0.9, 0.8]]])
    assert tokens_of(StaleSize(flat), block_of([[0.5, 0.5]] * 2, stale=turns)) == pytest.approx([2, 2.9, 3.7, 3.7, 3.7])
    # 64 blocks are enough: with 40 requests two rounds, with 64 one.
    for requests, mean in ((40, 0.5), (63, 0.5), (64, 0.75)):
        many = block_of([[0.5]] * requests, stale=np.tile(np.float32([[0], [0.75], [0.25], [0.01]]), (requests, 1, 1)))
        assert tokens_of(StaleSize(flat), many)[-1] == pytest.approx(requests * (1 + mean))


def test_a_young_requests_blocks_are_repeated():
    """The history is ones where a request had no block; a block that was sure of itself is none of these."""
    schedule = Schedule(StaleSize(StepCost((1.0,) * 9), memory=3))
    requests, stale = requests_of(np.full((2, 3), 40.0), [3, 3], [2, 9]), schedule.init(2, 3)
    step = jax.jit(schedule.step)
    for logit, emitted in ((40.0, 1), (0.0, 2), (0.0, 3)):
        requests = replace(requests, confidence=jnp.full((2, 3), logit), emitted=jnp.asarray([emitted, 9]))
        _, stale = step(requests, jnp.ones(2, jnp.int32), stale)
    stale = stale.at[1, 2:].set(jnp.asarray([[0.5, 0.5, 0.5], [0.5, 0.25, 0.25]]))  # slot 1 has a longer past
    sure, even = [1, 1, 1], [0.5, 0.25, 0.125]
    # Of slot 0 two blocks are two rounds old or older: the even one, the sure one, and the even one again.
    first, other = np.sort([even, sure, even]), np.sort([even, [0.5] * 3, [0.5, 0.25, 0.25]])
    rounds = np.sort(np.concatenate([first, other], axis=1))[:, ::-1]
    block = block_of(np.full((2, 3), 0.5), stale=np.asarray(stale))
    assert tokens_of(StaleSize(StepCost((1.0,) * 9), memory=3), block) == pytest.approx(2 + np.r_[0, rounds.mean(0).cumsum()])


# Algorithm 1 with foresight.


def test_the_thresholds_of_the_worked_example():
    block = block_of(THREE, stale=stale_of(THREE))
    gains = np.sort(np.asarray(survival(jnp.asarray(THREE))).ravel())[::-1].astype(np.float64)
    for cost in (STAIRS, JAGGED, StepCost(tuple(1 + 0.05 * n for n in range(13)))):
        np.testing.assert_allclose(StaleRate(cost).thresholds(block), thresholds_of(cost, 3, gains), atol=1e-5)


def test_foresight_passes_a_cliff_and_stops_at_todays_doubts():
    old = stale_of(THREE)
    assert lengths(EarlyStop(JAGGED), block_of(THREE, stale=old)) == [0, 0, 0]
    assert lengths(StaleRate(JAGGED), block_of(THREE, stale=old)) == [2, 0, 3]  # as the whole search, from equal confidences
    assert lengths(StaleRate(JAGGED), block_of(np.asarray(THREE) * 0.2, stale=old)) == [0, 0, 0]
    # What would be verified does not depend on what today's block promises behind the cliff, but on what earlier ones did.
    alone = old * (np.arange(9).reshape(3, 1, 3) == 6)  # there was one draft that was worth .95, and the cliff takes 1.1
    assert lengths(StaleRate(JAGGED), block_of(THREE, stale=alone)) == [0, 0, 0]


def test_foresight_lets_today_decide_how_many():
    """A draft must promise .63: .3 s at 2.1 tokens a second, from five drafts in 3.4 s."""
    slope, old = StepCost(tuple(1 + 0.3 * n for n in range(13))), stale_of(THREE)
    for today, expected in (([1, 0.1, 0.1], [1, 0, 1]), ([1, 1, 1.1], [2, 0, 3]), ([1, 1.24, 1.18], [2, 0, 3])):
        block = block_of(np.minimum(np.asarray(THREE) * today, 1), stale=old)
        assert lengths(StaleRate(slope), block) == expected
        assert sum(lengths(StaleSize(slope), block)) == 5


def test_equal_blocks_are_not_worth_an_equal_price():
    even = StepCost((0, 1, 2, 3))
    assert lengths(StaleRate(even), block_of([[1.0, 1.0]])) == [0]


# The schedule: calibration, and the history by slot.


def requests_of(confidence, room, emitted):
    base = init_requests(len(confidence), 3, 8, 1)
    return replace(
        base, confidence=jnp.asarray(confidence, jnp.float32), num_drafts=jnp.asarray(room), emitted=jnp.asarray(emitted),
        active=jnp.ones(len(confidence), bool),
    )  # fmt: skip


def test_temperatures_divide_the_logits():
    logits = jnp.asarray([[2.0, 1.0, 0.0]])
    raw, calibrated = Schedule(FixedLength()), Schedule(FixedLength(), (2.0, 1.0, 0.5))
    np.testing.assert_allclose(survival(raw.confidence(logits))[0], [0.8808, 0.6439, 0.3220], atol=5e-5)
    np.testing.assert_allclose(survival(calibrated.confidence(logits))[0], [0.7311, 0.5344, 0.2672], atol=5e-5)
    with pytest.raises(ConfigError, match="2 of them for a drafter of block size 3"):
        Schedule(FixedLength(), (1.0, 2.0)).confidence(logits)
    with pytest.raises(ConfigError, match=r"temperatures: 2 faults\n.* 0.0; expected .*\n.*nan"):
        Schedule(FixedLength(), (1.0, 0.0, float("nan")))


def test_the_history_begins_anew_with_a_request_and_waits_with_a_waiting_slot():
    schedule = Schedule(StaleSize(STAIRS))
    logits = np.float32([[0, 0, 0], [1, 1, 1], [2, 2, 2]])
    stale = jnp.full((3, 2, 3), 0.25)
    # Slot 0 has just left its prompt, slot 1 decodes, slot 2 took no part in the tick.
    requests = requests_of(logits, room=[3, 3, 2], emitted=[1, 7, 5])
    after, pushed = jax.jit(schedule.step)(requests, jnp.asarray([1, 2, 0]), stale)
    today = np.asarray(survival(jax.nn.sigmoid(logits)))
    np.testing.assert_allclose(pushed[0], [today[0], np.ones(3)], rtol=1e-6)
    np.testing.assert_allclose(pushed[1], [today[1], np.full(3, 0.25)], rtol=1e-6)
    np.testing.assert_array_equal(pushed[2], np.full((2, 3), 0.25))
    assert after.num_drafts[2] == 2
    # The size took the new request for certain of its drafts, and the other one by its past.
    block = Block(
        jax.nn.sigmoid(jnp.asarray(logits)), jnp.asarray([3, 3, 0]), jnp.asarray([True, True, False]), stale.at[0].set(1)
    )
    assert after.num_drafts[:2].tolist() == lengths(schedule.scheduler, block)[:2]


# Settings.


@pytest.mark.parametrize(("make", "message"), [
    (lambda: FixedLength(-1), "length is -1; expected an integer >= 0"),
    (lambda: Threshold(1.5), "threshold is 1.5; expected a number <= 1"),
    (lambda: StaleSize(PAPER, lag=0), "lag is 0; expected at least 1"),
    (lambda: StaleRate(PAPER, lag=0, memory=0), r"StaleRate: 2 faults\n.*lag is 0.*\n.*memory is 0; expected at least 1"),
    (lambda: StepCost(()), "rows is empty"),
    (lambda: StepCost((0, 1, -1)), r"rows\[2\] = -1; expected finite seconds"),
    (lambda: StepCost((0, 0, 1)), r"rows\[1\] gives a step of no time"),
    (lambda: StepCost.of_rates((1, 0)), r"SPS\(2\); expected a finite rate above 0"),
])  # fmt: skip
def test_impossible_settings_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
