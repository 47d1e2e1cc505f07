"""Products with fp8 codes in plain jnp: the weights are widened in front of the product."""

from jaxtyping import Array, Float, Float32

from dspark_kernels.block_scaled import BlockScaled, widened
from dspark_kernels.precision import einsum


def block_linear(x: Float[Array, "T G k"], weight: BlockScaled) -> Float32[Array, "T G n"]:
    """Of every row and group x[t, g] @ w[g], with w's codes [G, k, n], in x's dtype with fp32 accumulation."""
    return einsum("tgk,gkn->tgn", x, widened(weight, x.dtype))
