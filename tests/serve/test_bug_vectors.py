"""Faults that other engines had in serving a drafter on a pipeline, each as a small test (the names keep their public ids).

More of them are where what they try is tested: B1, B3, B9, B15, B19, B39, B40 in test_engine.py, B16 in test_scheduler.py,
B2, B4, B8, B10, B11, B12, B14 in parallel/test_ring.py, B18, B21, B28, B29, B45 in models/test_bug_vectors.py. Two have no
counterpart here, or half of one:
  B19 prefix caching restored tokens without draft context: there is no prefix cache; the test covers state never written.
  B24 cache slots taken from multimodal rotary positions: text only, a row's one position is its index.
"""

import dataclasses
import functools

import flax.struct
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.decode.logprobs import Logprobs
from dspark_jax.decode.protocols import Proposal
from dspark_jax.decode.round import init_requests
from dspark_jax.decode.sampling import SamplingParams
from dspark_jax.decode.state import decode_item
from dspark_jax.parallel.mesh import make_mesh
from dspark_jax.parallel.ring import Ring, RingConfig
from dspark_jax.parallel.stage import PipelineSpec, Ranges
from helpers import ticks
from helpers.mesh_model import CONFIG, DRAFT, GAMMA, MAX_LEN, VOCAB, engine, lm, model

SLOTS, LENGTH = 2, 30


@pytest.fixture
def raw_logits(monkeypatch: pytest.MonkeyPatch):
    """Rings traced meanwhile give out the target's raw logits [R, gamma+1, V], as `emission.logprobs.top`."""

    def give(logits, tokens, *_):
        return Logprobs(jnp.zeros(tokens.shape), jnp.zeros(logits.shape, jnp.int32), logits)

    def nothing(slots, width, _):
        return give(jnp.zeros((slots, width, VOCAB)), jnp.zeros((slots, width)))

    monkeypatch.setattr("dspark_jax.decode.round.committed_logprobs", give)
    monkeypatch.setattr("dspark_jax.parallel.ring.no_logprobs", nothing)


