"""Hyper-connection mixing as Pallas-Triton kernels: two launches in front of a sublayer (`pre`), one behind (`expand`).

1. `_mix`: products of the flattened streams with `fn`, and their squares' sums, by blocks of rows and parts of the
   flattened width; every part writes its own sum, so that the result does not depend on the order of programs.
2. `_read`: one warp a row adds up the parts; the programs of one row write the coefficients (Sinkhorn steps on 16
   scalars in registers), the others a piece of the weighted sum of the streams.
3. `expand`: one program a row and piece of the width.

The product is a full fp32 one: bf16 streams are multiplied with `fn` split into three bf16 terms (24 bits), fp32
streams by fp32 multiply-add.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Float32

COLUMNS = 32  # columns of `fn` after padding; column m of a part's sums holds the sum of squares
MAX_COLUMNS = COLUMNS - 1


def _power(n: int) -> int:
    return pl.next_power_of_2(max(n, 1))


def _product(x: Float[Array, "R K"], fn: Float32[Array, "K 32"], interpret: bool) -> Float32[Array, "R 32"]:
    """x @ fn without rounding an operand to TF32."""
    if x.dtype != jnp.bfloat16:
        return jnp.dot(x.astype(jnp.float32), fn, precision=jax.lax.Precision.HIGHEST)
    total = None
    for _ in range(3):
        term = fn.astype(jnp.bfloat16)
        fn = fn - term.astype(jnp.float32)
        if interpret:  # the CPU lacks products of bf16 into fp32; widened they have the same value
            part = jnp.dot(x.astype(jnp.float32), term.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
        else:
            part = jnp.dot(x, term, preferred_element_type=jnp.float32)
        total = part if total is None else total + part
    assert total is not None
    return total


def mix_blocks(rows: int, width: int) -> tuple[int, int]:
    """Rows of a block and parts of the width of `_mix`: about one program for each processor."""
    block = min(max(_power(rows), 16), 64)
    parts = 1
    while parts * 2 * pl.cdiv(rows, block) <= 160 and width % (parts * 2 * 128) == 0:
        parts *= 2
    return block, parts


def _mix(
    flat: Float[Array, "T K"],
    fn: Float32[Array, "K m"],
    *,
    block: int,
    parts: int,
    tile: int,
    warps: int,
    stages: int,
    interpret: bool,
) -> Float32[Array, "T P 32"]:
    rows, width = flat.shape
    columns = fn.shape[1]
    part = width // parts
    tile = min(tile, part)

    def kernel(flat_ref, fn_ref, out_ref):
        row = pl.program_id(0) * block + jnp.arange(block)
        col = jnp.arange(COLUMNS)[None, :]
        start = pl.program_id(1) * part

        def step(i, carry):
            total, squares = carry
            at = start + i * tile + jnp.arange(tile)
            x = plt.load(flat_ref.at[row[:, None], at[None, :]], mask=(row < rows)[:, None], other=0.0)
            f = plt.load(fn_ref.at[at[:, None], col], mask=col < columns, other=0.0)
            return total + _product(x, f, interpret), squares + jnp.square(x.astype(jnp.float32))

        zero = jnp.zeros((block, COLUMNS), jnp.float32), jnp.zeros((block, tile), jnp.float32)
        total, squares = jax.lax.fori_loop(0, part // tile, step, zero)
        total = jnp.where(col == columns, jnp.sum(squares, axis=1)[:, None], total)
        at = (row * parts + pl.program_id(1))[:, None] * COLUMNS + col
        plt.store(out_ref.at[at], total, mask=(row < rows)[:, None])

    out = pl.pallas_call(
        kernel,
        grid=(pl.cdiv(rows, block), parts),
        out_shape=jax.ShapeDtypeStruct((rows * parts * COLUMNS,), jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name="hyper_mix",
    )(flat, fn)
    return out.reshape(rows, parts, COLUMNS)


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + jnp.exp(-x))


def _sinkhorn(m: list[list[Array]], iters: int, eps: float) -> list[list[Array]]:
    """`reference._sinkhorn` of one matrix of scalars."""
    n = len(m)

    def step(_, scales):
        row, column = scales
        row = [row[j] / (row[j] * sum(m[j][k] * column[k] for k in range(n)) + eps) for j in range(n)]
        return row, [column[k] / (column[k] * sum(m[j][k] * row[j] for j in range(n)) + eps) for k in range(n)]

    start = [jnp.float32(1)] * n, [1 / (sum(m[j][k] for j in range(n)) + eps) for k in range(n)]
    row, column = jax.lax.fori_loop(0, iters - 1, step, start)
    return [[m[j][k] * row[j] * column[k] for k in range(n)] for j in range(n)]


def pre(
    streams: Float[Array, "T n d"],
    fn: Float32[Array, "nd m"],
    base: Float32[Array, "m"],
    scale: Float32[Array, "s"],
    *,
    iters: int,
    eps: float,
    norm_eps: float,
    tile: int = 128,
    warps: int = 4,
    stages: int = 3,
    piece: int = 1024,
    read_warps: int = 1,
    parts: int | None = None,
    interpret: bool = False,
) -> tuple[Array, ...]:
    """Sublayer input [T, d], post [T, n], comb [T, n, n] of m = (2 + n) n columns; the input alone of m = n columns."""
    rows, n, width = streams.shape
    columns = fn.shape[1]
    head = columns == n
    block, default = mix_blocks(rows, n * width)
    parts = parts or default
    sums = _mix(
        streams.reshape(rows, -1), fn, block=block, parts=parts, tile=tile, warps=warps, stages=stages, interpret=interpret
    )
    piece = min(piece, _power(width))
    pieces = pl.cdiv(width, piece)

    def kernel(streams_ref, sums_ref, base_ref, scale_ref, out_ref, *coefficient_refs):
        row, program = pl.program_id(0), pl.program_id(1)
        col = jnp.arange(COLUMNS)
        total = jnp.sum(sums_ref[row], axis=0)

        def column(m):
            return jnp.sum(jnp.where(col == m, total, 0.0))

        rms = jax.lax.rsqrt(column(columns) / (n * width) + norm_eps)

        def mixed(m, part):
            return column(m) * rms * scale_ref[part] + base_ref[m]

        @pl.when(program < pieces)
        def _():
            at = program * piece + jnp.arange(piece)
            out = jnp.zeros((piece,), jnp.float32)
            for j in range(n):
                x = plt.load(streams_ref.at[row, j, at], mask=at < width, other=0.0)
                out += (_sigmoid(mixed(j, 0)) + eps) * x.astype(jnp.float32)
            plt.store(out_ref.at[row, at], out.astype(out_ref.dtype), mask=at < width)

        if not head:

            @pl.when(program == pieces)
            def _():
                post_ref, comb_ref = coefficient_refs
                for j in range(n):
                    post_ref[row, j] = 2 * _sigmoid(mixed(n + j, 1))
                comb = []
                for j in range(n):
                    logits = [mixed((2 + j) * n + k, 2) for k in range(n)]
                    top = logits[0]
                    for x in logits[1:]:
                        top = jnp.maximum(top, x)
                    powers = [jnp.exp(x - top) for x in logits]
                    comb.append([p / sum(powers) + eps for p in powers])
                for j, scalars in enumerate(_sinkhorn(comb, iters, eps)):
                    for k in range(n):
                        comb_ref[row, j, k] = scalars[k]

    shapes = [jax.ShapeDtypeStruct((rows, width), streams.dtype)]
    if not head:
        shapes += [jax.ShapeDtypeStruct((rows, n), jnp.float32), jax.ShapeDtypeStruct((rows, n, n), jnp.float32)]
    return tuple(
        pl.pallas_call(
            kernel,
            grid=(rows, pieces + (not head)),
            out_shape=shapes,
            compiler_params=plt.CompilerParams(num_warps=read_warps, num_stages=1),
            interpret=interpret,
            name="hyper_read",
        )(streams, sums, base, scale)
    )


def expand(
    streams: Float[Array, "T n d"],
    output: Float[Array, "T d"],
    post: Float32[Array, "T n"],
    comb: Float32[Array, "T n n"],
    *,
    piece: int = 1024,
    warps: int = 4,
    interpret: bool = False,
) -> Float[Array, "T n d"]:
    """`reference.expand`."""
    rows, n, width = streams.shape
    piece = min(piece, _power(width))

    def kernel(streams_ref, output_ref, post_ref, comb_ref, out_ref):
        row = pl.program_id(0)
        at = pl.program_id(1) * piece + jnp.arange(piece)
        inside = at < width
        y = plt.load(output_ref.at[row, at], mask=inside, other=0.0).astype(jnp.float32)
        old = [plt.load(streams_ref.at[row, j, at], mask=inside, other=0.0).astype(jnp.float32) for j in range(n)]
        for k in range(n):
            new = post_ref[row, k] * y + sum(comb_ref[row, j, k] * old[j] for j in range(n))
            plt.store(out_ref.at[row, k, at], new.astype(out_ref.dtype), mask=inside)

    return pl.pallas_call(
        kernel,
        grid=(rows, pl.cdiv(width, piece)),
        out_shape=jax.ShapeDtypeStruct(streams.shape, streams.dtype),
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name="hyper_expand",
    )(streams, output, post, comb)
