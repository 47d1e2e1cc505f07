"""Products of few rows an expert with block-scaled weights: programs of one warp that take codes straight to registers.

Without shared memory there is no barrier and no code is moved twice; a program is little more than loads, the widening of
codes and tensor core instructions. Each lane has to load what it multiplies: an instruction (16 output channels x 16 inputs,
weights on the left) wants lane 4 r + c to hold inputs c of channels r and r + 8, while in memory channels are neighbours. So a
lane loads `load` neighbouring channels of each of its inputs, and a product's channels and inputs are taken in the order that
follows. Pallas-Triton gives lanes to elements by the shape of an array of addresses, (..., r, c, neighbours). Where it does
otherwise the results are the same, with moves between lanes.

Rows are multiplied in fp16: exact from 2^-14 to 65504, infinite above.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Float32

from dspark_kernels.block_scaled import BlockScaled
from dspark_kernels.expert_mlp import decode
from dspark_kernels.expert_mlp.reference import swiglu
from dspark_kernels.expert_mlp.tiles import Tiles
from dspark_kernels.formats import FP8_BLOCK

STEP = 32  # inputs of a step: a block of fp4
R, C = 8, 4  # lanes by channel and by input


class Lanes(NamedTuple):
    """Sizes of a program.

    load: bytes of codes that a lane loads at once; the program has 8 load output channels.
    inputs: of a pass of the loop, 32 to 128: what is loaded before anything is multiplied.
    split: programs that share a product's inputs, where there are enough; their sums are added afterwards.
    """

    load: int
    inputs: int
    split: int = 1


def gate_up(
    x: Float[Array, "B d"],
    weights: Float32[Array, "B k"],
    tiles: Tiles,
    w1: BlockScaled,
    w3: BlockScaled,
    *,
    limit: float,
    block_m: int,
    blocks: Lanes,
    interpret: bool = False,
) -> Float[Array, "N f"]:
    """`triton.gate_up`."""
    top_k = weights.shape[1]
    options = {"name": "expert_gate_up_few", "block_m": block_m, "blocks": blocks, "interpret": interpret}
    sums = _products(x, tiles, [w1, w3], lambda _, entry: entry // top_k, lambda position, _: position, **options)
    # A cast there and back may be left out by XLA.
    gate, up = (jax.lax.reduce_precision(s, exponent_bits=8, mantissa_bits=7) for s in sums)
    return (swiglu(gate, up, limit) * weights.reshape(-1)[tiles.order][:, None]).astype(x.dtype)


def down(
    hidden: Float[Array, "N f"], tiles: Tiles, w2: BlockScaled, *, block_m: int, blocks: Lanes, interpret: bool = False
) -> Float32[Array, "N d"]:
    """`triton.down`."""
    options = {"name": "expert_down_few", "block_m": block_m, "blocks": blocks, "interpret": interpret}
    return _products(hidden, tiles, [w2], lambda position, _: position, lambda _, entry: entry, **options)[0]


def columns(x: Float[Array, "B d"], fp4: bool, interpret: bool, wide: bool = False) -> Float[Array, "B d"]:
    """x for a product, a step's inputs (half, c, row of codes, nibble) in the order (c, half, nibble, row): by lanes."""
    if fp4:
        x = x.reshape(x.shape[0], -1, 2, C, 2, 2).transpose(0, 1, 3, 2, 5, 4).reshape(x.shape)
    else:
        x = x.reshape(x.shape[0], -1, 2, C, 4).swapaxes(2, 3).reshape(x.shape)
    return _operand(x, wide, interpret)


def _operand(x: Float[Array, "..."], wide: bool, interpret: bool) -> Float[Array, "..."]:
    """In fp16; `wide`, in bf16 for codes that are a power of two too small (`decode`)."""
    x = x * jnp.asarray(decode.SHIFT, x.dtype) if wide else x
    return x.astype(jnp.float32 if interpret else jnp.bfloat16 if wide else jnp.float16)


