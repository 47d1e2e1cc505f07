"""Which rows go to which expert, as a compact list of tiles: what a grouped matrix product walks."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

PAIRWISE = 1024  # entries up to which comparing all pairs is cheaper than a sort


class Tiles(NamedTuple):
    """Entries (row b, choice j), numbered b * k + j, sorted by expert; and tiles of them of one expert each.

    order: entry at every sorted position; those of experts that are not here come last and belong to no tile.
    expert, first, rows: of each tile its expert, first position and number of rows. Unused tiles come last, with 0 rows.
    """

    order: Int[Array, "N"]
    expert: Int[Array, "n"]
    first: Int[Array, "n"]
    rows: Int[Array, "n"]


def tile_bound(entries: int, experts: int, block_m: int) -> int:
    """Most tiles that `entries` can need: ceil(c / m) <= (c + m - 1) / m for each expert with c > 0 rows."""
    return (entries + (block_m - 1) * min(experts, entries)) // block_m


def build(ids: Int[Array, "B k"], experts: int, block_m: int) -> Tiles:
    """The tiles of at most `block_m` rows; ids outside [0, experts) are not here."""
    flat = ids.reshape(-1)
    entries = flat.size
    flat = jnp.where((flat >= 0) & (flat < experts), flat, experts)
    each = jnp.arange(experts)
    count = jnp.sum((flat[:, None] == each).astype(jnp.int32), axis=0)
    # Sums over all lower experts: one fused reduction where a cumulative sum would be several launches.
    needed = (count + block_m - 1) // block_m
    lower = each[:, None] < each
    start = jnp.sum(jnp.where(lower, count[:, None], 0), axis=0)
    begin = jnp.sum(jnp.where(lower, needed[:, None], 0), axis=0)

    tile = jnp.arange(tile_bound(entries, experts, block_m))
    expert = jnp.sum(((begin + needed)[:, None] <= tile).astype(jnp.int32), axis=0)
    used = expert < experts
    expert = jnp.where(used, expert, 0)
    offset = (tile - begin[expert]) * block_m
    rows = jnp.where(used, jnp.minimum(count[expert] - offset, block_m), 0)
    first = jnp.where(used, start[expert] + offset, 0)
    return Tiles(_order(flat), expert, first, rows)


def _order(keys: Int[Array, "N"]) -> Int[Array, "N"]:
    """`argsort`, stable."""
    if keys.size > PAIRWISE:
        return jnp.argsort(keys, stable=True).astype(jnp.int32)
    at = jnp.arange(keys.size, dtype=jnp.int32)
    before = (keys < keys[:, None]) | ((keys == keys[:, None]) & (at < at[:, None]))
    rank = jnp.sum(before.astype(jnp.int32), axis=1)
    return jnp.zeros_like(at).at[rank].set(at, unique_indices=True, mode="promise_in_bounds")
