"""Expert routing in plain jnp (DeepSeek-V4: square root of softplus, biased selection, un-biased weights)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int


class Routing(NamedTuple):
    """Chosen experts by row. Padded rows have id -1 and weight 0."""

    ids: Int[Array, "B k"]
    weights: Float32[Array, "B k"]


def route(
    logits: Float32[Array, "B E"],
    *,
    top_k: int,
    scale: float,
    valid: Bool[Array, "B"],
    bias: Float32[Array, "E"] | None = None,
    ids: Int[Array, "B k"] | None = None,
) -> Routing:
    """Top-k experts by `score + bias` (ties to the lowest id), or the given `ids` of a hash-routed layer.

    Weights are the un-biased scores of the chosen experts, normalised to sum to `scale`.
    """
    scores = jnp.sqrt(jax.nn.softplus(logits))
    if ids is None:
        choice = scores if bias is None else scores + bias
        _, ids = jax.lax.top_k(jax.lax.stop_gradient(choice), top_k)
    weights = jnp.take_along_axis(scores, ids, axis=1)
    weights = weights / jnp.sum(weights, axis=1, keepdims=True) * scale
    keep = valid[:, None]
    return Routing(jnp.where(keep, ids, -1), jnp.where(keep, weights, 0.0))


def expert_load(ids: Int[Array, "B k"], num_experts: int) -> Float32[Array, "E"]:
    """How many rows chose each expert; padded rows (id -1) count nowhere."""
    return jnp.sum(jax.nn.one_hot(ids, num_experts, dtype=jnp.float32), axis=(0, 1))
