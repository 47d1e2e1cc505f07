"""What travels around the pipeline: one work item a microbatch, and the host's admissions that the first rank merges.

Everything that a rank must know of a request stands in the item, so no rank can disagree with another about it.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Float32, Int

from dspark_jax.decode.rows import Rows, compact_rows, padded_rows
from dspark_jax.decode.sampling import SamplingState
from dspark_jax.decode.state import WorkItem


@struct.dataclass
class Control:
    """The host's word on R slots, once a round.

    Attributes:
      admit: the slot takes the chunk of this record; the other fields count only then.
      token, start, count: the chunk and where it stands in the prompt.
      final: the prompt's last chunk: a token is drawn behind it.
      fresh: its first chunk: the slot forgets its last request.
      abort: the slot's request ends now, whatever is in flight.
      generation: number of the slot's request, handed back with every commit.
      max_tokens, stop, sampling: of the request (read where `fresh`).
      bucket: index of the row bucket, the same for all slots of a microbatch: 1 where one of them takes a chunk, else 0.
        With a schedule an item counts the packed buckets in front of these two (`parallel.ring`).
    """

    admit: Bool[Array, "R"]
    token: Int[Array, "R C"]
    start: Int[Array, "R"]
    count: Int[Array, "R"]
    final: Bool[Array, "R"]
    fresh: Bool[Array, "R"]
    abort: Bool[Array, "R"]
    generation: Int[Array, "R"]
    max_tokens: Int[Array, "R"]
    stop: Int[Array, "R S"]
    sampling: SamplingState
    bucket: Int[Array, "R"]


@struct.dataclass
class Item:
    """Rows of R slots on their way: a decoding block or a chunk of a prompt each, `width` at the most.

    `streams` and `context` are the residual streams and the drafter's context projection so far; `Layout` says which
    row is where.
    """

    control: Control
    verify: Int[Array, "R"]
    streams: Float[Array, "R width n*d"]
    context: Float32[Array, "R width d"]

    def work(self, width: int) -> WorkItem:
        """The tokens of a bucket of `width` rows a slot."""
        c = self.control
        return WorkItem(token=c.token[:, :width], start=c.start, count=c.count, verify=self.verify, final=c.final)


@dataclass(frozen=True)
class Layout:
    """How the rows of a bucket lie in an item, on every rank that the item passes.

    Padded: row (slot r, index i) at [r, i], for i < `width`. Packed: row b, in the order of `compact_rows`, at place b of
    the flattened [R * item width], for b < `packed`. What lies behind these rows has no meaning.
    """

    width: int
    packed: int | None = None

    def size(self, slots: int) -> int:
        """Rows of a tick, with those that fill it up."""
        return slots * self.width if self.packed is None else self.packed

    def rows(self, work: WorkItem, lane: Int[Array, "R"] | None) -> Rows:
        """The rows of `work`, whose tokens are `width` a slot; `lane` as of `Rows`."""
        if self.packed is None:
            return padded_rows(work.token, work.start, work.count, lane)
        return compact_rows(work.token, work.start, work.count, self.packed, lane)

    def take(self, x: Float[Array, "R item_width n"], *shape: int) -> Float[Array, "B ..."]:
        """The rows out of an item's array, each of this shape."""
        if self.packed is None:
            return x[:, : self.width].reshape(self.size(x.shape[0]), *shape)
        return x.reshape(-1, x.shape[-1])[: self.packed].reshape(self.packed, *shape)

    def put(self, x: Float[Array, "R item_width n"], rows: Float[Array, "B ..."]) -> Float[Array, "R item_width n"]:
        """An item's array with these rows."""
        if self.packed is None:
            return x.at[:, : self.width].set(rows.reshape(x.shape[0], self.width, -1))
        flat = x.reshape(-1, x.shape[-1])
        return flat.at[: self.packed].set(rows.reshape(self.packed, -1)).reshape(x.shape)


def idle_control(slots: int, width: int, stops: int) -> Control:
    """A record without any work (numpy leaves)."""
    fields: dict[str, Any] = {f.name: np.zeros(slots, np.int32) for f in dataclasses.fields(Control)}
    fields |= {name: np.zeros(slots, bool) for name in ("admit", "final", "fresh", "abort")}
    fields |= {"token": np.zeros((slots, width), np.int32), "stop": np.full((slots, stops), -1, np.int32)}
    one: Any = {"temperature": np.zeros(slots, np.float32), "top_p": np.ones(slots, np.float32)}
    one |= {"top_k": np.zeros(slots, np.int32), "seed": np.zeros(slots, np.uint32)}
    fields["sampling"] = SamplingState(**one)
    return Control(**fields)


def merge(item: Item, record: Control, here: Bool[Array, ""]) -> Item:
    """Where `here` (on the first rank), the admissions in place of the slots' rows; aborted slots have none."""
    admit, gone = record.admit & here, record.abort & ~record.admit & here

    def pick(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(admit.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    control = jax.tree.map(pick, record, item.control)
    return dataclasses.replace(
        item,
        control=dataclasses.replace(
            control,
            count=jnp.where(gone, 0, control.count),
            final=control.final & ~gone,
            fresh=control.fresh & (admit | ~here),
            abort=jnp.where(here, record.abort, item.control.abort),
            bucket=jnp.where(here, record.bucket, item.control.bucket),
        ),
        verify=jnp.where(admit | gone, 0, item.verify),
    )


class Packing(NamedTuple):
    """How a pytree of [R, …] arrays becomes one [R, n] array a dtype: bools and unsigned integers travel as int32."""

    structure: Any
    shapes: tuple[jax.ShapeDtypeStruct, ...]

    @classmethod
    def of(cls, tree: Any) -> "Packing":
        leaves, structure = jax.tree.flatten(tree)
        return cls(structure, tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves))

    def pack(self, tree: Any) -> dict[str, jax.Array]:
        """Arrays by dtype name."""
        groups: dict[str, list[jax.Array]] = {}
        for leaf in jax.tree.leaves(tree):
            flat = _carried(leaf).reshape(leaf.shape[0], -1)
            groups.setdefault(flat.dtype.name, []).append(flat)
        return {name: jnp.concatenate(parts, axis=1) for name, parts in groups.items()}

    def unpack(self, packed: dict[str, jax.Array]) -> Any:
        """The inverse of `pack`."""
        at, leaves = dict.fromkeys(packed, 0), []
        for shape in self.shapes:
            name = _carrier(shape.dtype).name
            size = int(np.prod(shape.shape[1:]))
            flat = packed[name][:, at[name] : at[name] + size]
            at[name] += size
            leaves.append(_restored(flat, shape.dtype).reshape(shape.shape))
        return jax.tree.unflatten(self.structure, leaves)


def _carrier(dtype: Any) -> np.dtype:
    dtype = jnp.dtype(dtype)
    return jnp.dtype(jnp.int32) if dtype.kind in "biu" else dtype


def _carried(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.int32) if x.dtype == jnp.uint32 else x.astype(_carrier(x.dtype))


def _restored(x: jax.Array, dtype: Any) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.uint32) if dtype == jnp.uint32 else x.astype(dtype)
