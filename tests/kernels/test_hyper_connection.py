"""Hyper-connections against a transcription of the formulas; every matrix is asymmetric, so that a transposed one shows."""

import jax
import numpy as np
import pytest

from dspark_kernels import hyper_connection as hc

ROWS, STREAMS, WIDTH, ITERS, EPS, NORM_EPS = 5, 4, 6, 20, 1e-6, 1e-6
RNG = np.random.default_rng(2)
H = RNG.normal(size=(ROWS, STREAMS, WIDTH)).astype(np.float32)
OUTPUT = RNG.normal(size=(ROWS, WIDTH)).astype(np.float32)
FN = RNG.normal(0, 0.3, (STREAMS * WIDTH, (2 + STREAMS) * STREAMS)).astype(np.float32)
BASE = RNG.normal(size=(2 + STREAMS) * STREAMS).astype(np.float32)
SCALE = np.array([0.7, 1.3, 0.9], np.float32)
HEAD = RNG.normal(0, 0.3, (STREAMS * WIDTH, STREAMS)).astype(np.float32)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def mixed(h, fn):
    v = h.astype(np.float64).reshape(-1)
    return (v @ fn) / np.sqrt((v * v).mean() + NORM_EPS)


def transcription(h, iters=ITERS):
    """pre [n], post [n], comb [n, n] of one token, dividing the matrix step by step: column first, column last."""
    n, mix = STREAMS, mixed(h, FN)
    pre = sigmoid(mix[:n] * SCALE[0] + BASE[:n]) + EPS
    post = 2 * sigmoid(mix[n : 2 * n] * SCALE[1] + BASE[n : 2 * n])
    comb = np.zeros((n, n))
    for j in range(n):
        row = np.array([mix[2 * n + j * n + k] * SCALE[2] + BASE[2 * n + j * n + k] for k in range(n)])
        row = np.exp(row - row.max())
        comb[j] = row / row.sum() + EPS
    comb = comb / (comb.sum(0, keepdims=True) + EPS)
    for _ in range(iters - 1):
        comb = comb / (comb.sum(1, keepdims=True) + EPS)
        comb = comb / (comb.sum(0, keepdims=True) + EPS)
    return pre, post, comb


def connected(h, output, post, comb):
    return np.stack([post[k] * output + sum(comb[j, k] * h[j] for j in range(STREAMS)) for k in range(STREAMS)])


@pytest.mark.parametrize("iters", [1, 2, ITERS])
def test_coefficients(iters):
    # One statistic over all streams, and Sinkhorn steps that have not converged, show the order of the operations.
    run = jax.jit(lambda h: hc.coefficients(h, FN, BASE, SCALE, iters=iters, eps=EPS, norm_eps=NORM_EPS))
    for got, expected in zip(run(H), zip(*(transcription(h, iters) for h in H), strict=True), strict=True):
        np.testing.assert_allclose(got, np.stack(expected), rtol=2e-5)
    if iters == ITERS:
        np.testing.assert_allclose(np.asarray(run(H)[2]).sum(1), 1, atol=1e-5)
        np.testing.assert_allclose(np.asarray(run(H)[2]).sum(2), 1, atol=1e-3)


def test_collapse_and_expand_contract_the_first_index():
    coefficients = [transcription(h) for h in H]
    pre, post, comb = (np.stack(c).astype(np.float32) for c in zip(*coefficients, strict=True))
    np.testing.assert_allclose(hc.collapse(H, pre), np.einsum("bn,bnd->bd", pre, H), rtol=1e-5, atol=1e-6)
    expected = np.stack([connected(h, o, p, c) for h, o, p, c in zip(H, OUTPUT, post, comb, strict=True)])
    np.testing.assert_allclose(hc.expand(H, OUTPUT, post, comb), expected, rtol=1e-5, atol=1e-5)
    transposed = np.asarray(hc.expand(H, OUTPUT, post, comb.transpose(0, 2, 1)))
    assert np.abs(transposed - expected).max() > 0.1  # this input tells C^T H from C H


def test_collapse_in_front_of_the_head():
    base, scale = BASE[:STREAMS], SCALE[:1]
    got = hc.collapse_head(H, HEAD, base, scale, eps=EPS, norm_eps=NORM_EPS)
    pre = np.stack([sigmoid(mixed(h, HEAD) * scale[0] + base) + EPS for h in H])
    np.testing.assert_allclose(got, np.einsum("bn,bnd->bd", pre, H), rtol=1e-5, atol=1e-5)
