"""Speculative sampling: which drafts survive, and which token follows them.

A draft x is accepted with probability min(1, p(x) / q(x)); at the first rejection the token comes from max(p - q, 0)
normalised, after the last acceptance from p itself. The output then has exactly the target's distribution, whatever
the drafter proposes (DSpark paper, "Verification"; Leviathan et al. 2023, Chen et al. 2023).

With coupled verification the target's token at a position is the argmax of its log-probabilities plus Gumbel noise, keyed
by seed and position alone; the draft is the argmax of its own plus the same noise, and accepted where the two agree. The
text is then a function of prompt and seed ("drafter-invariant": Daliri, Musco and Suresh, arXiv 2408.07978).
"""

from typing import Any, Final

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Bool, Float, Int

from dspark_jax.decode import noise
from dspark_jax.decode.sampling import SamplingState, processed_logits

REJECTION: Final = "rejection"
COUPLED: Final = "coupled"


def verify_faults(verify: Any) -> list[str]:
    """What is wrong with the name of a way to verify."""
    if verify in (REJECTION, COUPLED):
        return []
    return [
        f"verify is {verify!r}; expected {REJECTION!r} (rejection sampling, the default) or {COUPLED!r} (draft and target share"
        " their noise)"
    ]


@flax.struct.dataclass
class Verdict:
    """accepted i32[R]: drafts kept, 0..num_drafts. token i32[R]: the token that follows them."""

    accepted: Int[Array, "R"]
    token: Int[Array, "R"]


def _row(x: Array, index: Int[Array, "R"]) -> Array:
    """x[r, index[r]] for x [R, n, ...]."""
    return jnp.take_along_axis(x, index.reshape((-1,) + (1,) * (x.ndim - 1)), axis=1)[:, 0]


def _leading(survives: Bool[Array, "R n"]) -> Int[Array, "R"]:
    """How many entries are true before the first that is not."""
    return jnp.sum(jnp.cumprod(survives.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


def _processed_rows(logits: Float[Array, "R n V"], sampling: SamplingState) -> Float[Array, "R n V"]:
    """`processed_logits` with the parameters of each slot in all of its rows."""
    each = (jnp.broadcast_to(x[:, None], logits.shape[:2]) for x in (sampling.temperature, sampling.top_k, sampling.top_p))
    return processed_logits(logits, *each)


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
    p_rows = _processed_rows(p_logits, sampling)

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
        accepted = _leading(proposed & (u * q_x <= p_x) & (p_x > 0))

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


def coupled_sample(
    p_logits: Float[Array, "R g+1 V"],
    drafts: Int[Array, "R g"],
    num_drafts: Int[Array, "R"],
    sampling: SamplingState,
    position: Int[Array, "R"],
) -> Verdict:
    """Chooses the target's tokens with `noise.coupled_gumbel` and accepts the drafts that equal them.

    Arguments as for `speculative_sample`. A draft of which the noise is not shared is accepted less often, and changes no
    token.
    """
    vocab, length = p_logits.shape[-1], drafts.shape[1]
    p_rows = _processed_rows(p_logits, sampling)

    def choose(j: Int[Array, ""]) -> Int[Array, "R"]:
        gumbel = noise.coupled_gumbel(sampling.seed, position, j, vocab)
        return jnp.argmax(p_rows[:, j] + gumbel, axis=-1).astype(jnp.int32)

    # Row by row: one row's noise is [R, V], all of it would be [R, g + 1, V].
    choices = jax.lax.map(choose, jnp.arange(length + 1)).T
    verified = jnp.arange(length) < num_drafts[:, None]
    accepted = _leading(verified & (drafts == choices[:, :-1]))
    return Verdict(accepted=accepted, token=_row(choices, accepted))
