"""Pytrees of the pipeline's ranks laid over each other, so that one SPMD program can hold what differs from rank to rank.

Leaves of the same name, shape and dtype share one array whose leading axis is the rank; a rank that lacks a leaf has
zeros there. A leaf that only some ranks have (a compressor, say) therefore costs its size on every rank, and nothing
is stacked over layers: a layer position is part of the name.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np

Path = tuple[str | int, ...]


def path_of(entries: tuple[Any, ...]) -> Path:
    """Plain names of a pytree path; the wrapper around a variable's array has none."""
    names = (getattr(e, "key", getattr(e, "idx", getattr(e, "name", None))) for e in entries)
    return tuple(n for n in names if n not in (None, "value"))


class Stacked:
    """The common layout of one pytree a rank.

    Args:
      trees: the ranks' pytrees, of arrays or shapes.
      name: the name of the leaf at a rank and a path; two leaves of a rank must not share name, shape and dtype.
    """

    def __init__(self, trees: Sequence[Any], name: Callable[[int, Path], Path] = lambda rank, path: path):
        self.shapes: dict[str, jax.ShapeDtypeStruct] = {}
        self.paths: list[dict[str, Path]] = []
        self._structures = []
        for rank, tree in enumerate(trees):
            leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
            keys: dict[str, Path] = {}
            for entries, leaf in leaves:
                path = path_of(entries)
                key = f"{'.'.join(map(str, name(rank, path)))} {'x'.join(map(str, leaf.shape))} {leaf.dtype.name}"
                if key in keys:
                    raise ValueError(f"rank {rank} has two leaves named {key!r}")
                keys[key] = path
                self.shapes[key] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
            self.paths.append(keys)
            self._structures.append(structure)

    @property
    def ranks(self) -> int:
        return len(self.paths)

    def take(self, leaves: dict[str, Any], rank: int) -> Any:
        """The pytree of `rank` from its leaves by key."""
        return jax.tree.unflatten(self._structures[rank], [leaves[key] for key in self.paths[rank]])

    def put(self, leaves: dict[str, Any], rank: int, tree: Any) -> dict[str, Any]:
        """`leaves` with those of `rank` replaced by the leaves of `tree`."""
        return leaves | dict(zip(self.paths[rank], jax.tree.leaves(tree), strict=True))

    def place(
        self,
        source: Callable[[int, Path], np.ndarray],
        sharding: Callable[[Path], jax.sharding.Sharding],
    ) -> dict[str, jax.Array]:
        """Arrays [ranks, ...] by key, one leaf after the other; `source` gives a rank's leaf at a path."""
        return {key: self._place_leaf(key, source, sharding) for key in self.shapes}

    def _place_leaf(self, key: str, source: Callable, sharding: Callable) -> jax.Array:
        shape = self.shapes[key]
        owners = [rank for rank in range(self.ranks) if key in self.paths[rank]]
        stacked = (self.ranks, *shape.shape)

        @lru_cache(maxsize=1)  # the devices of a rank come one after the other, and may share its leaf
        def own(rank: int) -> np.ndarray:
            return np.asarray(source(rank, self.paths[rank][key]), shape.dtype)

        def part(index: Any) -> np.ndarray:
            ranks = range(*index[0].indices(self.ranks))
            zeros = np.zeros(shape.shape, shape.dtype)
            return np.stack([(own(rank) if rank in owners else zeros)[index[1:]] for rank in ranks])

        # Device by device, so that the host does not hold what all of them get.
        where = sharding(self.paths[owners[0]][key])
        indices = where.addressable_devices_indices_map(stacked).items()
        parts = [jax.device_put(part(index), device) for device, index in indices]
        return jax.make_array_from_single_device_arrays(stacked, where, parts, dtype=shape.dtype)
