"""What the language-model loss cannot train: hash tables of experts and the router's selection bias."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float32

from dspark_jax.models.moe import MoE, MoEAux


def balanced_hash(counts: np.ndarray, num_experts: int, top_k: int, seed: int = 0) -> np.ndarray:
    """tid2eid int32 [V, k]: the most frequent tokens first, each to the `top_k` experts with the least traffic so far.

    `counts` [V] are token frequencies. Ties, which rare tokens meet often, are broken at random.
    """
    rng = np.random.default_rng(seed)
    load = np.zeros(num_experts)
    table = np.zeros((len(counts), top_k), np.int32)
    for token in np.argsort(-counts, kind="stable"):
        order = np.lexsort((rng.random(num_experts), load))[:top_k]
        table[token] = np.sort(order)
        load[order] += counts[token] + 1e-3
    return table


def update_bias(bias: Float32[Array, "E"], aux: MoEAux, rate: float) -> Float32[Array, "E"]:
    """Moves each expert's bias by `rate` towards equal load: up where it had fewer rows than the mean, down where
    more.
    """
    return bias + rate * jnp.sign(jnp.mean(aux.load) - aux.load)


def set_hash_tables(layers: nnx.List, counts: np.ndarray) -> None:
    """Fills every hash-routed layer's table, each with its own tie-breaking."""
    for index, layer in enumerate(layers):
        moe: MoE = layer.ffn
        if moe.gate.tid2eid is not None:
            table = balanced_hash(counts, moe.config.n_routed_experts, moe.config.num_experts_per_tok, seed=index)
            moe.gate.tid2eid = nnx.Param(jnp.asarray(table))


def load_spread(aux: MoEAux) -> Float32[Array, ""]:
    """max / mean - 1 of the rows by expert: 0 when balanced."""
    return jnp.max(aux.load) / (jnp.mean(aux.load) + 1e-9) - 1


def biases(state: nnx.State) -> list[jax.Array]:
    """Router biases in a state, in layer order."""
    return [v.get_value() for path, v in nnx.to_flat_state(state) if path[-2:] == ("gate", "bias")]
