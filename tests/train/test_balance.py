"""Rules for what no gradient trains: the router's selection bias and the hash tables."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from dspark_jax.models.moe import MoEAux
from dspark_jax.train.balance import balanced_hash, biases, load_spread, set_hash_tables, update_bias
from dspark_jax.train.target import TargetRules, TargetStep, balance, init_target, trainable
from helpers.micro import MICRO, micro_model


def aux(*load: float) -> MoEAux:
    return MoEAux(jnp.asarray(load, jnp.float32), jnp.zeros(len(load)))


def test_bias_moves_towards_equal_load_by_the_rate():
    bias = jnp.array([0.0, 1.0, -1.0, 0.5])
    moved = update_bias(bias, aux(10, 2, 6, 6), 0.01)
    np.testing.assert_allclose(moved - bias, [-0.01, 0.01, 0, 0], atol=1e-7)


def test_load_spread():
    assert float(load_spread(aux(5, 5, 5, 5))) == pytest.approx(0, abs=1e-6)
    assert float(load_spread(aux(20, 0, 0, 0))) == pytest.approx(3)


def test_each_layer_moves_by_its_own_load_and_tables_stay():
    _, _, fixed = nnx.split(micro_model().target, trainable, ...)
    before = jax.tree.map(jnp.copy, fixed)
    moved = balance(fixed, (aux(1, 1, 1, 9), aux(9, 1, 1, 1)), 0.1)
    (bias,), (old,) = biases(moved), biases(before)  # layer 0 is hashed
    np.testing.assert_allclose(bias - old, [-0.1, 0.1, 0.1, 0.1], atol=1e-6)
    tables = [[v.get_value() for p, v in nnx.to_flat_state(s) if p[-1] == "tid2eid"] for s in (before, moved)]
    assert len(tables[0]) == 1
    np.testing.assert_array_equal(tables[0][0], tables[1][0])


@pytest.mark.long
def test_a_training_step_moves_the_bias_by_the_rule_and_keeps_the_table():
    model = micro_model().target
    graph, state = init_target(model, optax.sgd(0.0))
    before = jax.tree.map(jnp.copy, state.fixed)
    rules = TargetRules(dense_steps=0, bias_rate=0.25)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 5, (2, 13)), jnp.int32)
    load = nnx.merge(graph, state.params, state.fixed).sequence(tokens[:, :-1]).moe[1].load
    after, _ = TargetStep(graph, optax.sgd(0.0), rules)(state, tokens, 0)
    step = np.asarray(biases(after.fixed)[0] - biases(before)[0])
    np.testing.assert_allclose(step, 0.25 * np.sign(np.mean(load) - load), atol=1e-6)
    assert np.any(step)
    for path, leaf in nnx.to_flat_state(after.fixed):
        if path[-1] == "tid2eid":
            np.testing.assert_array_equal(leaf.get_value(), dict(nnx.to_flat_state(before))[path].get_value())


def test_the_optimizer_moves_neither_bias_nor_table():
    names = {".".join(map(str, p)) for p, _ in nnx.to_flat_state(nnx.split(micro_model().target, trainable, ...)[1])}
    assert not any(name.endswith(("tid2eid", "gate.bias")) for name in names)
    assert any(name.endswith("gate.weight") for name in names)


def test_hash_tables_balance_the_traffic():
    counts = np.random.default_rng(0).zipf(1.3, 400).clip(max=4000).astype(float)
    table = balanced_hash(counts, num_experts=8, top_k=2)
    assert table.shape == (400, 2) and table.dtype == np.int32 and table.min() == 0 and table.max() == 7
    assert (table[:, 0] != table[:, 1]).all()
    load = np.zeros(8)
    np.add.at(load, table, counts[:, None])
    # No expert can have less than the most frequent token brings; the rest evens out.
    assert load.max() <= max(1.1 * load.mean(), counts.max() * 1.01)
    naive = np.zeros(8)
    np.add.at(naive, np.stack([np.arange(400) % 8, (np.arange(400) + 1) % 8], 1), counts[:, None])
    assert load.std() < 0.2 * naive.std()


def test_the_experts_of_a_frequent_token_get_no_other_one():
    counts = np.array([1.0] * 20 + [100.0] + [1.0] * 20)
    table = balanced_hash(counts, num_experts=4, top_k=1)[:, 0]
    assert (table == table[20]).sum() == 1


def test_hash_tables_are_reproducible_and_differ_by_layer():
    counts = np.ones(50)
    np.testing.assert_array_equal(balanced_hash(counts, 4, 2, seed=1), balanced_hash(counts, 4, 2, seed=1))
    assert (balanced_hash(counts, 4, 2, seed=1) != balanced_hash(counts, 4, 2, seed=2)).any()
    # Tokens that never occur are spread too: rare tokens of the held-out text meet them.
    assert len(np.unique(balanced_hash(np.zeros(50), 4, 2))) == 4


def test_only_hash_layers_get_tables():
    from dspark_jax.models.deepseek_v4 import DeepseekV4

    target = DeepseekV4(replace(MICRO, num_hash_layers=1), rngs=nnx.Rngs(0))
    set_hash_tables(target.layers, np.arange(5.0))
    assert target.layers[1].ffn.gate.tid2eid is None
    np.testing.assert_array_equal(target.layers[0].ffn.gate.tid2eid[...], balanced_hash(np.arange(5.0), 4, 2, seed=0))
