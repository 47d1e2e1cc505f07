"""The sequential draft head: the reference on CPU, Pallas-Triton kernels on CUDA."""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Float32, Int

from dspark_kernels.draft_head import reference, triton
from dspark_kernels.lowerings import Implementation, choose


def _unsuited(base: Array, w1: Array, w2: Array) -> str | None:
    rows, gamma, vocab = base.shape
    if w1.dtype != w2.dtype or w1.dtype not in (jnp.bfloat16, jnp.float32):
        return f"W1 is {w1.dtype} and W2 {w2.dtype} (expected both bfloat16 or both float32)"
    if w2.shape[0] % 16:
        return f"rank {w2.shape[0]} (expected a multiple of 16)"
    if max(base.size, w2.size) >= 2**31:
        return f"{rows} rows of {gamma} x {vocab} logits, rank {w2.shape[0]} (expected fewer than 2^31 numbers an array)"
    return None


def lowering(
    base: Float32[Array, "R gamma V"],
    w1: Float[Array, "V r"],
    w2: Float[Array, "r V"],
    implementation: Implementation | None = None,
) -> Implementation:
    """What `draft` runs for arguments of these shapes."""
    return choose(implementation, _unsuited(base, w1, w2))


def draft(
    base: Float32[Array, "R gamma V"],
    anchor: Int[Array, "R"],
    w1: Float[Array, "V r"],
    w2: Float[Array, "r V"],
    temperature: Float32[Array, "R"] | None = None,
    noise: Sequence[Float32[Array, "R V"]] | None = None,
    *,
    implementation: Implementation | None = None,
) -> tuple[Int[Array, "R gamma"], BFloat16[Array, "R gamma V"]]:
    """`reference.draft`: the drafts of a block and the logits that they were drawn from. Two launches a draft on CUDA.

    The kernels' logits and drafts are the reference's wherever the sums of the bias are, and the division rounds alike.
    """
    chosen = lowering(base, w1, w2, implementation)
    if chosen == "reference":
        return reference.draft(base, anchor, w1, w2, temperature, noise)
    tokens, logits = triton.draft(base, anchor, w1, w2, temperature, noise, interpret=chosen == "interpret")
    return tokens.astype(anchor.dtype), logits
