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

PROGRAMS = {"lanes": 2048, "blocks": 528}  # that keep an H200's 132 processors loading: 16 of one warp each, 4 of four
FEWEST_PASSES = 2  # of the loop of a program


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


def plan(rows: int, groups: int, inputs: int, outputs: int) -> Plan:
    """For so many rows and matrices of these sizes, all multiples of 128. Not tuned on a GPU yet (`bench --tune`)."""
    if rows <= 16:
        block_m, blocks = 8 if rows <= 8 else 16, Lanes(8, 64)
        columns, wanted = outputs // (few_rows.R * blocks.load), PROGRAMS["lanes"]
        passes = inputs // blocks.inputs
    else:
        block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64 if rows <= 192 else 128
        blocks = Blocks(128, 64, 4, 4) if block_m < 128 else Blocks(128, 64, 8, 3)
        columns, wanted = outputs // blocks.n, PROGRAMS["blocks"]
        passes = inputs // blocks.k
    programs, split = -(-rows // block_m) * groups * columns, 1
    # Sums of parts are written and read: they must stay small beside the codes.
    while programs * split < wanted and passes % (2 * split) == 0 and passes // (2 * split) >= FEWEST_PASSES:
        if 2 * split * 8 * min(rows, block_m) > inputs:
            break
        split *= 2
    return Plan(block_m, blocks, split)


def block_linear(
    x: Float[Array, "T G k"], weight: BlockScaled, *, sizes: Plan, wide: bool = False, interpret: bool = False
) -> Float32[Array, "T G n"]:
    """`reference.block_linear` for bf16 rows. wide: rows may reach 2^28, not 65504 (`Blocks` are always so)."""
    rows, groups, inputs = x.shape
    outputs, (block_m, blocks, split, direct) = weight.codes.shape[-1], sizes
    one_warp = isinstance(blocks, Lanes)
    n, k = (few_rows.R * blocks.load, blocks.inputs) if isinstance(blocks, Lanes) else (blocks.n, blocks.k)
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
