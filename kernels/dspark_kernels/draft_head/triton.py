"""The sequential draft head as Pallas-Triton kernels: two launches a draft.

1. `_bias`, a program for every tile of the vocabulary: chooses each row's last draft from what the step before left,
   reads its row of W1, multiplies by the tile of W2 and adds the base logits. It leaves the tile's maximum and its place.
2. With noise, `_draw`, a program for every row and piece of the vocabulary: the maximum over all tiles is known now, so it
   scales, rounds to bf16, stores, adds the noise, and leaves the piece's maximum and its place. Greedy, `_first` finds the
   first maximum over the tiles.

Rounding needs the maximum over the whole vocabulary and the choice needs the rounded logits, so one launch cannot do both
without a barrier over the grid. Maxima are exact, so that the result does not depend on the order of programs. From step to
step the tiles are visited in turn upwards and downwards: what is last read of W2 is the first to be read again, from the
cache, and what is used only once is marked so.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, BFloat16, Float, Float32, Int

from dspark_kernels.draft_head.reference import one_hot

MAX_ROWS = 64  # rows of a program of `_bias`; with more, W2 is read again


class Sizes(NamedTuple):
    """Tiles of `_bias` ([depth, columns] of W2 at a time) and `_draw` (piece); turn: visit every other step backwards."""

    columns: int
    depth: int
    warps: int
    stages: int
    piece: int
    turn: bool = True


def sizes(rows: int, rank: int) -> Sizes:
    """For R rows and a rank that is a multiple of 16."""
    deepest = 64 if rows <= 4 else 128
    depth = next(d for d in (128, 64, 32, 16) if d <= deepest and rank % d == 0)
    return Sizes(256, depth, 8, 3, 2048) if rows <= 4 else Sizes(128, depth, 4, 2, 2048)


class Best(NamedTuple):
    """The maximum of every part of the vocabulary and its id, flat [R * parts]."""

    value: Float32[Array, "R*P"]
    id: Int[Array, "R*P"]

    @classmethod
    def shapes(cls, size: int) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct((size,), jnp.float32), jax.ShapeDtypeStruct((size,), jnp.int32)]


def _call(kernel, grid: tuple[int, ...], shapes: list, warps: int, stages: int, interpret: bool, name: str, **options):
    params = plt.CompilerParams(num_warps=warps, num_stages=stages)
    return pl.pallas_call(
        kernel, grid=grid, out_shape=shapes, compiler_params=params, interpret=interpret, name=name, **options
    )


def _dot(x: Array, w: Array, interpret: bool) -> Float32[Array, "m n"]:
    if interpret:  # XLA's CPU backend lacks some products of bf16 with fp32 results
        x, w = x.astype(jnp.float32), w.astype(jnp.float32)
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None  # no TF32
    return jnp.dot(x, w, precision=precision, preferred_element_type=jnp.float32)


def _comparable(x: Array) -> Array:
    """NaN counts as infinity: ids stay inside the vocabulary."""
    return jnp.where(x != x, jnp.inf, x)


def _chosen(value_ref: Any, id_ref: Any, row: Array, rows: int, parts: int) -> tuple[Array, Array]:
    """Maximum and id of one row (`row` a scalar) or of several: of the greatest the first; id 0 behind the last row."""
    if parts == 1:
        return plt.load(value_ref.at[row], mask=row < rows, other=0), plt.load(id_ref.at[row], mask=row < rows, other=0)
    part = jnp.arange(pl.next_power_of_2(parts))
    if row.ndim:
        row, part = row[:, None], part[None, :]
    at, inside = row * parts + part, (row < rows) & (part < parts)
    value = plt.load(value_ref.at[at], mask=inside, other=-jnp.inf)
    ids = plt.load(id_ref.at[at], mask=inside, other=0)
    first = jnp.argmax(value, axis=-1, keepdims=bool(row.ndim))
    return jnp.max(value, axis=-1), jnp.sum(jnp.where(part == first, ids, 0), axis=-1)


def _tile(program, k, tiles: int, downwards: int, turn: bool):
    """Number of the part that a program visits: downwards in the steps k with k % 2 == `downwards`."""
    return jnp.where((k & 1) == downwards, tiles - 1 - program, program) if turn else program


def _bias(
    k: Int[Array, "1"],
    base: Float32[Array, "R gamma V"],
    before: Best,
    w1: Float[Array, "V r"],
    w2: Float[Array, "r V"],
    *,
    keep: bool,
    blocks: Sizes,
    interpret: bool,
) -> tuple[Best, Float32[Array, "R*V"] | None]:
    """By tile the maximum of `base[:, k] + W2 W1[token]`, the token the best of `before`; with `keep`, all of them too."""
    rows, gamma, vocab = base.shape
    rank, n, depth = w2.shape[0], blocks.columns, blocks.depth
    parts, tiles = before.id.size // rows, pl.cdiv(vocab, n)
    m = min(max(pl.next_power_of_2(rows), 16), MAX_ROWS)

    def kernel(k_ref, base_ref, value_ref, id_ref, w1_ref, w2_ref, *out_refs):
        k = k_ref[0]
        tile = _tile(pl.program_id(1), k, tiles, 1, blocks.turn)
        row, col = pl.program_id(0) * m + jnp.arange(m), tile * n + jnp.arange(n)
        real, inside = row < rows, col < vocab
        both = real[:, None] & inside[None, :]
        base_at = (row[:, None] * gamma + k) * vocab + col[None, :]
        base = plt.load(base_ref.at[base_at], mask=both, other=0.0, eviction_policy="evict_first")
        token = _chosen(value_ref, id_ref, row, rows, parts)[1]

        def step(i, total):
            at = i * depth + jnp.arange(depth)
            x = plt.load(w1_ref.at[token[:, None] * rank + at[None, :]])
            w_at, mask = at[:, None] * vocab + col[None, :], inside[None, :] if vocab % n else None
            w = plt.load(w2_ref.at[w_at], mask=mask, other=None if mask is None else 0)
            return total + _dot(x, w, interpret)

        logits = base + jax.lax.fori_loop(0, rank // depth, step, jnp.zeros((m, n), jnp.float32))
        if keep:
            plt.store(out_refs[2].at[row[:, None] * vocab + col[None, :]], logits, mask=both)
        compared = jnp.where(inside[None, :], _comparable(logits), -jnp.inf)
        at = row * tiles + tile
        plt.store(out_refs[0].at[at], jnp.max(compared, axis=1), mask=real)
        plt.store(out_refs[1].at[at], tile * n + jnp.argmax(compared, axis=1).astype(jnp.int32), mask=real)

    shapes = Best.shapes(rows * tiles) + [jax.ShapeDtypeStruct((rows * vocab,), jnp.float32)] * keep
    grid = (pl.cdiv(rows, m), tiles)
    call = _call(kernel, grid, shapes, blocks.warps, blocks.stages, interpret, "draft_bias")
    value, at, *logits = call(k, base.reshape(-1), *before, w1.reshape(-1), w2.reshape(-1))
    return Best(value, at), logits[0] if keep else None


def _first(best: Best, rows: int, interpret: bool) -> Int[Array, "R"]:
    """The id of every row's first maximum."""
    parts = best.id.size // rows

    def kernel(value_ref, id_ref, out_ref):
        row = pl.program_id(0)
        out_ref[row] = _chosen(value_ref, id_ref, row, rows, parts)[1]

    shape = [jax.ShapeDtypeStruct((rows,), jnp.int32)]
    return _call(kernel, (rows,), shape, 4, 1, interpret, "draft_first")(*best)[0]


