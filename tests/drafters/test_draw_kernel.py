"""Blocks drawn by the kernel (interpreted on CPU) are those of `draw_block`, whatever the rows ask for."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dspark_jax.decode.protocols import Proposal
from dspark_jax.decode.sampling import SamplingParams, SamplingState
from dspark_jax.drafters import draw_kernel
from dspark_jax.drafters.draw import draw_block
from dspark_jax.drafters.draw_kernel import draw
from dspark_jax.drafters.heads import ConfidenceHead, GatedHead, MarkovHead
from dspark_kernels import draft_head

ROWS, GAMMA, VOCAB, RANK, WIDTH = 3, 2, 150, 16, 8
KERNEL = "triton" if jax.default_backend() == "gpu" else "interpret"
BATCHES = {
    "greedy": [(0, 0, 1), (0, 5, 1), (0, 0, 0.5)],  # top-k and top-p say nothing at temperature 0
    "drawn": [(1, 0, 1), (0.5, 0, 1), (0, 4, 1)],
    "filtered": [(1, 0, 1), (0.5, 3, 1), (0, 0, 1)],
    "filtered by mass": [(2, 0, 0.7), (0.5, 0, 1), (1, 0, 1)],
}


@functools.cache
def block():
    """Heads whose weights are small integers, so that sums are exact in any order, and what they read."""
    rngs = nnx.Rngs(0)
    head, confidence = MarkovHead(WIDTH, VOCAB, RANK, rngs=rngs), ConfidenceHead(WIDTH + RANK, rngs=rngs)
    rng = np.random.default_rng(1)
    for table in (head.markov_w1, head.markov_w2):
        table.weight[...] = jnp.asarray(rng.integers(-2, 3, table.weight.shape), jnp.float32)
    base = jnp.asarray(rng.integers(-1024, 1025, (ROWS, GAMMA, VOCAB)) / 512, jnp.float32)
    hidden = jnp.asarray(rng.normal(size=(ROWS, GAMMA, WIDTH)), jnp.float32)
    anchor, position = (jnp.asarray(rng.integers(0, VOCAB, ROWS), jnp.int32) for _ in range(2))
    return head, confidence, base, hidden, anchor, position


@functools.cache
def programs():
    head, confidence, *rest = block()
    lowering = functools.partial(draft_head.lowering, implementation=KERNEL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draft_head, "lowering", lowering)
        kernel = jax.jit(lambda sampling: draw(head, confidence, *rest, sampling))
        kernel = kernel.lower(sampling_of("greedy")).compile()
    return kernel, jax.jit(lambda sampling: draw_block(head, confidence, *rest, sampling))


def sampling_of(name: str) -> SamplingState:
    return SamplingState.from_params([SamplingParams(t, k, p, seed=i) for i, (t, k, p) in enumerate(BATCHES[name])])


@pytest.mark.parametrize("name", BATCHES)
def test_equals_the_steps_in_jnp(name):
    kernel, plain = programs()
    got, expected = kernel(sampling_of(name)), plain(sampling_of(name))
    np.testing.assert_array_equal(got.tokens, expected.tokens)
    np.testing.assert_array_equal(np.asarray(got.logits, np.float32), np.asarray(expected.logits, np.float32))
    np.testing.assert_allclose(got.confidence, expected.confidence, rtol=1e-6, atol=1e-7)
    assert got.logits.dtype == expected.logits.dtype and got.tokens.dtype == expected.tokens.dtype


def test_a_neighbour_with_top_k_changes_no_other_row(monkeypatch):
    """Forms that tell themselves apart: only the rows that are filtered leave the kernel."""
    head, confidence, base, hidden, anchor, position = block()
    shape = (ROWS, GAMMA)
    monkeypatch.setattr(draft_head, "lowering", lambda *_: "interpret")
    marked = lambda *_, **__: (jnp.full(shape, 1, jnp.int32), jnp.ones((*shape, VOCAB), jnp.bfloat16))  # noqa: E731
    monkeypatch.setattr(draft_head, "draft", marked)
    plain = Proposal(jnp.full(shape, 2, jnp.int32), jnp.full((*shape, VOCAB), 2, jnp.bfloat16), jnp.full(shape, 2.0))
    monkeypatch.setattr(draw_kernel, "draw_block", lambda *_: plain)
    sampling = SamplingState.from_params([SamplingParams(0.8), SamplingParams(0.8, top_k=5), SamplingParams(0.0, top_k=5)])
    got = draw(head, confidence, base, hidden, anchor, position, sampling)
    assert got.tokens[:, 0].tolist() == got.logits[:, 0, 0].tolist() == [1, 2, 1]
    assert [bool((row == 2).all()) for row in got.confidence] == [False, True, False]


def test_only_the_plain_head_and_one_dtype_take_the_kernel(monkeypatch):
    head, confidence, base, hidden, anchor, position = block()

    def called(*_, **__):
        raise AssertionError("the kernel was asked for")

    monkeypatch.setattr(draft_head, "draft", called)
    monkeypatch.setattr(draft_head, "lowering", lambda *_: "interpret")
    sampling = sampling_of("drawn")
    shape = lambda head, hidden: jax.eval_shape(  # noqa: E731
        lambda: draw(head, confidence, base, hidden, anchor, position, sampling)
    )
    with pytest.raises(AssertionError, match="asked for"):
        shape(head, hidden)
    shape(head, hidden.astype(jnp.bfloat16))
    shape(GatedHead(WIDTH, VOCAB, RANK, rngs=nnx.Rngs(0)), hidden)
