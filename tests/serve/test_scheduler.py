"""The host's half of continuous batching, without a device: slots, chunks, aborts, generations."""

import jax
import numpy as np
import pytest

from dspark_jax.decode.batch import Request
from dspark_jax.decode.item import idle_control
from dspark_jax.decode.sampling import SamplingParams
from dspark_jax.decode.state import STOP, Emission
from dspark_jax.serve.scheduler import Scheduler, slot_counts

CHUNK = 4


def scheduler(microbatches=2, slots=4, expert=2) -> Scheduler:
    return Scheduler(microbatches, slots, expert, CHUNK)


def record(s: Scheduler):
    one = idle_control(s.slots, CHUNK, 8)
    return jax.tree.map(lambda x: np.stack([x] * s.microbatches), one)


def request(length: int, **params) -> Request:
    return Request(tuple(range(1, length + 1)), SamplingParams(**params), (7,))


def emission(s: Scheduler, ticks: int = 1):
    zero = np.zeros((ticks, s.slots), np.int32)
    e = Emission(np.zeros((ticks, s.slots, 3), np.int32), zero.copy(), zero.copy(), zero.copy(), zero.copy())
    return e, zero.copy()


def test_prompts_go_in_chunks_and_the_last_one_is_final():
    s = scheduler(1, 1, 1)
    s.submit("a", request(9, temperature=0.5, top_k=3, top_p=0.25, seed=11, max_tokens=17))
    seen = []
    for _ in range(4):
        r = s.plan(record(s))
        seen.append((bool(r.admit[0, 0]), int(r.start[0, 0]), int(r.count[0, 0]), bool(r.fresh[0, 0]), bool(r.final[0, 0])))
        if r.admit[0, 0]:
            assert r.token[0, 0, : r.count[0, 0]].tolist() == list(range(1 + r.start[0, 0], 1 + r.start[0, 0] + r.count[0, 0]))
    idle = (False, 0, 0, False, False)
    assert seen == [(True, 0, 4, True, False), (True, 4, 4, False, False), (True, 8, 1, False, True), idle]
    first = scheduler(1, 1, 1)
    first.submit("a", request(9, temperature=0.5, top_k=3, top_p=0.25, seed=11, max_tokens=17))
    r = first.plan(record(first))
    own = r.sampling
    assert (own.temperature[0, 0], own.top_k[0, 0], own.top_p[0, 0], own.seed[0, 0]) == (0.5, 3, 0.25, 11)
    assert r.max_tokens[0, 0] == 17 and r.stop[0, 0].tolist() == [7] + [-1] * 7


def test_requests_spread_over_microbatches_and_expert_ranks():
    s = scheduler()
    for i in range(4):
        s.submit(i, request(1))
    s.plan(record(s))
    where = [run.slot for run in s.running.values()]
    assert sorted(m for m, _ in where) == [0, 0, 1, 1]
    assert sorted((m, slot // 2) for m, slot in where) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_the_bucket_is_the_same_for_all_slots_of_a_microbatch():
    s = scheduler()
    s.submit(0, request(9))
    r = s.plan(record(s))
    assert r.admit.sum() == 1
    assert r.bucket.tolist() == [[1] * 4, [0] * 4]


def test_more_requests_than_slots_wait_in_order():
    s = scheduler(1, 2, 1)
    for i in range(3):
        s.submit(i, request(1))
    s.plan(record(s))
    assert list(s.running) == [0, 1] and [key for key, _ in s.waiting] == [2]
    e, generation = emission(s)
    run = s.running[0]
    e.count[0, run.slot[1]], e.reason[0, run.slot[1]], generation[0, run.slot[1]] = 1, STOP, run.generation
    commits = list(s.absorb(e, generation))
    assert [(c.key, c.finish_reason, c.prefill) for c in commits] == [(0, "stop", True)]
    s.plan(record(s))
    assert list(s.running) == [1, 2] and not s.waiting


def test_a_commit_of_an_older_generation_is_dropped():
    """An aborted request's tokens that were in flight must not reach the slot's next request."""
    s = scheduler(1, 1, 1)
    s.submit("old", request(1))
    s.plan(record(s))
    old = s.running["old"].generation
    assert s.abort("old")
    s.submit("new", request(1))
    r = s.plan(record(s))
    assert r.abort[0, 0] and r.fresh[0, 0] and r.generation[0, 0] == s.running["new"].generation != old
    e, generation = emission(s)
    e.count[0, 0], generation[0, 0] = 2, old
    assert list(s.absorb(e, generation)) == []
    generation[0, 0] = s.running["new"].generation
    assert [c.key for c in s.absorb(e, generation)] == ["new"]
    assert s.running["new"].generation in s._by_generation


def test_b16_the_order_of_aborts_does_not_change_the_record():
    records = []
    for order in ((0, 1, 2), (2, 0, 1)):
        s = scheduler()
        for i in range(6):
            s.submit(i, request(6))
        s.plan(record(s))
        for key in order:
            s.abort(key)
        for i in range(6, 9):
            s.submit(i, request(6))
        records.append(s.plan(record(s)))
    for a, b in zip(*map(jax.tree.leaves, records), strict=True):
        np.testing.assert_array_equal(a, b)


def test_abort_frees_the_slot_and_tells_the_device_once():
    s = scheduler(1, 1, 1)
    s.submit("a", request(1))
    s.plan(record(s))
    assert s.abort("a") and not s.abort("a") and s.busy
    assert s.plan(record(s)).abort.sum() == 1
    assert not s.busy and s.plan(record(s)).abort.sum() == 0
    s.submit("b", request(1))
    s.submit("c", request(1))
    assert s.abort("c") and [key for key, _ in s.waiting] == ["b"]


def test_a_long_prompt_does_not_hold_up_decoding():
    """Each call takes one chunk of the long prompt and leaves the other slots to decode."""
    s = scheduler(1, 2, 1)
    s.submit("long", request(40))
    s.submit("short", request(2))
    calls = [s.plan(record(s)) for _ in range(10)]
    at = s.running["short"].slot
    assert [bool(r.admit[at]) for r in calls] == [True] + [False] * 9
    assert sum(int(r.count.sum()) for r in calls) == 42


@pytest.mark.parametrize(("slots", "pipe", "expert"), [(6, 2, 2), (0, 1, 1), (2, 2, 2)])
def test_impossible_slots_are_refused(slots, pipe, expert):
    _, faults = slot_counts(slots, pipe, expert)
    assert len(faults) == 1 and f"slots is {slots}" in faults[0] and str(pipe * expert) in faults[0]


def test_running_commits_carry_what_the_tick_said():
    s = scheduler(1, 2, 1)
    s.submit("a", request(1))
    s.plan(record(s))
    e, generation = emission(s, ticks=2)
    slot = s.running["a"].slot[1]
    e.token[0, slot], e.count[0, slot], generation[:, slot] = [5, 0, 0], 1, s.running["a"].generation
    e.token[1, slot], e.count[1, slot], e.accepted[1, slot], e.verified[1, slot] = [6, 8, 9], 3, 2, 2
    first, second = s.absorb(e, generation)
    assert first.prefill and first.tokens == (5,) and first.finish_reason is None
    assert not second.prefill and second.tokens == (6, 8, 9) and (second.accepted, second.verified) == (2, 2)