def _products(
    x: Float[Array, "B d"],
    tiles: Tiles,
    weights: list[BlockScaled],
    read: Callable,
    write: Callable,
    *,
    name: str,
    block_m: int,
    blocks: Lanes,
    interpret: bool,
) -> list[Float32[Array, "N n"]]:
    """Products of the tiles' rows with each of the weights. read, write: of position and entry, the row of x and of the result.
    Rows of the result that belong to no tile are undefined.
    """
    fp4, entries, outputs = weights[0].codes.dtype == jnp.uint8, tiles.order.size, weights[0].codes.shape[-1]
    split = math.gcd(blocks.split, x.shape[1] // blocks.inputs)
    n, passes = R * blocks.load, x.shape[1] // blocks.inputs // split

    def kernel(x_ref, order_ref, expert_ref, first_ref, rows_ref, *refs):
        tile, column, part = pl.program_id(0), pl.program_id(1) * n, pl.program_id(2)

        @pl.when(rows_ref[tile] > 0)
        def _():
            row, first, count = jnp.arange(block_m), first_ref[tile], rows_ref[tile]
            position = first + jnp.minimum(row, count - 1)  # the last one again where the tile has fewer
            rows = read(position, plt.load(order_ref.at[position]))
            matrices = [BlockScaled(*refs[i : i + 2]) for i in range(0, 2 * len(weights), 2)]
            program = (expert_ref[tile], column, part * passes, passes, blocks, interpret)
            sums = products_of(x_ref, rows, row < count, matrices, *program)
            # Interpreted, a masked store writes the old value, so places to write must differ.
            entry = plt.load(order_ref.at[first + row], mask=row < count, other=entries)
            place = jnp.broadcast_to(write(first + row, entry)[:, None], (block_m, n))
            channel = jnp.broadcast_to(column + jnp.arange(n), (block_m, n))
            for out, total in zip(refs[2 * len(weights) :], sums, strict=True):
                lacking = decode.FP4_HALF if fp4 and not interpret else 1.0
                at = out.at[jnp.broadcast_to(part, place.shape), place, channel]
                plt.store(at, total * lacking, mask=(row < count)[:, None])

    found = pl.pallas_call(
        kernel,
        grid=(tiles.expert.size, outputs // n, split),
        out_shape=[jax.ShapeDtypeStruct((split, entries, outputs), jnp.float32) for _ in weights],
        compiler_params=plt.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name=name,
    )(columns(x, fp4, interpret), *tiles, *(array for w in weights for array in w))
    return [functools.reduce(jnp.add, list(parts)) for parts in found]


def _iotas(*shape: int) -> list[Array]:
    return [jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in range(len(shape))]


def products_of(
    x_ref,
    rows,
    present,
    weights: list[BlockScaled],
    expert,
    column,
    first,
    passes: int,
    blocks: Lanes,
    interpret: bool,
    *,
    wide: bool = False,
    direct: bool = False,
) -> list[Float32[Array, "m n"]]:
    """x[rows] @ w[expert][:, column : column + n] for each of the weights, fp32 [m, n]: `passes` passes from `first` on.

    x: of `columns`; with `direct`, which fp4 lacks, in its own order and dtype. Rows that are not `present` are not read.
    wide: fp8 codes and rows in bf16, not fp16; the product is then to be multiplied by `decode.rest`.
    """
    fp4, load, steps = weights[0].codes.dtype == jnp.uint8, blocks.load, blocks.inputs // STEP
    near = 2 if fp4 else 4  # neighbouring rows of codes of a lane
    size, m, n = 2 * C * near, rows.shape[0], R * load
    half, row, r, c, byte = _iotas(2, near, R, C, load)
    row, channel = (half * C + c) * near + row, column + r * load + byte
    r, _, byte = _iotas(R, C, load)
    scale_channel = column + r * load + byte
    _, c, element = _iotas(m, C, STEP // C)
    inputs, mask = c * (STEP // C) + element, jnp.broadcast_to(present[:, None, None], c.shape)

    def load_x(step):
        if direct:
            half, _, lane, near_by = _iotas(2, m, C, STEP // (2 * C))
            at = (jnp.broadcast_to(rows[:, None, None], half.shape), step * STEP + (half * C + lane) * 4 + near_by)
            own = plt.load(x_ref.at[at], mask=jnp.broadcast_to(present[:, None, None], half.shape), other=0.0)
            return _operand(own, wide, interpret).transpose(0, 2, 3, 1).reshape(STEP, m)
        x = plt.load(x_ref.at[jnp.broadcast_to(rows[:, None, None], c.shape), step * STEP + inputs], mask=mask, other=0.0)
        return x.reshape(m, C, 2, 4).transpose(2, 1, 3, 0).reshape(STEP, m)

    def load_codes(w, step):
        codes = plt.load(w.codes.at[jnp.broadcast_to(expert, row.shape), step * size + row, channel])
        return codes.reshape(2, near, R, C, load // 2, 2).transpose(4, 5, 2, 0, 3, 1).reshape(n, size)

    def widened(codes):
        if not fp4:
            return (decode.fp8 if wide else decode.fp8_half)(codes, interpret)
        pairs = jnp.stack(decode.fp4_half(codes, interpret), axis=-1)
        return pairs.reshape(n, 2 * C, 2, 2).swapaxes(2, 3).reshape(n, STEP)

    def scale(w, step):
        """[n, m] for fp4, of every channel in the lanes that have its sums; one number for fp8."""
        if not fp4:
            return decode.power_of_two(w.scale[expert, step * STEP // FP8_BLOCK, column // FP8_BLOCK])
        shape = scale_channel.shape
        codes = plt.load(w.scale.at[jnp.broadcast_to(expert, shape), jnp.broadcast_to(step, shape), scale_channel])
        found = decode.power_of_two(codes).reshape(R, C, load // 2, 2).transpose(2, 3, 0, 1)
        return jnp.broadcast_to(found[..., None], (*found.shape, m // C)).reshape(n, m)

    def one_pass(i, sums):
        at = [(first + i) * steps + s for s in range(steps)]
        codes = [[load_codes(w, step) for step in at] for w in weights]
        xs = [load_x(step) for step in at]
        found = []
        for w, total, own in zip(weights, sums, codes, strict=True):
            parts = [
                jax.lax.dot_general(widened(c), x, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
                for c, x in zip(own, xs, strict=True)
            ]
            if fp4:
                parts = [part * scale(w, step) for part, step in zip(parts, at, strict=True)]
            else:
                parts = [functools.reduce(jnp.add, parts) * scale(w, at[0])]
            found.append(functools.reduce(jnp.add, parts, total))
        return found

    sums = jax.lax.fori_loop(0, passes, one_pass, [jnp.zeros((n, m), jnp.float32) for _ in weights])
    return [s.reshape(load // 2, 2, R, m).transpose(3, 2, 0, 1).reshape(m, n) for s in sums]
