"""Position-addressed storage: rings and append-only entries, each with a trash slot that is never read.

Every value is stored at an index computed from its absolute position, so a rejected token is undone by lowering the
committed length: later writes land on the same indices and reads mask by position.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from dspark_jax.decode.rows import Rows


def ring_write(
    ring: Shaped[Array, "S n ..."],
    values: Shaped[Array, "R width ..."],
    rows: Rows,
    keep: Bool[Array, "R width"] | None = None,
) -> Shaped[Array, "S n ..."]:
    """Writes rows of the slots' lanes at `position mod (n - 1)`; the last index is the trash slot.

    Of each slot's kept rows (a prefix of its lane) only the last `n - 1` are written, so no index is written twice.
    """
    size = ring.shape[1] - 1
    keep = rows.lane_valid if keep is None else keep
    count = jnp.sum(keep, axis=1, keepdims=True)
    fresh = keep & (jnp.arange(rows.width) >= count - size)
    index = jnp.where(fresh, rows.lane_position % size, size)
    return ring.at[rows.lanes[:, None], index].set(values.astype(ring.dtype))


def ring_history(
    ring: Shaped[Array, "S n ..."], start: Int[Array, "R"], length: int, lane: Int[Array, "R"] | None = None
) -> Shaped[Array, "R length ..."]:
    """The `length` values in front of position `start`, in order; those before position 0 are zeros.

    Slot r reads from lane `lane[r]` of the ring, by default from lane r.
    """
    size = ring.shape[1] - 1
    position = start[:, None] - length + jnp.arange(length)
    lane = jnp.arange(start.shape[0]) if lane is None else lane
    values = ring[lane[:, None], position % size]
    return zero_where(values, position < 0)


def entries_read(entries: Shaped[Array, "S n ..."], rows: Rows) -> Shaped[Array, "R n ..."]:
    """All entries of the slots' lanes."""
    return entries if rows.lane is None else entries[rows.lane]


def entries_write(
    entries: Shaped[Array, "S n ..."],
    values: Shaped[Array, "R G ..."],
    first: Int[Array, "R"],
    closed: Bool[Array, "R G"],
    rows: Rows,
) -> Shaped[Array, "S n ..."]:
    """Writes entry `first + j` where `closed[:, j]`; the rest goes to the trash slot."""
    index = jnp.where(closed, first[:, None] + jnp.arange(values.shape[1]), entries.shape[1] - 1)
    return entries.at[rows.lanes[:, None], index].set(values.astype(entries.dtype))


def zero_where(values: Shaped[Array, "R n ..."], condition: Bool[Array, "R n"]) -> Shaped[Array, "R n ..."]:
    """Zeroes what must not be read, so that stale contents (NaN included) cannot pass through a product with zero."""
    return jnp.where(
        condition.reshape(*condition.shape, *([1] * (values.ndim - 2))), jnp.zeros((), values.dtype), values
    )
