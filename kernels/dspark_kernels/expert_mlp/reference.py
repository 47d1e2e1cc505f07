"""Expert feed-forward networks in plain jnp: every expert on every row, unchosen ones weighted by zero.

Right for small models and tests. The cost grows with the number of experts, not with the number of chosen ones.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from dspark_kernels.block_scaled import BlockScaled, widened
from dspark_kernels.precision import einsum


def swiglu(gate: Float32[Array, "... f"], up: Float32[Array, "... f"], limit: float) -> Float32[Array, "... f"]:
    """Clamped SwiGLU: the gate is clamped from above only, `up` on both sides (limit 0: no clamp)."""
    if limit > 0:
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return jax.nn.silu(gate) * up


def expert_mlp(
    x: Float[Array, "B d"],
    ids: Int[Array, "B k"],
    weights: Float32[Array, "B k"],
    w1: Float[Array, "E d f"] | BlockScaled,
    w3: Float[Array, "E d f"] | BlockScaled,
    w2: Float[Array, "E f d"] | BlockScaled,
    *,
    limit: float,
) -> Float32[Array, "B d"]:
    """Weighted sum over each row's chosen experts of `w2(weight * swiglu(w1 x, w3 x))`, in fp32.

    `ids` outside [0, E) contribute nothing, so a rank passes its experts' local ids. Rows must be finite. The routing
    weight multiplies before `w2`, as in the reference inference code. Block-scaled weights are widened to x's dtype, all
    experts at once: they are small where they are kept, not while they are used.
    """
    w1, w3, w2 = (widened(w, x.dtype) for w in (w1, w3, w2))
    experts = w1.shape[0]
    dense = jnp.sum(jax.nn.one_hot(ids, experts, dtype=jnp.float32) * weights[:, :, None], axis=1)
    gate = einsum("bd,edf->ebf", x, w1).astype(x.dtype).astype(jnp.float32)
    up = einsum("bd,edf->ebf", x, w3).astype(x.dtype).astype(jnp.float32)
    hidden = swiglu(gate, up, limit) * dense.T[:, :, None]
    return einsum("ebf,efd->bd", hidden.astype(x.dtype), w2)
