"""Grouped products of the experts as Pallas-Triton kernels over a list of active tiles.

A program computes `block_m` rows of one expert by `block_n` output channels. Programs of unused tiles end at once. Each
weight is read once for every tile of its expert, so once while an expert has no more than `block_m` rows.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, ArrayLike, Float, Float32

from dspark_kernels.block_scaled import BlockScaled
from dspark_kernels.expert_mlp import decode
from dspark_kernels.expert_mlp.reference import swiglu
from dspark_kernels.expert_mlp.tiles import Tiles
from dspark_kernels.formats import FP4_BLOCK, FP8_BLOCK

Weight = Float[Array, "E in out"] | BlockScaled


class Blocks(NamedTuple):
    """Sizes of one program's step. swap: the product is computed transposed, weights as the left operand."""

    n: int
    k: int
    warps: int
    stages: int
    swap: bool = False


def _dot(x: Array, w: Array, swap: bool, interpret: bool) -> Float32[Array, "..."]:
    """x @ w in fp32, [m, n], or transposed, [n, m]."""
    if interpret:  # XLA's CPU backend lacks some products of bf16 with fp32 results
        x, w = x.astype(jnp.float32), w.astype(jnp.float32)
    left, right, axes = (w, x, (0, 1)) if swap else (x, w, (1, 0))
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None  # no TF32
    numbers = (((axes[0],), (axes[1],)), ((), ()))
    return jax.lax.dot_general(left, right, numbers, precision=precision, preferred_element_type=jnp.float32)


def _at(ref, rows, start, size: int):
    """ref[rows, start : start + size], rows in any order."""
    shape = (rows.shape[0], size)
    return ref.at[jnp.broadcast_to(rows[:, None], shape), jnp.broadcast_to(start + jnp.arange(size), shape)]


def _columns(x: Float[Array, "B d"], weight: Weight) -> Float[Array, "B d"]:
    """x as `product` reads it: for fp4 the even columns, then the odd ones, as the two nibbles of a byte need them."""
    if not isinstance(weight, BlockScaled) or weight.codes.dtype != jnp.uint8:
        return x
    return jnp.concatenate([x[:, 0::2], x[:, 1::2]], axis=1)


