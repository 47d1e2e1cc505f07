"""The device mesh: `pipe` (layer ranges) by `expert` (expert slots and request rows). One device is a 1×1 mesh, no
special case.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, PartitionSpec

from dspark_jax.errors import ConfigError

PIPE, EXPERT = "pipe", "expert"


def make_mesh(pipe: int = 1, expert: int = 1, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of `pipe` × `expert` devices, by default the first ones of `jax.devices()`; a single one is this process's."""
    if not all(isinstance(n, int | np.integer) for n in (pipe, expert)):
        raise ConfigError(f"mesh: pipe is {pipe!r}, expert is {expert!r}; expected two integers, as in make_mesh(2, 4)")
    if pipe < 1 or expert < 1:
        raise ConfigError(f"mesh {pipe}x{expert}: both axes must be at least 1")
    if devices is None:
        devices = jax.devices() if pipe * expert > 1 else jax.local_devices()
    available = list(devices)
    if len(available) < pipe * expert:
        raise ConfigError(
            f"mesh {pipe}x{expert} needs {pipe * expert} devices, but there are {len(available)};"
            " choose a smaller mesh, or emulate devices with dspark_jax.testing.emulate_devices before jax starts"
        )
    grid = np.asarray(available[: pipe * expert]).reshape(pipe, expert)
    return Mesh(grid, (PIPE, EXPERT), axis_types=(AxisType.Auto,) * 2)


def checked_mesh(mesh: Mesh | None) -> Mesh:
    """The mesh, by default one device; raises ConfigError for anything else than `make_mesh` gives."""
    if mesh is None:
        return make_mesh()
    if not isinstance(mesh, Mesh) or mesh.axis_names != (PIPE, EXPERT):
        raise ConfigError(f"mesh is {mesh!r:.80}; expected what make_mesh(2, 4) gives, or load_mesh('2x4').make()")
    return mesh


def param_specs(params: nnx.State) -> nnx.State:
    """Partition of the parameters: stacked experts by their leading axis over `expert`, everything else replicated."""

    def spec(path: tuple, _) -> PartitionSpec:
        return PartitionSpec(EXPERT) if any(getattr(k, "key", None) == "experts" for k in path) else PartitionSpec()

    return jax.tree_util.tree_map_with_path(spec, params)
