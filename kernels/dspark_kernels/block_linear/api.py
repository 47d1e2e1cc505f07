"""Linear maps with fp8 codes: the reference on CPU and for many rows, Pallas-Triton products on CUDA."""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from dspark_kernels.block_linear import reference, triton
from dspark_kernels.block_linear.tuning import MOST_ROWS, plan
from dspark_kernels.block_scaled import BlockScaled
from dspark_kernels.formats import FP8_BLOCK
from dspark_kernels.lowerings import Implementation, choose, with_reference_gradient


def _unsuited(x: Array, weight: BlockScaled) -> str | None:
    inputs, outputs = weight.codes.shape[-2:]
    if inputs % FP8_BLOCK or outputs % FP8_BLOCK:
        return f"the matrix is {inputs} x {outputs} (expected multiples of {FP8_BLOCK})"
    if x.dtype != jnp.bfloat16:
        return f"rows of {x.dtype} (expected bfloat16)"
    return None if x.size else "no rows"


def block_linear(
    x: Float[Array, "... k"], weight: BlockScaled, *, wide: bool = False, implementation: Implementation | None = None
) -> Float32[Array, "... n"]:
    """x @ w of rows with fp8 codes [k, n]; with codes [G, k, n] the rows are x[..., g, :], each with its own matrix.

    Exact products with fp32 accumulation, as with weights widened to bf16. The kernels: k and n multiples of 128, bf16 rows,
    by default up to `tuning.MOST_ROWS` of them; otherwise the weights are widened in the program. A row's result depends on
    that row alone and is the same in every run.

    Args:
      wide: rows are below 2^28 in magnitude. Otherwise they must be below 65504, and what is below 2^-17 may be rounded more
        coarsely than in bf16: few rows are taken in fp16.
    """
    if weight.codes.dtype != jnp.float8_e4m3fn:
        raise ValueError(f"codes are {weight.codes.dtype}; expected float8_e4m3fn (fp4 is for experts: expert_mlp)")
    grouped = weight.codes.ndim == 3
    stacked = weight if grouped else BlockScaled(weight.codes[None], weight.scale[None])
    groups, inputs, outputs = stacked.codes.shape
    if x.shape[-1] != inputs or (grouped and x.shape[-2:-1] != (groups,)):
        raise ValueError(f"rows of shape {list(x.shape)} with codes of shape {list(weight.codes.shape)}")
    leading = x.shape[: -2 if grouped else -1]
    rows = x.reshape(math.prod(leading), groups, inputs)
    lowering = choose(implementation, _unsuited(x, weight))
    if implementation is None and rows.shape[0] > MOST_ROWS:
        lowering = "reference"

    def kernel(x: Array, codes: Array, scale: Array) -> Array:
        sizes = plan(x.shape[0], groups, inputs, outputs)
        return triton.block_linear(x, BlockScaled(codes, scale), sizes=sizes, wide=wide, interpret=lowering == "interpret")

    def plain(x: Array, codes: Array, scale: Array) -> Array:
        return reference.block_linear(x, BlockScaled(codes, scale))

    y = plain(rows, *stacked) if lowering == "reference" else with_reference_gradient(kernel, plain, rows, *stacked)
    return y.reshape(*leading, groups, outputs) if grouped else y.reshape(*leading, outputs)
