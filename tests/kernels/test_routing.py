"""Routing against numpy: square root of softplus, biased choice, un-biased weights (B39: padding in reused buffers)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_kernels.routing import expert_load, route

ROWS, EXPERTS, K, SCALE = 33, 7, 3, 2.5
RNG = np.random.default_rng(0)
LOGITS = RNG.normal(0, 2, (ROWS, EXPERTS)).astype(np.float32)
BIAS = RNG.normal(0, 0.5, EXPERTS).astype(np.float32)
VALID = RNG.random(ROWS) < 0.7


def reference(logits, valid, bias=None, ids=None, top_k=K, scale=SCALE):
    """Row by row: experts by falling score, ties by rising id."""
    chosen = np.full((len(logits), top_k), -1)
    weights = np.zeros((len(logits), top_k))
    for b, row in enumerate(np.asarray(logits, np.float64)):
        if not valid[b]:
            continue
        score = np.sqrt(np.log1p(np.exp(row)))
        order = sorted(range(len(row)), key=lambda e: (-(score[e] + (0 if bias is None else bias[e])), e))
        chosen[b] = order[:top_k] if ids is None else ids[b]
        weights[b] = score[chosen[b]] / score[chosen[b]].sum() * scale
    return chosen, weights


def check(routing, expected) -> None:
    np.testing.assert_array_equal(routing.ids, expected[0])
    np.testing.assert_allclose(routing.weights, expected[1], rtol=2e-6)


def test_worked_numbers():
    logits = jnp.array([[2.0, 0.0, -1.0, 1.0], [5.0, 4.0, 3.0, 2.0], [np.nan] * 4])
    routing = route(logits, top_k=2, scale=1.5, valid=jnp.array([True, False, False]), bias=jnp.array([0.0, 0.0, 0.9, -0.5]))
    assert routing.ids.tolist() == [[2, 0], [-1, -1], [-1, -1]]
    np.testing.assert_allclose(routing.weights, [[0.416009, 1.083991], [0, 0], [0, 0]], atol=1e-6)


@pytest.mark.parametrize("bias", [None, BIAS], ids=["plain", "biased"])
def test_scored_routing(bias):
    routing = route(LOGITS, top_k=K, scale=SCALE, valid=jnp.asarray(VALID), bias=None if bias is None else jnp.asarray(bias))
    check(routing, reference(LOGITS, VALID, bias))
    np.testing.assert_allclose(np.asarray(routing.weights).sum(1), np.where(VALID, SCALE, 0), rtol=1e-6)


def test_hash_routing_keeps_the_given_order_and_ignores_the_scores():
    ids = RNG.permuted(np.tile(np.arange(EXPERTS), (ROWS, 1)), axis=1)[:, :K]
    check(
        route(LOGITS, top_k=K, scale=SCALE, valid=jnp.asarray(VALID), ids=jnp.asarray(ids)), reference(LOGITS, VALID, ids=ids)
    )


def test_ties_go_to_the_lowest_id():
    logits = np.zeros((4, EXPERTS), np.float32)
    logits[1, 4:] = 1
    logits[2, 3] = -1
    logits[3] = np.array([0, 2, 1, 2, 1, 2, 0])
    routing = route(jnp.asarray(logits), top_k=K, scale=1.0, valid=jnp.ones(4, bool))
    assert routing.ids.tolist() == [[0, 1, 2], [4, 5, 6], [0, 1, 2], [1, 3, 5]]


def test_b39_padding_of_any_content_changes_no_real_row():
    run = jax.jit(lambda logits, valid: route(logits, top_k=K, scale=SCALE, valid=valid, bias=jnp.asarray(BIAS)))
    expected = run(LOGITS, VALID)
    for content in (np.nan, np.inf, -np.inf, 1e30):
        routing = run(np.where(VALID[:, None], LOGITS, np.float32(content)), VALID)
        jax.tree.map(np.testing.assert_array_equal, routing, expected)
    assert (np.asarray(expected.ids)[~VALID] == -1).all() and not np.asarray(expected.weights)[~VALID].any()


def test_load_counts_real_rows_only():
    routing = route(LOGITS, top_k=K, scale=SCALE, valid=jnp.asarray(VALID))
    expected = np.bincount(np.asarray(routing.ids)[VALID].ravel(), minlength=EXPERTS)
    np.testing.assert_array_equal(expert_load(routing.ids, EXPERTS), expected)
    assert expected.sum() == K * VALID.sum()
