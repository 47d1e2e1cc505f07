"""The streams of random numbers: distinct, reproducible, and with the right laws."""

import jax.numpy as jnp
import numpy as np

from dspark_jax.decode import noise
from helpers.statistics import matches


def test_streams_are_distinct_and_positions_matter():
    seed, position = jnp.arange(4, dtype=jnp.uint32), jnp.arange(4, dtype=jnp.int32) + 20
    draws = [noise.gumbel(seed, position, purpose, 16) for purpose in (noise.RESIDUAL, noise.BONUS)]
    draws += [noise.draft_gumbel(seed, position + d, index, 16) for d in (-1, 0) for index in (0, 1)]
    draws += [noise.gumbel(seed, position + 1, noise.BONUS, 16), noise.gumbel(seed + 1, position, noise.BONUS, 16)]
    flat = np.stack([np.asarray(d).ravel() for d in draws])
    assert all(len(np.unique(column)) == len(column) for column in flat.T)
    both = noise.gumbel(seed, position, jnp.array([noise.RESIDUAL, noise.BONUS] * 2), 16)
    np.testing.assert_array_equal(both[0], draws[0][0])
    np.testing.assert_array_equal(both[1], draws[1][1])


def test_noise_has_its_laws():
    seed = jnp.arange(10**6, dtype=jnp.uint32)
    position = jnp.full(seed.shape, 9)
    u = np.asarray(noise.uniform(seed, position, noise.ACCEPT))
    assert u.min() > 0 and u.max() < 1
    assert matches((u * 10).astype(int), np.full(10, 0.1))
    g = np.asarray(noise.gumbel(seed, position, noise.BONUS, 3))
    assert np.isfinite(g).all()
    np.testing.assert_allclose(g.mean(0), 0.5772, atol=0.008)
    np.testing.assert_allclose(g.std(0), np.pi / np.sqrt(6), atol=0.008)
    assert abs(np.corrcoef(g.T) - np.eye(3)).max() < 0.005
    pair = np.asarray(noise.uniform(seed, jnp.stack([position, position + 1], 1), noise.ACCEPT))
    np.testing.assert_array_equal(pair[:, 0], u)
    assert abs(np.corrcoef(pair.T)[0, 1]) < 0.01


def test_the_ends_of_the_unit_interval_are_excluded():
    u = np.asarray(noise._open_unit(jnp.array([0, 1, 2**32 - 1], jnp.uint32)))
    assert 0 < u[0] < u[1] < 1e-9 and u[2] < 1
    assert np.isfinite(-np.log(-np.log1p(-u))).all()
