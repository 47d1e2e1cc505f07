"""The one rule of matrix products: inputs as they are, fp32 accumulation, fp32 result."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32


def einsum(subscripts: str, left: Float[Array, "..."], right: Float[Array, "..."]) -> Float32[Array, "..."]:
    """`jnp.einsum` of two operands in left's dtype with fp32 accumulation; fp32 inputs use full fp32 products.

    XLA's CPU backend lacks mixed products for some shapes; there bf16 inputs are widened first, which changes no value.
    """
    right = right.astype(left.dtype)
    if left.dtype == jnp.float32:
        return jnp.einsum(subscripts, left, right, precision=jax.lax.Precision.HIGHEST)
    if jax.default_backend() == "cpu":
        left, right = left.astype(jnp.float32), right.astype(jnp.float32)
    return jnp.einsum(subscripts, left, right, preferred_element_type=jnp.float32)