def product(
    x_ref, rows, weights: list, expert, column, blocks: Blocks, interpret: bool, first: ArrayLike = 0, passes: int | None = None
) -> list[Array]:
    """x[rows] @ w[expert][:, column : column + n] for each of the weights, fp32 [m, n]; x as of `_columns`. Of the inputs
    `passes` times `k` from pass `first` on, by default all.
    """
    n, k, swap = blocks.n, blocks.k, blocks.swap
    columns = pl.ds(column, n)

    def load_x(start, size):
        x = plt.load(_at(x_ref, rows, start, size))
        return x * jnp.asarray(decode.SHIFT, x.dtype) if isinstance(weights[0], BlockScaled) else x

    def scaled(part, scale):
        return part * (scale[:, None] if swap and scale.ndim else scale)

    def dense(i, sums):
        x = load_x(i * k, k)
        return [s + _dot(x, w[expert, pl.ds(i * k, k), columns], swap, interpret) for s, w in zip(sums, weights, strict=True)]

    def fp8(i, sums):
        x = load_x(i * k, k)
        found = []
        for total, w in zip(sums, weights, strict=True):
            part = _dot(x, decode.fp8(w.codes[expert, pl.ds(i * k, k), columns], interpret), swap, interpret)
            scale = decode.power_of_two(w.scale[expert, i * k // FP8_BLOCK, column // FP8_BLOCK])
            found.append(total + scaled(part, scale))
        return found

    def fp4(i, sums):
        half, found = FP4_BLOCK // 2, list(sums)
        for j in range(k // FP4_BLOCK):
            block = i * (k // FP4_BLOCK) + j
            even, odd = (load_x(block * half + o, half) for o in (0, x_ref.shape[1] // 2))
            for number, w in enumerate(weights):
                low, high = decode.fp4(w.codes[expert, pl.ds(block * half, half), columns], interpret)
                part = _dot(even, low, swap, interpret) + _dot(odd, high, swap, interpret)
                found[number] = found[number] + scaled(part, decode.power_of_two(w.scale[expert, block, columns]))
        return found

    codes = weights[0].codes.dtype if isinstance(weights[0], BlockScaled) else None
    step = dense if codes is None else fp4 if codes == jnp.uint8 else fp8
    shape = (n, rows.shape[0]) if swap else (rows.shape[0], n)
    sums = [jnp.zeros(shape, jnp.float32) for _ in weights]
    passes = x_ref.shape[1] // k if passes is None else passes
    sums = jax.lax.fori_loop(first, first + passes, step, sums)
    rest = 1.0 if codes is None else decode.rest(codes, interpret)
    return [(s.T if swap else s) * rest for s in sums]


def _leaves(weights: list[Weight]) -> list[Array]:
    return [array for w in weights for array in (w if isinstance(w, BlockScaled) else (w,))]


def _paired(refs: list, scaled: bool) -> list:
    return [BlockScaled(*refs[i : i + 2]) for i in range(0, len(refs), 2)] if scaled else refs


def _outputs(weight: Weight) -> int:
    return (weight.codes if isinstance(weight, BlockScaled) else weight).shape[-1]


def _tile(tile, tiles_refs, block_m: int):
    """Of a tile: its expert, its positions to read (the last one again where it has fewer) and to write, and a mask of
    the latter. Interpreted, a masked store writes the old value, so places to write must differ.
    """
    expert_ref, first_ref, rows_ref = tiles_refs
    first, count = first_ref[tile], rows_ref[tile]
    row = jnp.arange(block_m)
    return expert_ref[tile], first + jnp.minimum(row, count - 1), first + row, row < count


def _call(kernel, tiles: Tiles, blocks: Blocks, columns: int, out_shape, name: str, interpret: bool):
    return pl.pallas_call(
        kernel,
        grid=(tiles.expert.size, columns // blocks.n),
        out_shape=out_shape,
        compiler_params=plt.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
        interpret=interpret,
        name=name,
    )


def gate_up(
    x: Float[Array, "B d"],
    weights: Float32[Array, "B k"],
    tiles: Tiles,
    w1: Weight,
    w3: Weight,
    *,
    limit: float,
    block_m: int,
    blocks: Blocks,
    interpret: bool = False,
) -> Float[Array, "N f"]:
    """`weight * swiglu(w1 x, w3 x)` in x's dtype by sorted position; rows that belong to no tile are undefined."""
    top_k, outputs, scaled = weights.shape[1], _outputs(w1), isinstance(w1, BlockScaled)

    def kernel(x_ref, weights_ref, order_ref, expert_ref, first_ref, rows_ref, *refs):
        tile, column = pl.program_id(0), pl.program_id(1) * blocks.n

        @pl.when(rows_ref[tile] > 0)
        def _():
            expert, position, target, mask = _tile(tile, (expert_ref, first_ref, rows_ref), block_m)
            entry = plt.load(order_ref.at[position])
            matrices = _paired(list(refs[:-1]), scaled)
            sums = product(x_ref, entry // top_k, matrices, expert, column, blocks, interpret)
            gate, up = (s.astype(x_ref.dtype).astype(jnp.float32) for s in sums)
            hidden = swiglu(gate, up, limit) * plt.load(weights_ref.at[entry])[:, None]
            plt.store(_at(refs[-1], target, column, blocks.n), hidden.astype(x_ref.dtype), mask=mask[:, None])

    out = jax.ShapeDtypeStruct((tiles.order.size, outputs), x.dtype)
    return _call(kernel, tiles, blocks, outputs, out, "expert_gate_up", interpret)(
        _columns(x, w1), weights.reshape(-1), *tiles, *_leaves([w1, w3])
    )


def down(
    hidden: Float[Array, "N f"], tiles: Tiles, w2: Weight, *, block_m: int, blocks: Blocks, interpret: bool = False
) -> Float32[Array, "N d"]:
    """`w2 hidden` by entry; rows of entries that belong to no tile are undefined."""
    outputs, scaled = _outputs(w2), isinstance(w2, BlockScaled)

    def kernel(hidden_ref, order_ref, expert_ref, first_ref, rows_ref, *refs):
        tile, column = pl.program_id(0), pl.program_id(1) * blocks.n

        @pl.when(rows_ref[tile] > 0)
        def _():
            expert, position, target, mask = _tile(tile, (expert_ref, first_ref, rows_ref), block_m)
            matrices = _paired(list(refs[:-1]), scaled)
            [total] = product(hidden_ref, position, matrices, expert, column, blocks, interpret)
            entry = plt.load(order_ref.at[target], mask=mask, other=order_ref.shape[0])
            plt.store(_at(refs[-1], entry, column, blocks.n), total, mask=mask[:, None])

    out = jax.ShapeDtypeStruct((hidden.shape[0], outputs), jnp.float32)
    return _call(kernel, tiles, blocks, outputs, out, "expert_down", interpret)(
        _columns(hidden, w2), *tiles, *_leaves([w2])
    )
