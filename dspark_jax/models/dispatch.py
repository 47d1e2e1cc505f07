"""How rows reach the expert ranks that have their experts, and come back as sums: three exchanges with the same result.

All are dropless and have static shapes. `gathered` is what models run. With k of E experts a row and R ranks a row visits
up to min(k, R) ranks, so a dropless all-to-all of equal parts has to send as many bytes as an all-gather; only
`ragged`, whose parts are as large as they have to be, can send less. Rows go to a rank once, however many of its experts
they chose. Padded rows have id -1.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

# (rows [N, d], slot on this rank [N, k] (others out of range), weights [N, k]) -> sums over the slots that are here
Local = Callable[[Float[Array, "N d"], Int[Array, "N k"], Float32[Array, "N k"]], Float32[Array, "N d"]]
Exchange = Callable[[Any, Any, Any, Local, int, str], Any]


def gathered(
    x: Float[Array, "B d"], ids: Int[Array, "B k"], weights: Float32[Array, "B k"], local: Local, slots: int, axis: str
) -> Float32[Array, "B d"]:
    """Every rank sees all rows, computes its own slots, and gets its rows' sums back (all-gather, reduce-scatter).

    Args:
      x, ids, weights: this rank's rows, their slots over all ranks, and the slots' weights.
      local: the slots of this rank.
      slots: of a rank.
      axis: of the mesh; call this inside shard_map.
    """
    x, ids, weights = (jax.lax.all_gather(v, axis, tiled=True) for v in (x, ids, weights))
    out = local(x, ids - jax.lax.axis_index(axis) * slots, weights)
    return jax.lax.psum_scatter(out, axis, scatter_dimension=0, tiled=True)


def all_to_all(
    x: Float[Array, "B d"], ids: Int[Array, "B k"], weights: Float32[Array, "B k"], local: Local, slots: int, axis: str
) -> Float32[Array, "B d"]:
    """As `gathered`, by two all-to-alls of equal parts: to every rank a place for each row, zeros where it has none to do."""
    ranks, rank = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    x = jnp.where(_goes(ids, slots, ranks)[..., None], x, 0)
    x = jax.lax.all_to_all(x, axis, split_axis=0, concat_axis=0)
    ids, weights = (jax.lax.all_gather(v, axis) for v in (ids, weights))
    out = local(*(v.reshape(-1, v.shape[-1]) for v in (x, ids - rank * slots, weights))).reshape(x.shape)
    return jnp.sum(jax.lax.all_to_all(out, axis, split_axis=0, concat_axis=0), axis=0)


def ragged(
    x: Float[Array, "B d"], ids: Int[Array, "B k"], weights: Float32[Array, "B k"], local: Local, slots: int, axis: str
) -> Float32[Array, "B d"]:
    """As `gathered`, by two `ragged_all_to_all`: only rows that a rank has work for are sent to it. Not on CPUs."""
    ranks, rank, rows = jax.lax.axis_size(axis), jax.lax.axis_index(axis), x.shape[0]
    # Ids and weights are small: with all of them every rank knows who sends how much, and in which order.
    all_ids, all_weights = (jax.lax.all_gather(v, axis) for v in (ids, weights))
    goes = jax.vmap(lambda v: _goes(v, slots, ranks))(all_ids)  # [from, to, B]
    order = jnp.argsort(~goes, axis=-1, stable=True)  # rows that go first, in their order
    sizes = jnp.sum(goes, axis=-1, dtype=jnp.int32)
    # Parts lie `rows` apart on both sides: rank r's part of a sender stands where the sender's number says.
    apart = jnp.arange(ranks, dtype=jnp.int32) * rows
    here = jnp.full((ranks,), rank * rows, jnp.int32)
    sent = x[order[rank]].reshape(ranks * rows, -1)
    got = jax.lax.ragged_all_to_all(sent, jnp.zeros_like(sent), apart, sizes[rank], here, sizes[:, rank], axis_name=axis)
    mine = order[:, rank]
    real = jnp.arange(rows) < sizes[:, rank, None]  # behind them nothing was sent
    places = jnp.where(real[..., None], jnp.take_along_axis(all_ids, mine[..., None], axis=1) - rank * slots, -1)
    own_weights = jnp.take_along_axis(all_weights, mine[..., None], axis=1)
    out = local(got, places.reshape(ranks * rows, -1), own_weights.reshape(ranks * rows, -1))
    back = jax.lax.ragged_all_to_all(out, jnp.zeros_like(out), apart, sizes[:, rank], here, sizes[rank], axis_name=axis)
    back = jnp.where((jnp.arange(rows) < sizes[rank, :, None])[..., None], back.reshape(ranks, rows, -1), 0)
    return jnp.zeros(x.shape, jnp.float32).at[order[rank].reshape(-1)].add(back.reshape(ranks * rows, -1))


def _goes(ids: Int[Array, "B k"], slots: int, ranks: int) -> Array:
    """Which rows have work for which rank: [ranks, B]."""
    owner = jnp.where(ids >= 0, ids // slots, -1)
    return jnp.any(owner == jnp.arange(ranks)[:, None, None], axis=-1)


EXCHANGES: dict[str, Exchange] = {"all-gather": gathered, "all-to-all": all_to_all, "ragged": ragged}
