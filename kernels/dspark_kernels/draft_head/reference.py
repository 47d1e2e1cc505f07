"""DSpark's Markov head (paper section 3.2, eqs. 4 and 5) in plain jnp, without top-k and top-p.

Draft k has the logits `base[:, k] + W2 W1[draft k - 1]`. They are divided by the temperature and rounded to bf16, and the
draft is the argmax of these rounded logits plus the noise: with Gumbel noise it is drawn from exactly their softmax, which
speculative sampling needs.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Float32, Int

from dspark_kernels.precision import einsum


def one_hot(best: Int[Array, "..."], vocab: int) -> BFloat16[Array, "... V"]:
    """Logits of a greedy draft: 0 for it, -inf for all others."""
    return jnp.where(jnp.arange(vocab) == best[..., None], 0.0, -jnp.inf).astype(jnp.bfloat16)


def processed(logits: Float32[Array, "R V"], temperature: Float32[Array, "R"]) -> BFloat16[Array, "R V"]:
    """Logits less their maximum, over the temperature, in bf16; at temperature 0 `one_hot` of the first maximum."""
    # Subtracting the maximum first keeps tiny temperatures finite, and the likely tokens' logits precise.
    peak = jnp.max(logits, axis=-1, keepdims=True)
    greedy = (temperature <= 0)[:, None]
    scaled = (logits - jnp.where(jnp.isneginf(peak), 0.0, peak)) / jnp.where(greedy, 1.0, temperature[:, None])
    return jnp.where(greedy, one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1]), scaled.astype(jnp.bfloat16))


def draft(
    base: Float32[Array, "R gamma V"],
    anchor: Int[Array, "R"],
    w1: Float[Array, "V r"],
    w2: Float[Array, "r V"],
    temperature: Float32[Array, "R"] | None = None,
    noise: Sequence[Float32[Array, "R V"]] | None = None,
) -> tuple[Int[Array, "R gamma"], BFloat16[Array, "R gamma V"]]:
    """Drafts and the logits that they were drawn from.

    Args:
      base: logits of the parallel pass.
      anchor: the token in front of the first draft.
      w1, w2: of one dtype; the product has operands of that dtype and is summed in fp32.
      temperature: by row, 0 is greedy; read only with `noise`.
      noise: what is added before draft k is chosen, for each k; None drafts greedily in all rows.
    """
    previous, tokens, kept = anchor, [], []
    for k in range(base.shape[1]):
        logits = base[:, k] + einsum("ri,iv->rv", w1[previous], w2)
        if temperature is None or noise is None:
            previous = jnp.argmax(logits, axis=-1)
            kept.append(one_hot(previous, logits.shape[-1]))
        else:
            kept.append(processed(logits, temperature))
            previous = jnp.argmax(kept[-1].astype(jnp.float32) + noise[k], axis=-1)
        previous = previous.astype(anchor.dtype)
        tokens.append(previous)
    return jnp.stack(tokens, 1), jnp.stack(kept, 1)
