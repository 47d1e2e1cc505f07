"""Products of some rows with fp8 codes as Pallas-Triton kernels: those of the experts, without a list of tiles.

Few rows take programs of one warp (`expert_mlp.few_rows`), more rows those of `expert_mlp.triton`. A matrix may be too
small to keep all processors loading, so programs share its inputs; their sums are added in a fixed order afterwards.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Float32

from dspark_kernels.block_scaled import BlockScaled
from dspark_kernels.expert_mlp import decode, few_rows
from dspark_kernels.expert_mlp.few_rows import Lanes
from dspark_kernels.expert_mlp.triton import Blocks, product
from dspark_kernels.formats import FP8_BLOCK


class Plan(NamedTuple):
    """Sizes of a launch.

    block_m: rows of a program.
    split: programs that share the inputs, a divisor of the passes over them (`Lanes.split` is not read).
    direct: of `Lanes`: a program takes rows as they are; otherwise XLA orders and converts them before.
    """

    block_m: int
    blocks: Lanes | Blocks
    split: int
    direct: bool = False

    def fits(self, inputs: int, outputs: int) -> bool:
        """Whether programs of these sizes cover matrices of so many inputs and outputs exactly."""
        n, k = self.tile
        return outputs % n == 0 and inputs % (k * self.split) == 0 and FP8_BLOCK % n == 0 and FP8_BLOCK % k == 0

    @property
    def tile(self) -> tuple[int, int]:
        """Outputs of a program, and inputs of a pass of its loop."""
        b = self.blocks
        return (few_rows.R * b.load, b.inputs) if isinstance(b, Lanes) else (b.n, b.k)


def block_linear(
    x: Float[Array, "T G k"], weight: BlockScaled, *, sizes: Plan, wide: bool = False, interpret: bool = False
) -> Float32[Array, "T G n"]:
    """`reference.block_linear` for bf16 rows. wide: rows may reach 2^28, not 65504 (`Blocks` are always so).

    Raises ValueError for sizes that do not fit the matrices.
    """
    rows, groups, inputs = x.shape
    outputs, (block_m, blocks, split, direct) = weight.codes.shape[-1], sizes
    if not sizes.fits(inputs, outputs):
        raise ValueError(f"{sizes} does not fit a matrix of {inputs} x {outputs}")
    one_warp = isinstance(blocks, Lanes)
    n, k = sizes.tile
    passes = inputs // k // split

    def kernel(x_ref, codes_ref, scale_ref, out_ref):
        tile, column, part = pl.program_id(0), pl.program_id(1) * n, pl.program_id(2)
        group, row = tile % groups, tile // groups * block_m + jnp.arange(block_m)
        at, here = jnp.minimum(row, rows - 1) * groups + group, row < rows
        matrices = [BlockScaled(codes_ref, scale_ref)]
        if isinstance(blocks, Lanes):
            options = {"wide": wide, "direct": direct}
            [total] = few_rows.products_of(
                x_ref, at, here, matrices, group, column, part * passes, passes, blocks, interpret, **options
            )
            total = total * (decode.rest(jnp.float8_e4m3fn, interpret) if wide else 1.0)
        else:
            [total] = product(x_ref, at, matrices, group, column, blocks, interpret, part * passes, passes)
        # Interpreted, a masked store writes the old value, so places to write must differ; those beyond the end are dropped.
        place = jnp.broadcast_to((row * groups + group)[:, None], (block_m, n))
        channel = jnp.broadcast_to(column + jnp.arange(n), (block_m, n))
        plt.store(out_ref.at[jnp.broadcast_to(part, place.shape), place, channel], total, mask=here[:, None])

    flat = x.reshape(rows * groups, inputs)
    warps, stages = (1, 1) if isinstance(blocks, Lanes) else (blocks.warps, blocks.stages)
    found = pl.pallas_call(
        kernel,
        grid=(-(-rows // block_m) * groups, outputs // n, split),
        out_shape=jax.ShapeDtypeStruct((split, rows * groups, outputs), jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name="block_linear_few" if one_warp else "block_linear",
    )(few_rows.columns(flat, False, interpret, wide) if one_warp and not direct else flat, *weight)
    return functools.reduce(jnp.add, list(found)).reshape(rows, groups, outputs)
