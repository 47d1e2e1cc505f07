"""Rows: the unit that every layer works on. A row is one token of one request at one absolute position."""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int, Shaped


@struct.dataclass
class Rows:
    """The rows of one tick, `B` of them, over `R` request slots.

    The rows of a slot have consecutive positions, beginning at `start[slot]`, and a valid prefix of `count[slot]` rows.
    In the padded form there are exactly `width` rows a slot, in slot order, so that `B = R * width`; a packed form may
    hold fewer. Invalid rows hold token 0 and position 0, and no layer lets them influence a valid row.

    Attributes:
      token: vocabulary ids.
      slot: the request slot that owns the row.
      position: absolute position (0-based).
      valid: False for padding.
      start: position of each slot's first row.
      count: number of valid rows of each slot; 0 for an idle slot.
      width: the most rows that one slot can have (static).
      lane: where each slot's state lies in the caches; None where slot r has lane r.
    """

    token: Int[Array, "B"]
    slot: Int[Array, "B"]
    position: Int[Array, "B"]
    valid: Bool[Array, "B"]
    start: Int[Array, "R"]
    count: Int[Array, "R"]
    width: int = struct.field(pytree_node=False)
    lane: Int[Array, "R"] | None = None

    @property
    def lanes(self) -> Int[Array, "R"]:
        """`lane`, also where it was left out."""
        return jnp.arange(self.num_slots) if self.lane is None else self.lane

    @property
    def num_slots(self) -> int:
        """R, the slots whose rows these are."""
        return self.start.shape[0]

    @property
    def padded(self) -> bool:
        """Whether every slot has all its `width` rows, so that lanes are a reshape."""
        return self.token.shape[0] == self.num_slots * self.width

    @property
    def lane_position(self) -> Int[Array, "R width"]:
        """Absolute positions by (slot, index), valid or not."""
        return self.start[:, None] + jnp.arange(self.width)

    @property
    def lane_valid(self) -> Bool[Array, "R width"]:
        """Which places of the lanes hold a row: the first `count` of each slot."""
        return jnp.arange(self.width) < self.count[:, None]

    def to_lanes(self, x: Shaped[Array, "B ..."]) -> Shaped[Array, "R width ..."]:
        """Arranges rows by (slot, index in the slot); missing rows are zeros."""
        if self.padded:
            return x.reshape(self.num_slots, self.width, *x.shape[1:])
        flat = jnp.zeros((self.num_slots * self.width + 1, *x.shape[1:]), x.dtype)
        flat = flat.at[self._lane_index()].set(x)
        return flat[:-1].reshape(self.num_slots, self.width, *x.shape[1:])

    def first_of_lanes(self, x: Shaped[Array, "B ..."]) -> Shaped[Array, "R ..."]:
        """`to_lanes(x)[:, 0]` of the packed form, without the other rows."""
        first = self.valid & (self.position == self.start[self.slot])
        slot = jnp.where(first, self.slot, self.num_slots)
        return jnp.zeros((self.num_slots + 1, *x.shape[1:]), x.dtype).at[slot].set(x)[:-1]

    def from_lanes(self, x: Shaped[Array, "R width ..."]) -> Shaped[Array, "B ..."]:
        """The inverse of `to_lanes`; invalid rows of the packed form get some finite row of `x`."""
        flat = x.reshape(self.num_slots * self.width, *x.shape[2:])
        if self.padded:
            return flat
        return flat[jnp.minimum(self._lane_index(), flat.shape[0] - 1)]

    def _lane_index(self) -> Int[Array, "B"]:
        index = self.slot * self.width + self.position - self.start[self.slot]
        return jnp.where(self.valid, index, self.num_slots * self.width)


def padded_rows(
    token: Int[Array, "R width"], start: Int[Array, "R"], count: Int[Array, "R"], lane: Int[Array, "R"] | None = None
) -> Rows:
    """Rows in the padded form, `width` a slot of which the first `count` are valid."""
    slots, width = token.shape
    index = jnp.arange(width)
    valid = index < count[:, None]
    position = jnp.where(valid, start[:, None] + index, 0)
    slot = jnp.broadcast_to(jnp.arange(slots)[:, None], (slots, width))
    return Rows(
        token=jnp.where(valid, token, 0).reshape(-1),
        slot=slot.reshape(-1),
        position=position.reshape(-1),
        valid=valid.reshape(-1),
        start=start,
        count=count,
        width=width,
        lane=lane,
    )


def compact_rows(
    token: Int[Array, "R width"],
    start: Int[Array, "R"],
    count: Int[Array, "R"],
    size: int,
    lane: Int[Array, "R"] | None = None,
) -> Rows:
    """The valid rows of `padded_rows` without the gaps, slot after slot, filled up with invalid rows to `size`.

    `size` is below R * width and at least the sum of `count`; with as many as R * width rows, use the padded form.
    """
    slots, width = token.shape
    end = jnp.cumsum(count)
    row = jnp.arange(size)
    slot = jnp.minimum(jnp.searchsorted(end, row, side="right"), slots - 1).astype(jnp.int32)
    index = row - (end - count)[slot]
    valid = row < end[-1]
    return Rows(
        token=jnp.where(valid, token[slot, jnp.clip(index, 0, width - 1)], 0),
        slot=slot,
        position=jnp.where(valid, start[slot] + index, 0),
        valid=valid,
        start=start,
        count=count,
        width=width,
        lane=lane,
    )


def mask_rows(x: jax.Array, valid: Bool[Array, "B"]) -> jax.Array:
    """Zeroes whole rows, also those that hold NaN (a product with zero would keep the NaN)."""
    return jnp.where(valid.reshape(-1, *([1] * (x.ndim - 1))), x, jnp.zeros((), x.dtype))
