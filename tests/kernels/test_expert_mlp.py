"""Gated expert networks against a loop over rows and experts in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_kernels.block_scaled import BlockScaled, widened
from dspark_kernels.expert_mlp import expert_mlp, swiglu
from dspark_kernels.formats import block_shapes

ROWS, EXPERTS, K, WIDTH, INNER = 12, 5, 3, 6, 4
RNG = np.random.default_rng(1)
X = RNG.normal(size=(ROWS, WIDTH)).astype(np.float32)
IDS = RNG.permuted(np.tile(np.arange(EXPERTS), (ROWS, 1)), axis=1)[:, :K].astype(np.int32)
WEIGHTS = RNG.random((ROWS, K)).astype(np.float32)
W1, W3 = (RNG.normal(size=(EXPERTS, WIDTH, INNER)).astype(np.float32) for _ in range(2))
W2 = RNG.normal(size=(EXPERTS, INNER, WIDTH)).astype(np.float32)

mlp = jax.jit(expert_mlp, static_argnames="limit")


def reference(x, ids, weights, limit):
    out = np.zeros((len(x), WIDTH))
    for b in range(len(x)):
        for e, weight in zip(ids[b], weights[b], strict=True):
            if not 0 <= e < EXPERTS:
                continue
            gate, up = x[b].astype(np.float64) @ W1[e], x[b].astype(np.float64) @ W3[e]
            if limit:
                gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
            out[b] += (weight * gate / (1 + np.exp(-gate)) * up) @ W2[e]
    return out


@pytest.mark.parametrize("limit", [0.0, 0.8])
def test_against_the_loop(limit):
    np.testing.assert_allclose(
        mlp(X, IDS, WEIGHTS, W1, W3, W2, limit=limit), reference(X, IDS, WEIGHTS, limit), rtol=1e-5, atol=1e-5
    )


def test_the_gate_is_clamped_above_only_and_the_other_factor_on_both_sides():
    gate, up = jnp.array([-9.0, -9.0, 9.0, 9.0]), jnp.array([-9.0, 9.0, -9.0, 9.0])
    silu = lambda v: v / (1 + np.exp(-v))  # noqa: E731
    expected = [silu(-9.0) * -2, silu(-9.0) * 2, silu(2.0) * -2, silu(2.0) * 2]
    np.testing.assert_allclose(swiglu(gate, up, 2.0), expected, rtol=1e-6)
    np.testing.assert_allclose(swiglu(gate, up, 0.0), silu(np.asarray(gate)) * np.asarray(up), rtol=1e-6)


def test_ids_out_of_range_contribute_nothing():
    """A rank holds some of the experts and gets local ids; padded rows have -1."""
    ids = IDS.copy()
    ids[0], ids[1, 1], ids[2, 0], ids[3, 2] = -1, EXPERTS, -7, 10**6
    np.testing.assert_allclose(
        mlp(X, ids, WEIGHTS, W1, W3, W2, limit=0.8), reference(X, ids, WEIGHTS, 0.8), rtol=1e-5, atol=1e-5
    )
    assert not np.asarray(mlp(X, ids, WEIGHTS, W1, W3, W2, limit=0.8))[0].any()


def test_ranks_add_up():
    whole = mlp(X, IDS, WEIGHTS, W1, W3, W2, limit=0.8)
    low = mlp(X, IDS, WEIGHTS, W1[:2], W3[:2], W2[:2], limit=0.8)
    high = mlp(X, IDS - 2, WEIGHTS, W1[2:], W3[2:], W2[2:], limit=0.8)
    np.testing.assert_allclose(low + high, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["fp4", "fp8"])
def test_block_scaled_weights_are_the_numbers_that_they_stand_for(kind):
    def random(inputs, outputs):
        codes, scale = ((EXPERTS, *shape) for shape in block_shapes(kind, inputs, outputs))
        raw = jnp.asarray(RNG.integers(0, 127, codes), jnp.uint8)
        codes = raw if kind == "fp4" else jax.lax.bitcast_convert_type(raw, jnp.float8_e4m3fn)
        return BlockScaled(codes, jnp.asarray(RNG.integers(118, 122, scale), jnp.uint8))

    packed = [random(WIDTH, INNER), random(WIDTH, INNER), random(INNER, WIDTH)]
    dense = [widened(w, jnp.float32) for w in packed]
    assert [w.shape for w in dense] == [w.shape for w in (W1, W3, W2)] and all(np.ptp(w) > 0 for w in dense)
    found = mlp(X, IDS, WEIGHTS, *packed, limit=0.8)
    np.testing.assert_allclose(found, mlp(X, IDS, WEIGHTS, *dense, limit=0.8), rtol=1e-6, atol=1e-6)
