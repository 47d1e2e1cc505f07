"""Faults that other implementations had in models and drafters, each as a small test (the names keep their public ids)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, struct

from dspark_jax.config import RopeConfig
from dspark_jax.decode import round as decode_round
from dspark_jax.decode.program import DecodeProgram
from dspark_jax.decode.protocols import Proposal
from dspark_jax.decode.sampling import SamplingParams, SamplingState
from dspark_jax.decode.state import WorkItem
from dspark_jax.drafters.dspark import DSpark
from dspark_jax.models.attention import Projections
from dspark_jax.models.layers import rope_frequencies, rotate
from dspark_jax.models.moe import MoE
from dspark_jax.parallel.mesh import make_mesh
from dspark_jax.testing import LookupTarget
from helpers.micro import MICRO, micro_model
from helpers.runner import Runner, padded

GAMMA = 3


class Nudged:
    """A target whose embedding adds `delta` [gamma, d] to the rows of every block."""

    def __init__(self, target, delta):
        self.target, self.delta, self.axis = target, delta, target.axis

    def embed_streams(self, token):
        streams = self.target.embed_streams(token)
        return streams + jnp.tile(self.delta, (token.shape[0] // len(self.delta), 1))[:, None, :]


@pytest.fixture(scope="module")
def block_hidden():
    """(delta, anchor, position, history) -> hidden rows [N, gamma, d] of a one-stage drafter."""
    graph, params = nnx.split(micro_model(gamma=GAMMA))

    @jax.jit
    def run(delta, anchor, position, history):
        model = nnx.merge(graph, params)
        n = anchor.shape[0]
        visible = jnp.ones((n, MICRO.sliding_window), bool)
        nudged = Nudged(model.target, delta)
        return model.draft.block(nudged, anchor, position, jnp.ones(n, bool), [history], visible)[0]

    return run


def block_inputs(n: int = 4):
    history = np.random.default_rng(0).normal(size=(n, MICRO.sliding_window, MICRO.head_dim)).astype(np.float32)
    return np.arange(n, dtype=np.int32), np.arange(3, 3 + n, dtype=np.int32), history


def test_b18_rows_of_a_block_see_each_other_in_both_directions(block_hidden):
    """Row 0 depends on the token of the last row; a block with a causal mask would not."""
    inputs = block_inputs()
    last = np.zeros((GAMMA, MICRO.hidden_size), np.float32)
    last[-1] = 1
    plain, nudged = (np.asarray(block_hidden(delta, *inputs)) for delta in (0 * last, last))
    assert (np.abs(nudged - plain).max(axis=2) > 1e-3).all()  # every row of every block
    # Another request's rows do not: the blocks of a batch are apart.
    _anchor, *rest = inputs
    other = np.asarray(block_hidden(0 * last, np.array([0, 1, 2, 0], np.int32), *rest))
    np.testing.assert_array_equal(other[:3], plain[:3])
    assert np.abs(other[3] - plain[3]).max() > 1e-3


def test_b18_also_when_the_batch_is_split(block_hidden):
    inputs = block_inputs()
    last = np.zeros((GAMMA, MICRO.hidden_size), np.float32)
    last[-1] = 1
    for delta in (0 * last, last):
        whole = np.asarray(block_hidden(delta, *inputs))
        halves = [np.asarray(block_hidden(delta, *(x[part] for x in inputs))) for part in (slice(0, 2), slice(2, 4))]
        np.testing.assert_allclose(np.concatenate(halves), whole, rtol=1e-5, atol=1e-5)


@struct.dataclass
class Spy:
    """A drafter that writes down what the round tells it: kept positions in its cache, the block's place as confidence."""

    gamma: int = struct.field(pytree_node=False)

    @property
    def block_size(self) -> int:
        return self.gamma

    def init_cache(self, slots, max_len):
        return jnp.full((slots, 8), -1, jnp.int32)

    def write_context(self, context, rows, keep, cache):
        position = jnp.where(keep, rows.position, -1)
        return jnp.pad(rows.to_lanes(position), ((0, 0), (0, 8 - rows.width)), constant_values=-1)

    def propose(self, anchor, position, active, sampling, cache, draft_noise):
        slots = anchor.shape[0]
        tokens = jnp.zeros((slots, self.gamma), jnp.int32)
        confidence = jnp.stack([position, anchor, active, position], axis=1).astype(jnp.float32)
        return Proposal(tokens, jnp.zeros((slots, self.gamma, 8), jnp.bfloat16), confidence)


def test_b21_the_block_begins_at_the_committed_length():
    """Rows 29..33 with the last three rejected: context 29 and 30, block rows 31..34 (not 30..33), anchor the new token."""
    target = LookupTarget(jnp.where(jnp.eye(8, k=1, dtype=bool), 0.0, -30.0))  # a -> a + 1
    drafter = Spy(4)
    state = decode_round.init_state(target, drafter, slots=1, max_len=64)
    drafts = jnp.array([[3, 7, 7, 7]])  # behind 2: one right, three wrong
    requests = state.requests.replace(
        length=jnp.array([29]),
        anchor=jnp.array([2]),
        drafts=drafts,
        num_drafts=jnp.array([4]),
        active=jnp.array([True]),
        max_tokens=jnp.array([50]),
        draft_logits=jnp.zeros((1, 4, 8), jnp.bfloat16),
    )
    state = state.replace(requests=requests)
    item = WorkItem(
        token=jnp.array([[2, 3, 7, 7, 7]]),
        start=jnp.array([29]),
        count=jnp.array([5]),
        verify=jnp.array([4]),
        final=jnp.array([True]),
    )
    state, emission = jax.jit(lambda s, i: decode_round.tick(target, drafter, s, i, 64))(state, item)
    assert emission.accepted.tolist() == [1] and emission.token[0, :2].tolist() == [3, 4]
    assert state.draft_cache[0].tolist() == [29, 30, -1, -1, -1, -1, -1, -1]
    position, anchor, active, _ = state.requests.confidence[0].tolist()
    assert (position, anchor, active) == (31, 4, 1) and state.requests.length.tolist() == [31]


