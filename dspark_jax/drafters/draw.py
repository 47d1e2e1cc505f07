"""Drawing a block left to right from the logits of one parallel pass (paper section 3.2)."""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Float32, Int

from dspark_jax.decode.noise import DraftNoise, draft_gumbel
from dspark_jax.decode.protocols import Proposal
from dspark_jax.decode.sampling import SamplingState, processed_logits
from dspark_jax.drafters.heads import ConfidenceHead, MarkovHead, NoHead

Widen = Callable[[Float32[Array, "R D"]], Float32[Array, "R V"]]


def draw_block(
    head: MarkovHead | NoHead,
    confidence_head: ConfidenceHead | None,
    base: Float32[Array, "R gamma D"],
    hidden: Float[Array, "R gamma d"],
    anchor: Int[Array, "R"],
    position: Int[Array, "R"],
    sampling: SamplingState,
    draft_noise: DraftNoise = draft_gumbel,
    widen: Widen | None = None,
) -> Proposal:
    """Draws draft k behind draft k - 1; each token is drawn from logits already rounded to bf16 (what is stored).

    Args:
      base: logits of the parallel pass; row k is of draft k.
      hidden: the rows that heads read.
      anchor, position: the token in front of the block, and where it stands.
      widen: logits over the target's vocabulary from those over the drafted one, -inf where there is no draft; None where
        the two are one.
    """
    state = head.start(anchor.shape[0])
    previous, tokens, kept, confidence = anchor, [], [], []
    for k in range(hidden.shape[1]):
        row, embedded = base[:, k], hidden[:, k, :0]
        if isinstance(head, MarkovHead):
            embedded = head.embed(previous).astype(hidden.dtype)
            state, feature = head.feature(state, embedded, hidden[:, k])
            row = row + head.bias(feature)
        if widen is not None:
            row = widen(row)
        confidence.append(confidence_head(hidden[:, k], embedded) if confidence_head else jnp.zeros(row.shape[0]))
        logits: BFloat16[Array, "R V"] = processed_logits(
            row, sampling.temperature, sampling.top_k, sampling.top_p
        ).astype(jnp.bfloat16)
        noise = draft_noise(sampling.seed, position, k, row.shape[-1])
        previous = jnp.argmax(logits.astype(jnp.float32) + noise, axis=-1).astype(anchor.dtype)
        tokens.append(previous)
        kept.append(logits)
    return Proposal(jnp.stack(tokens, 1), jnp.stack(kept, 1), jnp.stack(confidence, 1))
