"""From lengths to the number of rows that a step runs with: the bucket, the same on every rank."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

PARTS = 4  # default buckets: every one is a copy of the stages in the program


def bucket_sizes(slots: int, gamma: int, wanted: Sequence[int] | None = None) -> tuple[int, ...]:
    """Ascending numbers of rows of a decoding step over `slots` requests; the last one is that of whole blocks.

    `wanted` are the others; those that are no smaller than it are left out. By default quarters of it, rounded up.
    """
    whole = slots * (gamma + 1)
    wanted = [-(-whole * part // PARTS) for part in range(1, PARTS)] if wanted is None else wanted
    return (*sorted({n for n in wanted if n < whole}), whole)


def packed_rows(active: Bool[Array, "R"], lengths: Int[Array, "R"], axis: str | None = None) -> Int[Array, ""]:
    """Rows of the next step on the rank that has most: the anchors and the drafts to verify."""
    rows = jnp.sum(jnp.where(active, 1 + lengths, 0), dtype=jnp.int32)
    return rows if axis is None else jax.lax.pmax(rows, axis)


def bucket_index(rows: Int[Array, ""], buckets: Sequence[int]) -> Int[Array, ""]:
    """Index of the smallest of the ascending `buckets` that holds `rows`; the last one for more rows than it holds."""
    sizes = jnp.asarray(np.asarray(buckets, np.int32))
    return jnp.minimum(jnp.searchsorted(sizes, rows), len(buckets) - 1).astype(jnp.int32)