def _draw(
    k: Int[Array, "1"],
    raw: Float32[Array, "R*V"],
    best: Best,
    temperature: Float32[Array, "R"],
    noise: Float32[Array, "R V"],
    kept: BFloat16[Array, "R*gamma*V"] | None,
    gamma: int,
    *,
    blocks: Sizes,
    interpret: bool,
) -> tuple[Best, BFloat16[Array, "R*gamma*V"]]:
    """`reference.processed` of `raw` written to step k of `kept` (None: a new array), and the drafts by piece."""
    rows, vocab = noise.shape
    tiles, pieces = best.id.size // rows, pl.cdiv(vocab, blocks.piece)

    def kernel(k_ref, raw_ref, value_ref, id_ref, temperature_ref, divisor_ref, noise_ref, *refs):
        value_out, id_out, kept_ref = refs[-3:]
        row, k = pl.program_id(0), k_ref[0]
        piece = _tile(pl.program_id(1), k, pieces, 0, blocks.turn)  # against `_bias`: what it wrote last is read first
        peak, first = _chosen(value_ref, id_ref, row, rows, tiles)
        greedy = temperature_ref[row] <= 0
        col = piece * blocks.piece + jnp.arange(blocks.piece)
        inside = col < vocab
        x = plt.load(raw_ref.at[row * vocab + col], mask=inside, other=0.0, eviction_policy="evict_first")
        # Where all are -inf they stay it. No select between scalars here: one between 1.0 and the temperature was refused by
        # the H200's compiler (jax 0.11.2) in the benchmark's program, though not in smaller ones.
        x = (x - jnp.maximum(peak, jnp.finfo(jnp.float32).min)) / divisor_ref[row]
        x = jnp.where(greedy, jnp.where(col == first, 0.0, -jnp.inf), x).astype(jnp.bfloat16)
        at = (row * gamma + k) * vocab + col
        plt.store(kept_ref.at[at], x, mask=inside, eviction_policy="evict_first")
        noise = plt.load(noise_ref.at[row * vocab + col], mask=inside, other=0.0, eviction_policy="evict_first")
        # The rounded logits, not those before: the draft must be drawn from what is stored.
        compared = jnp.where(inside, _comparable(x.astype(jnp.float32) + noise), -jnp.inf)
        value_out[row * pieces + piece] = jnp.max(compared)
        id_out[row * pieces + piece] = piece * blocks.piece + jnp.argmax(compared, axis=0).astype(jnp.int32)

    shapes = [*Best.shapes(rows * pieces), jax.ShapeDtypeStruct((rows * gamma * vocab,), jnp.bfloat16)]
    divisor = jnp.where(temperature <= 0, 1.0, temperature)
    inputs = [k, raw, *best, temperature, divisor, noise.reshape(-1)] + ([] if kept is None else [kept])
    aliases = {} if kept is None else {len(inputs) - 1: 2}
    warps = 8 if blocks.piece >= 4096 else 4
    call = _call(kernel, (rows, pieces), shapes, warps, 1, interpret, "draft_draw", input_output_aliases=aliases)
    value, at, new = call(*inputs)
    return Best(value, at), new


