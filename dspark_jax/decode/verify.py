"""Speculative sampling: which drafts survive, and which token follows them.

A draft x is accepted with probability min(1, p(x) / q(x)); at the first rejection the token comes from max(p - q, 0)
normalised, after the last acceptance from p itself. The output then has exactly the target's distribution, whatever
the drafter proposes (DSpark paper, "Verification"; Leviathan et al. 2023, Chen et al. 2023).
"""

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Int

from dspark_jax.decode import noise
from dspark_jax.decode.sampling import SamplingState, processed_logits


@flax.struct.dataclass
class Verdict:
    """accepted i32[R]: drafts kept, 0..num_drafts. token i32[R]: the token that follows them."""

    accepted: Int[Array, "R"]
    token: Int[Array, "R"]


def _row(x: Array, index: Int[Array, "R"]) -> Array:
    """x[r, index[r]] for x [R, n, ...]."""
    return jnp.take_along_axis(x, index.reshape((-1,) + (1,) * (x.ndim - 1)), axis=1)[:, 0]


def _probability(logits: Float[Array, "R n V"], token: Int[Array, "R n"]) -> Float[Array, "R n"]:
    """The softmax of `logits` at `token`, without the rest of it."""
    chosen = jnp.take_along_axis(logits, token[..., None], axis=-1)[..., 0]
    return jnp.exp(chosen - jax.nn.logsumexp(logits, axis=-1))


def speculative_sample(
    p_logits: Float[Array, "R g+1 V"],
    q_logits: BFloat16[Array, "R g V"],
    drafts: Int[Array, "R g"],
    num_drafts: Int[Array, "R"],
    sampling: SamplingState,
    position: Int[Array, "R"],
) -> Verdict:
    """Accepts a prefix of the drafts and draws the token after it.

    p_logits: raw target logits; row j predicts the token at position + 1 + j. q_logits: the logits that draft j was
    sampled from, already processed and rounded (softmax in fp32); a one-hot q has -inf elsewhere. Drafts from
    num_drafts on are ignored; an id outside the vocabulary counts as no proposal. position: the anchor's. g may be 0:
    plain decoding. Temperature 0 accepts exactly the argmax and emits the argmax.
    """
    slots, length = drafts.shape
    vocab = p_logits.shape[-1]
    rows = p_logits.shape[:2]
    p_rows = processed_logits(
        p_logits,
        jnp.broadcast_to(sampling.temperature[:, None], rows),
        jnp.broadcast_to(sampling.top_k[:, None], rows),
        jnp.broadcast_to(sampling.top_p[:, None], rows),
    )

    if length == 0:
        accepted = jnp.zeros((slots,), jnp.int32)
        p = jax.nn.softmax(p_rows[:, 0], axis=-1)
        weights, purpose = p, noise.BONUS
    else:
        q_rows = q_logits.astype(jnp.float32)
        index = jnp.arange(length, dtype=jnp.int32)
        proposed = (index < num_drafts[:, None]) & (drafts >= 0) & (drafts < vocab)
        token = jnp.clip(drafts, 0, vocab - 1)
        p_x, q_x = _probability(p_rows[:, :-1], token), _probability(q_rows, token)
        u = noise.uniform(sampling.seed, position[:, None] + 1 + index, noise.ACCEPT)
        # p > 0 guards the equality: u * q may underflow to 0 where p is 0.
        survives = proposed & (u * q_x <= p_x) & (p_x > 0)
        accepted = jnp.sum(jnp.cumprod(survives.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)

        at = jnp.minimum(accepted, length - 1)
        rejected = (accepted < length) & _row(proposed, at)
        p = jax.nn.softmax(_row(p_rows, accepted), axis=-1)
        q = jax.nn.softmax(_row(q_rows, at), axis=-1)
        residual = jnp.maximum(p - q, 0)
        # Rounding can leave no residual at all where p and q agree; the right limit is p.
        from_residual = rejected & (jnp.sum(residual, axis=-1) > 0)
        weights = jnp.where(from_residual[:, None], residual, p)
        purpose = jnp.where(rejected, noise.RESIDUAL, noise.BONUS)

    # Noise for the emitted token only: [R, V], not [R, g + 1, V].
    gumbel = noise.gumbel(sampling.seed, position + 1 + accepted, purpose, vocab)
    emitted = jnp.argmax(jnp.log(weights) + gumbel, axis=-1).astype(jnp.int32)
    return Verdict(accepted=accepted, token=emitted)
