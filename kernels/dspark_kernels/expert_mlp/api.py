"""Expert feed-forward networks: the reference on CPU, grouped Pallas-Triton products on CUDA."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from dspark_kernels.block_scaled import BlockScaled
from dspark_kernels.expert_mlp import few_rows, reference, tiles, triton
from dspark_kernels.expert_mlp.tuning import Plan, plan, weight_format
from dspark_kernels.lowerings import Implementation, choose, with_reference_gradient

MULTIPLE = 128  # both widths are multiples of it: no block of weights or scales is cut


def _unsuited(x: Array, *matrices: triton.Weight) -> str | None:
    for w in matrices:
        kind = weight_format(w)
        values = w.codes if isinstance(w, BlockScaled) else w
        inputs = 2 * values.shape[-2] if kind == "fp4" else values.shape[-2]
        if inputs % MULTIPLE or values.shape[-1] % MULTIPLE:
            return f"an expert's matrix is {inputs} x {values.shape[-1]} (expected multiples of {MULTIPLE})"
        if x.dtype not in (jnp.bfloat16, jnp.float32) or x.dtype != (values.dtype if kind in ("f32", "bf16") else jnp.bfloat16):
            return f"rows of {x.dtype} with {kind} weights (expected bfloat16 for both, or float32 rows and dense weights)"
        if values.dtype.itemsize == 1 and 2**31 < values.size <= 2**32:  # Pallas-Triton's offsets overflow there
            return f"{values.size} codes of one byte (expected at most 2^31)"
        if kind != weight_format(matrices[0]):
            return "matrices of different formats"
    return None if x.shape[0] else "no rows"


def expert_mlp(
    x: Float[Array, "B d"],
    ids: Int[Array, "B k"],
    weights: Float32[Array, "B k"],
    w1: Float[Array, "E d f"] | BlockScaled,
    w3: Float[Array, "E d f"] | BlockScaled,
    w2: Float[Array, "E f d"] | BlockScaled,
    *,
    limit: float,
    implementation: Implementation | None = None,
) -> Float32[Array, "B d"]:
    """`reference.expert_mlp`. The kernels: d and f multiples of 128; bf16 or fp32 rows with dense weights of the same
    dtype, or bf16 rows with block-scaled weights. Two launches beside the small operations that list the tiles; only
    the chosen experts' weights are read, and a row's k results are added in the order of its ids. With block-scaled weights
    a row's channels must stay below 65504 in magnitude, and those below 2^-14 may be rounded more coarsely than in bf16.
    """
    lowering = choose(implementation, _unsuited(x, w1, w3, w2))

    def plain(x, ids, weights, w1, w3, w2):
        return reference.expert_mlp(x, ids, weights, w1, w3, w2, limit=limit)

    def kernel(x, ids, weights, w1, w3, w2):
        sizes = plan(ids.size, (w1.codes if isinstance(w1, BlockScaled) else w1).shape[0], weight_format(w1))
        return grouped(x, ids, weights, w1, w3, w2, limit=limit, sizes=sizes, interpret=lowering == "interpret")

    if lowering == "reference":
        return plain(x, ids, weights, w1, w3, w2)
    return with_reference_gradient(kernel, plain, x, ids, weights, w1, w3, w2)


def grouped(
    x: Float[Array, "B d"],
    ids: Int[Array, "B k"],
    weights: Float32[Array, "B k"],
    w1: triton.Weight,
    w3: triton.Weight,
    w2: triton.Weight,
    *,
    limit: float,
    sizes: Plan,
    interpret: bool = False,
) -> Float32[Array, "B d"]:
    """The kernels with given block sizes."""
    experts = (w1.codes if isinstance(w1, BlockScaled) else w1).shape[0]
    listed = tiles.build(ids, experts, sizes.block_m)
    options = {"block_m": sizes.block_m, "interpret": interpret}
    of: Any = few_rows if isinstance(sizes.gate_up, few_rows.Lanes) else triton
    hidden = of.gate_up(x, weights, listed, w1, w3, limit=limit, blocks=sizes.gate_up, **options)
    return combine(of.down(hidden, listed, w2, blocks=sizes.down, **options), ids, experts)


def combine(parts: Float32[Array, "N d"], ids: Int[Array, "B k"], experts: int) -> Float32[Array, "B d"]:
    """Sums of the results by entry over each row's choices; those that are not here are not read."""
    here = (ids >= 0) & (ids < experts)
    return jnp.sum(jnp.where(here[:, :, None], parts.reshape(*ids.shape, -1), 0.0), axis=1)