def draft(
    base: Float32[Array, "R gamma V"],
    anchor: Int[Array, "R"],
    w1: Float[Array, "V r"],
    w2: Float[Array, "r V"],
    temperature: Float32[Array, "R"] | None = None,
    noise: Sequence[Float32[Array, "R V"]] | None = None,
    *,
    blocks: Sizes | None = None,
    interpret: bool = False,
) -> tuple[Int[Array, "R gamma"], BFloat16[Array, "R gamma V"]]:
    """`reference.draft`. A row whose logits hold NaN gets some token, and changes no other row."""
    rows, gamma, vocab = base.shape
    blocks = blocks or sizes(rows, w2.shape[0])
    anchor = jnp.clip(anchor.astype(jnp.int32), 0, vocab - 1)
    steps = [jnp.full((1,), k, jnp.int32) for k in range(gamma)]
    bias = partial(_bias, blocks=blocks, interpret=interpret)
    if temperature is None or noise is None:
        tokens, nothing = [anchor], jnp.zeros(rows)
        for k in steps:
            best, _ = bias(k, base, Best(nothing, tokens[-1]), w1, w2, keep=False)
            tokens.append(_first(best, rows, interpret))
        found = jnp.stack(tokens[1:], axis=1)
        return found, one_hot(found, vocab)
    pieces = pl.cdiv(vocab, blocks.piece)
    drawn, kept = [Best(jnp.zeros(rows * pieces), jnp.repeat(anchor, pieces))], None
    for k, step in enumerate(steps):
        best, raw = bias(step, base, drawn[-1], w1, w2, keep=True)
        assert raw is not None
        new, kept = _draw(step, raw, best, temperature, noise[k], kept, gamma, blocks=blocks, interpret=interpret)
        drawn.append(new)
    assert kept is not None
    value, at = (jnp.stack(arrays).reshape(gamma, rows, pieces) for arrays in zip(*drawn[1:], strict=True))
    found = jnp.take_along_axis(at, jnp.argmax(value, axis=-1)[..., None], axis=-1)[..., 0]
    return found.T, kept.reshape(rows, gamma, vocab)
