"""Speculative sampling gives exactly the target's distribution, and the known wrong variants do not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.decode import noise
from dspark_jax.decode.sampling import processed_logits
from dspark_jax.decode.verify import speculative_sample
from helpers.sampling_reference import reference_law, softmax
from helpers.speculation import MANY_ROWS, bf16_law, draw_draft, state, tile
from helpers.statistics import count, matches, total_variation

N = 10**6
P4, Q4 = np.array([0.50, 0.30, 0.15, 0.05]), np.array([0.20, 0.45, 0.05, 0.30])
P8 = np.array([0.30, 0.22, 0.16, 0.11, 0.08, 0.06, 0.04, 0.03])
POSITION = 11


def _one_round(p_logits, q_logits, believed, sampling):
    rows = sampling.seed.shape[0]
    anchor = jnp.full(rows, POSITION, jnp.int32)
    draft = draw_draft(tile(q_logits, rows), sampling.seed, anchor)
    verdict = speculative_sample(
        tile(p_logits, rows)[:, None].repeat(2, axis=1),
        tile(believed, rows)[:, None],
        draft[:, None],
        jnp.ones(rows, jnp.int32),
        sampling,
        anchor,
    )
    return jnp.where(verdict.accepted > 0, draft, verdict.token), verdict.accepted


one_round = jax.jit(_one_round, compiler_options=MANY_ROWS)
process = jax.jit(processed_logits)


def first_tokens(p_logits, q_logits, sampling=None, believed=None, run=None):
    """First emitted tokens [N] and acceptance [N]: drafts come from `q_logits`, the verifier is told `believed`."""
    q = jnp.asarray(q_logits, jnp.bfloat16)
    believed = q if believed is None else jnp.asarray(believed, jnp.bfloat16)
    p = jnp.asarray(p_logits, jnp.float32)
    token, accepted = (run or one_round)(p, q, believed, state(N) if sampling is None else sampling)
    return np.asarray(token), np.asarray(accepted)


def one_hot(token: int, vocab: int) -> np.ndarray:
    return np.where(np.arange(vocab) == token, 0.0, -np.inf)


RANDOM = [(seed, *np.random.default_rng(seed).normal(0, 1.5, (2, 4))) for seed in range(3)]
LONG = ((1.0, 0, 1.0), (1.8, 0, 1.0), (1.0, 3, 1.0), (1.0, 2, 1.0), (1.0, 0, 0.8))
SETTINGS = [(0.6, 0, 1.0), (0.7, 3, 0.9), *(pytest.param(*s, marks=pytest.mark.long) for s in LONG)]


@pytest.mark.parametrize(("seed", "p", "q"), RANDOM, ids=[str(c[0]) for c in RANDOM])
def test_exact_for_random_p_and_q(seed, p, q):
    token, accepted = first_tokens(p, q, state(N, first_seed=seed * N))
    verdict = matches(token, softmax(p))
    assert verdict, verdict
    expected = np.minimum(softmax(p), bf16_law(q)).sum()
    assert abs(accepted.mean() - expected) < 5 * np.sqrt(expected * (1 - expected) / N)


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), SETTINGS)
def test_exact_for_every_setting(temperature, top_k, top_p):
    _, p, q = RANDOM[0]
    sampling = state(N, temperature, top_k, top_p, first_seed=7 * N)
    # The drafter applies the same settings to its own logits.
    one = jax.tree.map(lambda x: x[:1], sampling)
    q = process(jnp.asarray(q, jnp.float32)[None], one.temperature, one.top_k, one.top_p)[0]
    token, accepted = first_tokens(p, q, sampling)
    law = reference_law(p, temperature, top_k, top_p)
    verdict = matches(token, law)
    assert verdict, verdict
    assert abs(accepted.mean() - np.minimum(law, bf16_law(q)).sum()) < 0.003


@pytest.mark.parametrize("draft", [pytest.param(0, marks=pytest.mark.long), 3])
def test_exact_for_a_one_hot_draft(draft):
    token, accepted = first_tokens(np.log(P4), one_hot(draft, 4))
    verdict = matches(token, P4)
    assert verdict, verdict
    assert abs(accepted.mean() - P4[draft]) < 0.003


def test_exact_where_the_draft_ignores_truncation():
    # q has mass where top-k removed all of p's: those drafts are always rejected.
    token, _ = first_tokens(np.log(P4), np.log(Q4), state(N, 1.0, 2))
    assert matches(token, reference_law(np.log(P4), 1.0, 2))


def test_worked_numbers():
    token, accepted = first_tokens(np.log(P4), np.log(Q4))
    q = bf16_law(np.log(Q4))
    assert matches(token, P4)
    assert np.minimum(P4, Q4).sum() == pytest.approx(0.60)
    assert abs(accepted.mean() - 0.60) < 0.003
    residual = np.maximum(P4 - q, 0)
    assert matches(token[accepted == 0], residual / residual.sum())
    np.testing.assert_allclose(residual / residual.sum(), [0.75, 0, 0.25, 0], atol=0.004)  # bf16 moves q a little


# The wrong variants: each must fail the check that the right one passes.


def test_argmax_draft_with_softmax_q_is_rejected():
    token, _ = first_tokens(np.log(P4), one_hot(1, 4), believed=np.log(Q4))
    verdict = matches(token, P4)
    assert not verdict and verdict.tv == pytest.approx(0.367, abs=0.004)
    np.testing.assert_allclose(count(token, 4) / N, [0.25, 0.6667, 0.0833, 0], atol=0.004)


def test_mismatched_temperature_is_rejected():
    token, _ = first_tokens(np.log(P4), np.log(Q4), believed=2 * np.log(Q4))
    verdict = matches(token, P4)
    assert not verdict and verdict.tv == pytest.approx(0.077, abs=0.004)
    np.testing.assert_allclose(count(token, 4) / N, [0.5425, 0.2233, 0.1783, 0.0558], atol=0.004)


def test_resampling_from_p_is_rejected(monkeypatch):
    right = jnp.maximum
    # max(p - q, 0) is the only full-vocabulary maximum; its first argument here loses the subtraction of q.
    p_row = jnp.asarray(P4, jnp.float32)
    monkeypatch.setattr(jnp, "maximum", lambda a, b: tile(p_row, a.shape[0]) if np.ndim(a) == 2 else right(a, b))
    token, _ = first_tokens(np.log(P4), np.log(Q4), run=jax.jit(lambda *a: _one_round(*a), compiler_options=MANY_ROWS))
    verdict = matches(token, P4)
    assert not verdict and verdict.tv == pytest.approx(0.14, abs=0.004)
    np.testing.assert_allclose(count(token, 4) / N, [0.40, 0.42, 0.11, 0.07], atol=0.004)


def test_b30_noise_shared_by_draft_and_residual_is_rejected(monkeypatch):
    token, _ = first_tokens(np.log(P8), np.log(P8[::-1]))
    assert matches(token, P8)
    shared = lambda seed, position, purpose, vocab: noise.draft_gumbel(seed, position - 1, 0, vocab)  # noqa: E731
    monkeypatch.setattr(noise, "gumbel", shared)
    token, _ = first_tokens(np.log(P8), np.log(P8[::-1]), run=jax.jit(lambda *a: _one_round(*a), compiler_options=MANY_ROWS))
    verdict = matches(token, P8)
    assert not verdict and verdict.tv == pytest.approx(0.032, abs=0.004)
    assert (token == 0).mean() == pytest.approx(0.326, abs=0.003)


def test_b31_argmax_draft_with_one_hot_q_is_exact():
    assert matches(first_tokens(np.log(P4), one_hot(int(Q4.argmax()), 4))[0], P4)


def test_b32_acceptance_of_three_draft_rules():
    logits = np.array([2, 1.5, 1, 0.5])
    p = softmax(logits)
    np.testing.assert_allclose(p, [0.455, 0.276, 0.167, 0.102], atol=5e-4)
    # q = p: everything is accepted. (These logits are exact in bf16.)
    _, accepted = first_tokens(logits, logits)
    assert accepted.mean() == 1.0
    # An argmax draft survives with p_max; a sampled draft that is then tested for equality with sum p^2.
    _, accepted = first_tokens(logits, one_hot(0, 4))
    assert accepted.mean() == pytest.approx(0.455, abs=0.002)

    def equality_test(p_logits, q_logits, _, sampling):
        anchor = jnp.full(N, POSITION, jnp.int32)
        draft = draw_draft(tile(q_logits, N), sampling.seed, anchor)
        hot = jnp.where(jnp.arange(4) == draft[:, None], 0.0, -jnp.inf).astype(jnp.bfloat16)
        verdict = speculative_sample(
            tile(p_logits, N)[:, None].repeat(2, axis=1), hot[:, None], draft[:, None], jnp.ones(N, jnp.int32),
            sampling, anchor,
        )  # fmt: skip
        return jnp.where(verdict.accepted > 0, draft, verdict.token), verdict.accepted

    token, accepted = first_tokens(logits, logits, run=jax.jit(equality_test, compiler_options=MANY_ROWS))
    assert accepted.mean() == pytest.approx(0.322, abs=0.002) == (p**2).sum()
    assert matches(token, p)


def test_b33_temperature_zero_drafts_the_argmax_with_a_one_hot_q():
    rng = np.random.default_rng(3)
    sampling = state(50, temperature=0.0, top_k=5, top_p=0.5)
    logits = jnp.asarray(rng.normal(size=(50, 9)), jnp.float32)
    q = process(logits, sampling.temperature, sampling.top_k, sampling.top_p).astype(jnp.bfloat16)
    draft = jax.jit(draw_draft)(q, sampling.seed, np.arange(50))
    np.testing.assert_array_equal(draft, logits.argmax(-1))
    np.testing.assert_array_equal(softmax(np.asarray(q, np.float32)), np.eye(9)[np.asarray(logits).argmax(-1)])


def test_no_residual_by_rounding_draws_from_p(monkeypatch):
    # A rejection that cannot happen (u above 1) with p = q leaves no residual mass.
    monkeypatch.setattr(noise, "uniform", lambda seed, position, purpose: jnp.full(position.shape, 2.0))
    logits = np.array([2, 1.5, 1, 0.5])
    token, accepted = first_tokens(logits, logits, run=jax.jit(lambda *a: _one_round(*a), compiler_options=MANY_ROWS))
    assert accepted.max() == 0
    assert matches(token, softmax(logits))


def test_b47_total_variation_of_the_wrong_variants_exceeds_the_limit_many_times():
    laws = [[0.25, 0.6667, 0.0833, 0], [0.40, 0.42, 0.11, 0.07], [0.5425, 0.2233, 0.1783, 0.0558]]
    np.testing.assert_allclose([total_variation(np.array(law), P4) for law in laws], [0.367, 0.14, 0.077], atol=1e-3)
