"""Sequential heads and confidence against numpy written from the paper's equations (4 to 7)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dspark_jax.decode.sampling import SamplingParams, SamplingState
from helpers.micro import MICRO, micro_model
from helpers.runner import scaled_error

KINDS = ("markov", "gated", "rnn", "none")
ROWS, GAMMA, RANK = 6, 4, 3
RNG = np.random.default_rng(3)
HIDDEN = RNG.normal(size=(ROWS, GAMMA, MICRO.hidden_size)).astype(np.float32)
ANCHOR = RNG.integers(0, MICRO.vocab_size, ROWS).astype(np.int32)
# Greedy, sampled, and truncated rows.
SAMPLING = [
    SamplingParams(t, k, p, seed=i)
    for i, (t, k, p) in enumerate([(0, 0, 1), (1, 0, 1), (0.7, 3, 1), (1.5, 0, 0.8), (1, 2, 0.9), (0, 0, 1)])
]


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


@functools.cache
def model(kind: str):
    """A model whose head has weights far from its small initial ones, biases included."""
    return micro_model(kind, gamma=GAMMA)


@functools.cache
def outputs(kind: str):
    """The proposal drawn from HIDDEN, and `forced` along the drafted tokens."""
    graph, params = nnx.split(model(kind))

    @jax.jit
    def run(params, hidden, anchor, sampling):
        m = nnx.merge(graph, params)
        proposal = m.draft.sample(m.target, hidden, anchor, jnp.arange(ROWS), sampling)
        previous = jnp.concatenate([anchor[:, None], proposal.tokens[:, :-1]], axis=1)
        return proposal, previous, *m.draft.forced(m.target, hidden, previous)

    return jax.tree.map(np.asarray, run(params, HIDDEN, ANCHOR, SamplingState.from_params(SAMPLING)))


def paper(kind: str, previous: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Logits [R, gamma, V] and confidence logits [R, gamma] in float64, row by row."""
    last = model(kind).draft.mtp[-1]
    weight = lambda p: np.asarray(p[...], np.float64)  # noqa: E731
    head, norm = weight(model(kind).target.head.weight), weight(last.norm.weight)
    confidence_weight = weight(last.confidence_head.proj.weight)[:, 0]
    logits, confidence = np.zeros((ROWS, GAMMA, MICRO.vocab_size)), np.zeros((ROWS, GAMMA))
    for r in range(ROWS):
        s = np.zeros(RANK)
        for k in range(GAMMA):
            h = HIDDEN[r, k].astype(np.float64)
            base = (h / np.sqrt((h * h).mean() + MICRO.rms_norm_eps) * norm) @ head
            if kind == "none":
                logits[r, k], confidence[r, k] = base, confidence_weight @ h
                continue
            w1, w2 = weight(last.markov_head.markov_w1.weight), weight(last.markov_head.markov_w2.weight)
            e = w1[previous[r, k]]
            if kind == "markov":
                bias = e @ w2
            elif kind == "gated":
                wg, bg = weight(last.markov_head.gate_proj.weight), weight(last.markov_head.gate_bias)
                bias = (sigmoid(np.concatenate([h, e]) @ wg + bg) * e) @ w2
            else:
                wz, bz = weight(last.markov_head.joint_proj.weight), weight(last.markov_head.joint_bias)
                z = np.concatenate([s, e, h]) @ wz + bz
                g, c, o = sigmoid(z[:RANK]), z[RANK : 2 * RANK], z[2 * RANK :]
                s = g * s + (1 - g) * np.tanh(c)
                bias = np.tanh(o) @ w2
            logits[r, k] = base + bias
            confidence[r, k] = confidence_weight @ np.concatenate([h, e])
    return logits, confidence


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_confidence_follow_the_equations(kind):
    _, previous, logits, confidence = outputs(kind)
    expected_logits, expected_confidence = paper(kind, previous)
    assert scaled_error(logits, expected_logits) <= 1e-5
    assert scaled_error(confidence, expected_confidence) <= 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_forced_equals_sample_along_the_sampled_path(kind):
    proposal, _, logits, confidence = outputs(kind)
    np.testing.assert_allclose(proposal.confidence, confidence, rtol=1e-5, atol=1e-5)
    kept = proposal.logits.astype(np.float32)
    for r, params in enumerate(SAMPLING):
        if params.temperature == 0:
            np.testing.assert_array_equal(proposal.tokens[r], logits[r].argmax(-1))
            np.testing.assert_array_equal(kept[r].argmax(-1), proposal.tokens[r])
            assert (np.isfinite(kept[r]).sum(-1) == 1).all()  # greedy drafts are one-hot (B33)
            continue
        inside = np.isfinite(kept[r])
        scaled = logits[r] / params.temperature
        # Up to a shift by row, and bf16's eight bits.
        shift = (kept[r] - scaled)[np.arange(GAMMA), proposal.tokens[r]][:, None]
        np.testing.assert_allclose(kept[r][inside], (scaled + shift)[inside], rtol=0, atol=0.02 * np.abs(scaled).max())
        assert inside[np.arange(GAMMA), proposal.tokens[r]].all()
        if params.top_k:
            assert (inside.sum(-1) <= params.top_k).all()
        elif params.top_p == 1:
            assert inside.all()


def test_the_confidence_does_not_see_the_token_it_judges():
    """c_k depends on the token before k; on token k only from k + 1 on."""
    graph, params = nnx.split(model("rnn"))
    run = jax.jit(lambda previous: nnx.merge(graph, params).draft.forced(nnx.merge(graph, params).target, HIDDEN, previous)[1])
    previous = np.tile(ANCHOR[:, None], (1, GAMMA))
    changed = previous.copy()
    changed[:, 2] = (changed[:, 2] + 1) % MICRO.vocab_size  # the token behind slot 1
    before, after = np.asarray(run(previous)), np.asarray(run(changed))
    np.testing.assert_array_equal(before[:, [0, 1, 3]], after[:, [0, 1, 3]])
    assert (before[:, 2] != after[:, 2]).all()
