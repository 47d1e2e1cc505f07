"""What the ring asks of a rank's stage, and how models of a family are taken apart into stages."""

from typing import Any, Protocol

import jax
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Float32, Int

from dspark_jax.decode.rows import Rows
from dspark_jax.parallel.stacking import Path


class Stage(Protocol):
    """What one pipeline rank holds; on the last rank also a `decode.protocols.Head`.

    `drafter` is what the last rank drives, None without one. Its `choices` are what its routers chose.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def drafter(self) -> Any: ...

    def init_cache(self, slots: int, max_len: int, block: int) -> Any:
        """State of this rank's layers; see `decode.protocols.Target`."""
        ...

    def embed_streams(self, token: Int[Array, "B"]) -> Float[Array, "B n d"]:
        """Token vectors in every residual stream (first rank)."""
        ...

    def forward(
        self, rows: Rows, streams: Float[Array, "B n d"], context: Float32[Array, "B d"], cache: Any
    ) -> tuple[Float[Array, "B n d"], Float32[Array, "B d"], Any, tuple]:
        """This rank's layers: new streams, the context projection with this rank's share added, new state, and what each
        layer's router chose.
        """
        ...

    def hidden(self, streams: Float[Array, "B n d"]) -> Float[Array, "B d"]:
        """Rows for `logits` (last rank)."""
        ...

    def logits(self, hidden: Float[Array, "... d"]) -> Float32[Array, "... V"]:
        """fp32 logits of hidden rows (last rank)."""
        ...


class Parts(Protocol):
    """How the ranks' leaves come out of the whole model's. Paths begin with an attribute of the stage, or of the model."""

    def stage(self, rank: int, rngs: nnx.Rngs) -> Any:
        """The module of a rank, a `Stage`."""
        ...

    def name(self, rank: int, path: Path) -> Path:
        """The name of a leaf in the ranks' common layout: ranks share leaves of one name and shape."""
        ...

    def origin(self, rank: int, path: Path) -> Path:
        """The model's leaf that a rank's leaf is, or is a part of."""
        ...

    def taken(self, rank: int, path: Path, value: np.ndarray) -> np.ndarray:
        """A rank's leaf out of the values of its origin."""
        ...

    def partition(self, path: Path) -> PartitionSpec:
        """How a leaf, with the ranks as leading axis, is split over the mesh."""
        ...


def rows_of_tap(value: np.ndarray, ids: tuple[int, ...], tap: int, width: int) -> np.ndarray:
    """The part [width, …] of a projection of concatenated taps that reads one of them."""
    at = ids.index(tap)
    return value[at * width : (at + 1) * width]


def filled_up(value: np.ndarray, axis: int, size: int) -> np.ndarray:
    """With zeros behind it on this axis."""
    widths = [(0, 0)] * value.ndim
    widths[axis] = (0, size - value.shape[axis])
    return np.pad(value, widths)


def own_shape(leaf: jax.ShapeDtypeStruct, origin: Any) -> jax.ShapeDtypeStruct:
    """A stage's leaf with the dtype that the model's has."""
    return jax.ShapeDtypeStruct(leaf.shape, origin.dtype)
