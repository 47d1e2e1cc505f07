"""Optimiser: schedule, which parameters take which rule, weight decay, clipping."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dspark_jax.errors import ConfigError
from dspark_jax.train.optimizer import OptimizerConfig, decayed, make_optimizer, matrix_axes
from dspark_jax.train.target import trainable
from helpers.micro import micro_model


def named(tree) -> dict[str, object]:
    """Leaves (of any kind, None too) by dotted path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: x is None or hasattr(x, "reduction_axis"))
    return {".".join(str(getattr(k, "key", k)) for k in path if getattr(k, "key", "") != ""): v for path, v in leaves}


def update(config: OptimizerConfig, params, *grads):
    """The last update of several gradients, behind an empty one: the rate of the first step is 0."""
    optimizer, _ = make_optimizer(config)
    state = optimizer.init(params)
    updates = None
    for grad in (jax.tree.map(jnp.zeros_like, params), *grads):
        updates, state = optimizer.update(grad, state, params)
    return updates


def rate(config: OptimizerConfig, step: int) -> float:
    return float(make_optimizer(config)[1](step))


def test_warm_up_and_cosine():
    _, schedule = make_optimizer(OptimizerConfig(peak=0.2, steps=100, warmup=10, final=0.05))
    np.testing.assert_allclose([schedule(0), schedule(5), schedule(10)], [0, 0.1, 0.2], rtol=1e-6)
    np.testing.assert_allclose(schedule(55), 0.2 * (0.05 + 0.95 / 2), rtol=1e-5)
    np.testing.assert_allclose([schedule(100), schedule(500)], [0.01, 0.01], rtol=1e-5)


def test_matrices_take_muon_and_tables_adam():
    model = micro_model(stages=2)
    parts = [nnx.split(m, trainable, ...)[1] for m in (model.target, model.draft)]
    axes = {name: value for part in parts for name, value in named(matrix_axes(part)).items()}
    muon = {name for name, value in axes.items() if value is not None}
    for part in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "experts.w1", "shared_experts.w2", "main_proj"):
        assert any(part in name for name in muon), part
    for part in ("embed", "head.weight", "markov", "confidence_head", ".gate.", ".fn", "ape", "norm", "attn_sink"):
        assert any(part in name for name in axes), part
        assert not any(part in name for name in muon), part
    stacked = next(v for name, v in axes.items() if "experts.w1" in name and v is not None)
    assert (stacked.reduction_axis, stacked.output_axis) == (1, 2)  # axis 0 counts experts


def test_only_matrices_decay():
    params = {"matrix": jnp.ones((3, 4)), "scale": jnp.ones(4)}
    assert decayed(params) == {"matrix": True, "scale": False}
    config = OptimizerConfig(peak=0.1, steps=10, warmup=0, weight_decay=0.5, kind="adamw")
    updates = update(config, params, jax.tree.map(jnp.zeros_like, params))
    np.testing.assert_allclose(updates["matrix"], -0.5 * rate(config, 1), rtol=1e-5)
    np.testing.assert_array_equal(updates["scale"], 0)


def test_a_muon_update_is_orthogonal_and_as_large_as_adams():
    rng = np.random.default_rng(0)
    params = {"wkv": jnp.zeros((16, 16)), "scale": jnp.zeros(16)}
    grads = {"wkv": jnp.asarray(rng.normal(size=(16, 16)), jnp.float32), "scale": jnp.ones(16)}
    config = OptimizerConfig(peak=0.1, steps=10, warmup=0, weight_decay=0.0)
    updates = update(config, params, grads, grads)
    matrix = np.asarray(updates["wkv"]) / -rate(config, 2)
    spread = [np.ptp(np.log(np.linalg.svd(x, compute_uv=False)[:-1])) for x in (matrix, np.asarray(grads["wkv"]))]
    assert spread[0] < 0.7 < 2 < spread[1]  # singular values: within a factor of 2, from far apart
    assert np.sqrt((matrix**2).mean()) == pytest.approx(0.2, rel=0.2)
    adam = update(OptimizerConfig(peak=0.1, steps=10, warmup=0, weight_decay=0.0, kind="adamw"), params, grads, grads)
    assert np.abs(np.asarray(updates["wkv"]) - np.asarray(adam["wkv"])).max() > 0.01


def test_gradients_are_clipped_in_global_norm():
    """Adam's moments remember a spike; clipped, it is worth no more than a gradient of norm `clip`."""
    params = {"a": jnp.zeros(4), "b": jnp.zeros(12)}
    small = jax.tree.map(lambda p: jnp.full_like(p, 0.05), params)  # norm 0.2

    def last(value: float, clip: float) -> np.ndarray:
        config = OptimizerConfig(peak=0.1, steps=10, warmup=0, weight_decay=0.0, clip=clip, kind="adamw")
        return np.asarray(update(config, params, jax.tree.map(lambda p: jnp.full_like(p, value), params), small)["a"])

    np.testing.assert_allclose(last(1e6, 1.0), last(0.25, 1e9), rtol=1e-4)  # 16 entries of 0.25 have norm 1
    np.testing.assert_allclose(last(0.1, 1.0), last(0.1, 1e9), rtol=1e-4)  # norm 0.4: not clipped
    assert np.abs(last(1e6, 1e9) / last(1e6, 1.0) - 1).max() > 0.05


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "sgd"}, "optimizer.kind is 'sgd'; expected 'muon' or 'adamw'"),
        ({"warmup": 10, "steps": 10}, "optimizer.warmup is 10; expected at least 0 and below steps = 10"),
        ({"warmup": -1}, "optimizer.warmup is -1"),
    ],
)
def test_impossible_settings(values, message):
    with pytest.raises(ConfigError, match=message):
        OptimizerConfig(**values)