def test_b21_the_drafter_rotates_its_rows_from_the_anchor_on(monkeypatch):
    """A block behind context that ends at 30 has its queries at 31, 32, 33, and no other position reaches them."""
    seen = []
    original = Projections.query
    monkeypatch.setattr(Projections, "query", lambda self, x, at: (seen.append(at), original(self, x, at))[1])
    graph, params = nnx.split(micro_model(gamma=GAMMA))

    def propose(position):
        model = nnx.merge(graph, params)
        drafter = model.drafter
        sampling = SamplingState.from_params([SamplingParams()])
        drafter.propose(jnp.zeros(1, jnp.int32), position, jnp.ones(1, bool), sampling, drafter.init_cache(1, 32))
        return seen.pop()

    assert jax.jit(propose)(jnp.array([31])).tolist() == [31, 32, 33]
    assert not seen


def test_b28_donated_caches_give_the_same_output():
    """A cache written in place while it is still read would differ from one that is copied."""
    runner = Runner(micro_model(), 3, 32)
    donating = jax.jit(runner._step_pure, donate_argnums=3)
    text = np.random.default_rng(0).integers(0, MICRO.vocab_size, (3, 32))
    kept, given = runner.caches(), runner.caches()
    for start in range(0, 30, 3):
        rows = padded(text[:, start : start + 3].tolist(), [start] * 3, 3)
        expected = runner.step(rows, kept)
        kept, old = expected[-1], given
        output = donating(runner.params, rows, jnp.ones(rows.token.shape, bool), given)
        given = output[-1]
        jax.tree.map(np.testing.assert_array_equal, output, expected)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))  # donation did take place


@pytest.mark.long
def test_b28_donated_state_gives_the_same_rounds():
    slots, max_len, count = 3, 24, 8
    graph, params = nnx.split(micro_model())
    program = DecodeProgram(graph, params, make_mesh(1, 1), slots, max_len)

    def start():
        state = program.init_state(params)
        requests = state.requests.replace(
            length=jnp.array([1, 4, 0]),
            anchor=jnp.array([1, 2, 3]),
            active=jnp.array([True, True, False]),
            max_tokens=jnp.full(slots, 50),
            sampling=SamplingState.from_params([SamplingParams(1.0, seed=r) for r in range(slots)]),
        )
        return state.replace(requests=requests)

    @jax.jit
    def copied(params, state):
        model = nnx.merge(graph, params)
        return decode_round.rounds(model.target, model.drafter, state, max_len, count)

    expected = copied(params, start())
    given = start()
    output = program.rounds(count)(params, given)
    assert given.target_cache[0].window.is_deleted()
    assert int(output[1].count.sum()) > count
    jax.tree.map(np.testing.assert_array_equal, output, expected)


def test_b29_rope_rotates_adjacent_pairs_of_the_last_channels():
    """[1, 0, 0, 0] at position 1: adjacent pairs give [cos, sin, 0, 0]; the half-split layout [cos, 0, sin, 0]."""
    freq = rope_frequencies(RopeConfig(dim=4, theta=100.0), False)
    np.testing.assert_allclose(freq, [1, 0.1], rtol=1e-6)
    one = jnp.array([[9.0, 8.0, 1.0, 0.0, 0.0, 0.0]])  # two channels in front stay as they are
    turned = np.asarray(rotate(one, jnp.array([1]), freq))[0]
    interleaved = [9, 8, np.cos(1), np.sin(1), 0, 0]
    half_split = [9, 8, np.cos(1), 0, np.sin(1), 0]
    np.testing.assert_allclose(turned, interleaved, atol=1e-6)
    assert np.abs(turned - half_split).max() > 0.5
    second = np.asarray(rotate(jnp.array([[0.0, 0.0, 1.0, 0.0]]), jnp.array([3]), freq))[0]
    np.testing.assert_allclose(second, [0, 0, np.cos(0.3), np.sin(0.3)], atol=1e-6)
    back = rotate(jnp.asarray(turned)[None], jnp.array([1]), freq, inverse=True)
    np.testing.assert_allclose(back, one, atol=1e-6)


def test_b45_the_drafter_has_r_times_k_rows(monkeypatch):
    """R = 3, K = 2: six rows in every stage and in front of the head (not R (K + 1) = 9), and logits [3, 2, V]."""
    rows, heads = [], []
    moe, base = MoE.__call__, DSpark.base_logits
    monkeypatch.setattr(MoE, "__call__", lambda self, x, *rest: (rows.append(x.shape[0]), moe(self, x, *rest))[1])
    monkeypatch.setattr(DSpark, "base_logits", lambda self, t, h: (heads.append(h.shape), base(self, t, h))[1])
    graph, params = nnx.split(micro_model(gamma=2, stages=2))

    def propose():
        drafter = nnx.merge(graph, params).drafter
        zeros = jnp.zeros(3, jnp.int32)
        sampling = SamplingState.from_params([SamplingParams()] * 3)
        return drafter.propose(zeros, zeros, zeros == 0, sampling, drafter.init_cache(3, 32))

    proposal = jax.eval_shape(propose)
    assert rows == [6, 6] and heads == [(3, 2, MICRO.hidden_size)]
    assert proposal.tokens.shape == proposal.confidence.shape == (3, 2)
    assert proposal.logits.shape == (3, 2, MICRO.vocab_size) and proposal.logits.dtype == jnp.bfloat16