@functools.cache
def chunks(microbatches: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """(start, count) [microbatch, slot] of calls that read LENGTH tokens a slot in chunks of 1 … gamma + 1."""
    rng = np.random.default_rng(2)
    start, found = np.zeros((microbatches, SLOTS), np.int32), []
    while start.min() < LENGTH:
        count = np.minimum(rng.integers(1, GAMMA + 2, start.shape), LENGTH - start).astype(np.int32)
        found.append((start.copy(), count))
        start += count
    return found


def forced_logits(ranges: Ranges, draft) -> list[np.ndarray]:
    """Logits [slot, V] behind every chunk of a given text, tick by tick. Every chunk is final: a block is drafted behind
    it, and thrown away by the next.
    """
    pipe = len(ranges)
    mesh = make_mesh(pipe, 1)
    ring = Ring(PipelineSpec(CONFIG, draft, ranges, 1), model()[1], mesh, RingConfig(SLOTS, MAX_LEN, chunk=GAMMA + 1))
    params, state = ring.pipeline.place(model()[1], mesh), ring.init_state()
    text = np.random.default_rng(1).integers(0, VOCAB, (pipe, SLOTS, LENGTH + GAMMA + 1))
    ticks = []
    for start, count in [*chunks(pipe), chunks(pipe)[-1]]:
        record = ring.idle_control()
        record.admit[:], record.final[:], record.bucket[:] = count > 0, count > 0, 1
        record.fresh[:], record.start[:], record.count[:] = start == 0, start, count
        record.max_tokens[:] = MAX_LEN
        for at in np.ndindex(*start.shape):
            part = text[at][start[at] : start[at] + count[at]]
            record.token[at][: len(part)] = part
        state, output = ring.step(params, state, ring.place_control(record))
        ticks += list(np.asarray(output.emission.logprobs.top)[-1, :, :, 0])
    return ticks[pipe - 1 :][: pipe * len(chunks(pipe))]  # the last rank answers pipe - 1 ticks later


@pytest.mark.long
@pytest.mark.parametrize("ranges", [((0, 4),), ((0, 2), (2, 4))], ids=["1x1", "2x1"])
def test_b17_target_logits_are_bit_equal_with_and_without_a_drafter(raw_logits, ranges):
    """The same text in the same chunks, gamma + 1 rows a slot as in a decoding round. With the drafter attached, taps are
    projected, the caches are larger by the drafts that may be rejected, and every tick writes context and drafts a block.
    """
    attached, alone = forced_logits(ranges, DRAFT), forced_logits(ranges, None)
    counts = [count for _, counts in chunks(len(ranges)) for count in counts]
    assert {*np.concatenate(counts)} >= {1, 2, 3}
    for a, b, count in zip(attached, alone, counts, strict=True):
        np.testing.assert_array_equal(a[count > 0], b[count > 0])
        assert (np.abs(a[count > 0]).max(axis=1) > 0.1).all()


def test_b5_a_running_request_takes_part_however_near_its_end_is():
    """Only the slot's own state says whether it decodes; no guess that it is about to finish."""
    ones = jnp.ones(3, jnp.int32)
    requests = dataclasses.replace(
        init_requests(3, GAMMA, VOCAB, 1),
        length=jnp.array([5000, 4100, 5000]),
        emitted=jnp.array([900, 0, 900]),
        max_tokens=jnp.array([900, 900, 901]),
        num_drafts=GAMMA * ones,
        active=jnp.array([True, True, False]),
    )
    item = decode_item(requests, GAMMA)
    assert item.final.tolist() == [True, True, False] and item.count.tolist() == [GAMMA + 1, GAMMA + 1, 0]


def test_b5_every_rank_works_on_the_same_rows_to_the_end():
    """Requests that end by limit and context, and one that is aborted: what rank 0 does, rank 1 does a tick later."""
    e = engine(2, 2)
    while e.busy:
        e.step()
    e.timeline.clear()
    keys = [e.submit([i] * 5, SamplingParams(max_tokens=3 + 7 * i), ignore_eos=True) for i in range(3)]
    keys.append(e.submit([1] * (MAX_LEN - 5), SamplingParams(max_tokens=30), ignore_eos=True))
    for step in range(200):
        if step == 6:
            e.abort(keys[2])
        if not e.busy:
            break
        e.step()
    reasons = [e.result(key).finish_reason for key in keys]
    first, second = np.array([tick.rows for tick in e.timeline]).T
    assert set(reasons) == {"length", "abort", "context"} and first.sum() > 60
    np.testing.assert_array_equal(first[:-1], second[1:])


@flax.struct.dataclass
class PositionDrafter:
    """Drafts the number of the position that it takes a draft to stand at: `first` behind the anchor, and so on."""

    first: int = flax.struct.field(pytree_node=False)

    @property
    def block_size(self) -> int:
        return ticks.GAMMA

    def init_cache(self, slots, max_len):
        return jnp.zeros((slots, 1))

    def write_context(self, context, rows, keep, cache):
        return cache

    def propose(self, anchor, position, active, sampling, cache, draft_noise):
        token = (position[:, None] + self.first + jnp.arange(self.block_size)) % ticks.VOCAB
        logits = jnp.where(jnp.arange(ticks.VOCAB) == token[..., None], 0.0, -jnp.inf).astype(jnp.bfloat16)
        return Proposal(token, logits, jnp.zeros(token.shape))


@pytest.mark.parametrize(("first", "accepted"), [(1, ticks.GAMMA), (0, 0)])
def test_b22_draft_k_stands_one_behind_row_k(first, accepted):
    """Row k of the block stands at the anchor's position + k, and its draft at the next one: token = position here."""
    target, drafter = ticks.counting(), PositionDrafter(first)
    state = ticks.start(target, drafter, [SamplingParams(max_tokens=ticks.WITHOUT_LIMIT)])
    state, _ = ticks.prefill(target, drafter, state, [[0, 1, 2]] + [[]] * (ticks.SLOTS - 1))
    _, emissions = ticks.decode(target, drafter, state, 3)
    assert [int(e.accepted[0]) for e in emissions] == [accepted] * 3
    assert ticks.text(emissions, 0) == [(4 + i) % ticks.VOCAB for i in range(3 * (accepted + 1))]


def test_b23_a_rank_writes_its_own_requests_alone():
    """One request on four devices: in every cache of both pipeline ranks its lane changes, and no other."""
    e = engine(2, 2)
    e.generate([[1, 2]] * e.slots, SamplingParams(max_tokens=4))  # requests that another test aborted are off the devices now

    def kept():
        """Bits, since another test leaves NaN; without the trash slots, which idle lanes write to."""
        return {k: np.array(x).view(np.int32)[:, :, :-1] for k, x in e._state.caches.items()}

    before = kept()
    key = e.submit([1, 2, 3] * 6, SamplingParams(max_tokens=10))
    e.step()
    microbatch, slot = e._scheduler.running[key].slot
    e.result(key)
    rank, lane = divmod(slot, e.ring.local_slots)
    lane += e.ring.lanes * rank + microbatch * e.ring.local_slots
    changed = {k: np.argwhere((before[k] != x).any(axis=tuple(range(2, x.ndim)))) for k, x in kept().items()}
    assert {int(at) for places in changed.values() for _, at in places} == {lane}
    assert {int(at) for places in changed.values() for at, _ in places} == {0, 1}


@pytest.mark.long
def test_b42_as_many_rows_in_another_shape_are_another_program():
    """Twelve prompt tokens of one request, two of each of six, twelve again: the answers of each request alone."""
    e, rng = engine(2, 1, chunk=8), np.random.default_rng(8)
    batches = [[rng.integers(0, VOCAB, n).tolist() for _ in range(12 // n)] for n in (12, 2, 12)]
    params = SamplingParams(max_tokens=8)
    for prompts in batches:
        expected = [lm().generate([prompt], params)[0].tokens for prompt in prompts]
        assert [c.tokens for c in e.generate(prompts, params)] == expected
