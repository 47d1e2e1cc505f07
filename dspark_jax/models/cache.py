"""Position-addressed storage: rings and append-only entries, each with a trash slot that is never read.

Every value is stored at an index computed from its absolute position, so a rejected token is undone by lowering the
committed length: later writes land on the same indices and reads mask by position.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from dspark_jax.decode.rows import Rows


def ring_write(
    ring: Shaped[Array, "R n ..."],
    values: Shaped[Array, "R width ..."],
    rows: Rows,
    keep: Bool[Array, "R width"] | None = None,
) -> Shaped[Array, "R n ..."]:
    """Writes lane rows at `position mod (n - 1)`; the last index is the trash slot.

    Of each slot's kept rows (a prefix of its lane) only the last `n - 1` are written, so no index is written twice.
    """
    size = ring.shape[1] - 1
    keep = rows.lane_valid if keep is None else keep
    count = jnp.sum(keep, axis=1, keepdims=True)
    fresh = keep & (jnp.arange(rows.width) >= count - size)
    index = jnp.where(fresh, rows.lane_position % size, size)
    return ring.at[jnp.arange(ring.shape[0])[:, None], index].set(values.astype(ring.dtype))


def ring_history(ring: Shaped[Array, "R n ..."], start: Int[Array, "R"], length: int) -> Shaped[Array, "R length ..."]:
    """The `length` values in front of position `start`, in order; those before position 0 are zeros."""
    size = ring.shape[1] - 1
    position = start[:, None] - length + jnp.arange(length)
    values = ring[jnp.arange(ring.shape[0])[:, None], position % size]
    return zero_where(values, position < 0)


def entries_write(
    entries: Shaped[Array, "R n ..."],
    values: Shaped[Array, "R G ..."],
    first: Int[Array, "R"],
    closed: Bool[Array, "R G"],
) -> Shaped[Array, "R n ..."]:
    """Writes entry `first + j` where `closed[:, j]`; the rest goes to the trash slot."""
    index = jnp.where(closed, first[:, None] + jnp.arange(values.shape[1]), entries.shape[1] - 1)
    return entries.at[jnp.arange(entries.shape[0])[:, None], index].set(values.astype(entries.dtype))


def zero_where(values: Shaped[Array, "R n ..."], condition: Bool[Array, "R n"]) -> Shaped[Array, "R n ..."]:
    """Zeroes what must not be read, so that stale contents (NaN included) cannot pass through a product with zero."""
    return jnp.where(
        condition.reshape(*condition.shape, *([1] * (values.ndim - 2))), jnp.zeros((), values.dtype), values
    )
