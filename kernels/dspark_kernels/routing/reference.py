"""Expert routing in plain jnp (DeepSeek-V4: square root of softplus, biased selection, un-biased weights)."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int

from dspark_kernels.routing.replicas import choose_slots

Score = Literal["sqrt_softplus", "sigmoid", "softmax"]


class Routing(NamedTuple):
    """Chosen experts by row. Padded rows have id -1 and weight 0."""

    ids: Int[Array, "B k"]
    weights: Float32[Array, "B k"]


class SlotRouting(NamedTuple):
    """Chosen experts and their slots by row (-1 and weight 0 in padded rows), and how many rows each slot gets."""

    ids: Int[Array, "B k"]
    weights: Float32[Array, "B k"]
    slots: Int[Array, "B k"]
    rows: Int[Array, "S"]


def score_function(logits: Float32[Array, "B E"], score: Score) -> Float32[Array, "B E"]:
    """Scores of all experts: DeepSeek-V4's square root of softplus, or sigmoid, or softmax over the experts."""
    if score == "sqrt_softplus":
        return jnp.sqrt(jax.nn.softplus(logits))
    return jax.nn.sigmoid(logits) if score == "sigmoid" else jax.nn.softmax(logits, axis=-1)


def route(
    logits: Float32[Array, "B E"],
    *,
    top_k: int,
    scale: float,
    valid: Bool[Array, "B"],
    bias: Float32[Array, "E"] | None = None,
    ids: Int[Array, "B k"] | None = None,
    score: Score = "sqrt_softplus",
) -> Routing:
    """Top-k experts by `score + bias` (ties to the lowest id), or the given `ids` of a hash-routed layer.

    Weights are the un-biased scores of the chosen experts, normalised to sum to `scale`.
    """
    scores = score_function(logits, score)
    if ids is None:
        choice = scores if bias is None else scores + bias
        _, ids = jax.lax.top_k(jax.lax.stop_gradient(choice), top_k)
    weights = jnp.take_along_axis(scores, ids, axis=1)
    weights = weights / jnp.sum(weights, axis=1, keepdims=True) * scale
    keep = valid[:, None]
    return Routing(jnp.where(keep, ids, -1), jnp.where(keep, weights, 0.0))


def route_to_slots(
    logits: Float32[Array, "B E"],
    *,
    top_k: int,
    scale: float,
    valid: Bool[Array, "B"],
    bias: Float32[Array, "E"] | None = None,
    ids: Int[Array, "B k"] | None = None,
    score: Score = "sqrt_softplus",
    expert_slots: Int[np.ndarray, "E R"] | None = None,
    replica_count: Int[np.ndarray, "E"] | None = None,
    offset: int | Int[Array, ""] = 0,
) -> SlotRouting:
    """`route`, then `choose_slots` with the tables of a placement (without tables a slot is its expert), then rows by slot.

    The slots are numbered 0 … S - 1 without gaps, S = sum of `replica_count`.
    """
    routing = route(logits, top_k=top_k, scale=scale, valid=valid, bias=bias, ids=ids, score=score)
    slots, count = routing.ids, logits.shape[1]
    if expert_slots is not None and replica_count is not None:
        slots, count = choose_slots(slots, expert_slots, replica_count, offset=offset), int(replica_count.sum())
    return SlotRouting(*routing, slots, count_rows(slots, count))


def count_rows(slots: Int[Array, "B k"], num_slots: int) -> Int[Array, "S"]:
    """How many entries name each slot; -1 counts nowhere."""
    return jnp.sum(slots.reshape(-1, 1) == jnp.arange(num_slots), axis=0, dtype=jnp.int32)


def expert_load(ids: Int[Array, "B k"], num_experts: int) -> Float32[Array, "E"]:
    """How many rows chose each expert; padded rows (id -1) count nowhere."""
    return jnp.sum(jax.nn.one_hot(ids, num_experts, dtype=jnp.float32), axis=(0, 1))
