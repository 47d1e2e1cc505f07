"""Losses of the target (next token, indexer) and of the drafter (paper section 4, eqs. 8-12)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from dspark_jax.models.attention import AttentionAux


def next_token_loss(logits: Float32[Array, "... V"], label: Int[Array, "..."]) -> Float32[Array, ""]:
    """Mean cross-entropy in nats."""
    chosen = jnp.take_along_axis(logits, label[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)


def indexer_loss(aux: AttentionAux) -> Float32[Array, ""]:
    """KL from the head-averaged attention over the entries in use to the softmax of the indexer's scores over the same.

    The attention weights carry no gradient, and the indexer reads detached inputs: this is the indexer's only
    teacher, and it teaches nothing else. Rows that see no entry count nowhere.
    """
    scores = jnp.where(aux.visible, aux.scores, -jnp.inf)
    some = jnp.any(aux.visible, axis=-1)
    log_index = jax.nn.log_softmax(jnp.where(some[..., None], scores, 0.0), axis=-1)
    weights = jnp.where(aux.visible, aux.weights, 0.0)
    share = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-9)
    divergence = jnp.sum(
        jnp.where(share > 0, share * (jnp.log(share + 1e-30) - jnp.where(aux.visible, log_index, 0.0)), 0.0), axis=-1
    )
    return jnp.sum(divergence * some) / (jnp.sum(some) + 1e-9)


class DraftLosses(NamedTuple):
    """The three losses, their weighted sum, and what acceptance they predict.

    `acceptance` [gamma] is the mean of sum min(p_t, p_d) by position; `tau` the mean accepted length at temperature 1
    with the bonus token counted; `greedy_tau` the same for greedy decoding, all teacher-forced.
    """

    total: Float32[Array, ""]
    cross_entropy: Float32[Array, ""]
    distance: Float32[Array, ""]
    confidence: Float32[Array, ""]
    acceptance: Float32[Array, "gamma"]
    tau: Float32[Array, ""]
    greedy_tau: Float32[Array, ""]


def draft_losses(
    draft_logits: Float32[Array, "N gamma V"],
    target_logits: Float32[Array, "N gamma V"],
    confidence: Float32[Array, "N gamma"],
    label: Int[Array, "N gamma"],
    keep: Bool[Array, "N"] | Bool[Array, "N gamma"],
    *,
    decay: float = 4.0,
    weights: tuple[float, float, float] = (0.1, 0.9, 1.0),
) -> DraftLosses:
    """Losses of `N` blocks; row k of a block predicts the token `label[:, k]`, and slot 0 counts like the others.

    Position weights are `exp(-k / decay)` with k from 0 (eq. 9), normalised to mean 1 over the block. Blocks, or the rows of
    a block from one on, without `keep` (they would cross a document's end) count nowhere. The confidence's goal is
    `1 - ½‖p_d - p_t‖₁`, without gradient.
    """
    gamma = label.shape[1]
    position = jnp.exp(-jnp.arange(gamma) / decay)
    position = position / jnp.mean(position)
    keep = jnp.broadcast_to(keep if keep.ndim == 2 else keep[:, None], label.shape)
    share = keep.astype(jnp.float32) / (jnp.sum(keep) + 1e-9)

    log_draft = jax.nn.log_softmax(draft_logits, axis=-1)
    target = jax.nn.softmax(jax.lax.stop_gradient(target_logits), axis=-1)
    distance = jnp.sum(jnp.abs(jnp.exp(log_draft) - target), axis=-1)
    entropy = -jnp.take_along_axis(log_draft, label[..., None], axis=-1)[..., 0]
    survive = jax.lax.stop_gradient(1 - 0.5 * distance)
    binary = jnp.logaddexp(0.0, confidence) - survive * confidence

    def mean(x: Float[Array, "N gamma"]) -> Float32[Array, ""]:
        return jnp.sum(x * position * share)

    parts = (mean(entropy), mean(distance), mean(binary))
    greedy = jnp.argmax(draft_logits, axis=-1) == jnp.argmax(target_logits, axis=-1)
    return DraftLosses(
        total=jnp.dot(jnp.asarray(weights), jnp.stack(parts)),
        cross_entropy=parts[0],
        distance=parts[1],
        confidence=parts[2],
        acceptance=jnp.sum(survive * keep, axis=0) / (jnp.sum(keep, axis=0) + 1e-9),
        tau=accepted_length(survive, keep),
        greedy_tau=accepted_length(greedy.astype(jnp.float32), keep),
    )


def accepted_length(survive: Float[Array, "N gamma"], keep: Bool[Array, "N gamma"]) -> Float32[Array, ""]:
    """Mean tokens a round, bonus included, when draft k survives with probability `survive[:, k]` given the ones
    before it; over the blocks that are whole.
    """
    whole = jnp.all(keep, axis=1)
    length = 1 + jnp.sum(jnp.cumprod(survive, axis=1), axis=1)
    return jnp.sum(length * whole) / (jnp.sum(whole) + 1e-9)
