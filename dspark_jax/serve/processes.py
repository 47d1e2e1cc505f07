"""An engine on several processes: process 0 decides, and all make the same device calls in the same order.

A call is three programs: the record is spread from process 0 to every device, the ring runs, and what it has committed
is gathered on every device. Each is a collective, so each must be entered by every process, also when the record is
empty. Nothing of the record passes through the other processes' hosts, except one flag: whether to stop.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dspark_jax.decode.item import Control
from dspark_jax.errors import ConfigError, RequestError, raise_all
from dspark_jax.parallel.mesh import EXPERT, PIPE
from dspark_jax.parallel.ring import RECORD, Ring, TickOutput

ALL = (PIPE, EXPERT)


def spans_processes(mesh: Mesh) -> bool:
    """Whether the mesh has devices of other processes than this one."""
    return any(device.process_index != jax.process_index() for device in mesh.devices.flat)


class Processes:
    """The programs around the ring's: `spread` in front of it and `gather` behind it. Both compile when first called.

    Args:
      ring: on a mesh that spans processes.

    Raises ConfigError if process 0 or this one has no device of the mesh.
    """

    def __init__(self, ring: Ring):
        mesh, self.index = ring.mesh, jax.process_index()
        owners = [device.process_index for device in mesh.devices.flat]
        raise_all(ConfigError, "mesh", _faults(mesh, owners, self.index))
        self._sender = owners.index(0)
        self._template = ring.idle_control()
        self._rows = NamedSharding(mesh, PartitionSpec(ALL))
        everywhere = NamedSharding(mesh, PartitionSpec())
        summed = jax.shard_map(
            lambda rows: jax.lax.psum(rows[0], ALL),
            mesh=mesh, in_specs=PartitionSpec(ALL), out_specs=PartitionSpec(), check_vma=False,
        )  # fmt: skip
        # Two programs that may run side by side could meet their collectives in different orders on two processes, so
        # a record waits for the numbers that the call before has gathered.
        self._spread = jax.jit(
            lambda rows, before: unpack(summed(rows), self._template),
            out_shardings=(NamedSharding(mesh, RECORD), everywhere),
            keep_unused=True,
        )
        self._gather = jax.jit(lambda output: output, out_shardings=everywhere)
        shape = (ring.pipe, ring.sizes.rounds * ring.pipe, ring.sizes.slots)
        self._before = jax.make_array_from_callback(shape, everywhere, lambda _: np.zeros(shape, np.int32))
        self._silence = None if self.index == 0 else self._place(pack(self._template, stop=False))

    def spread(self, record: Control | None, stop: bool) -> tuple[Control, jax.Array]:
        """Process 0's record on the mesh, and its flag on every device; the other processes' arguments do not count."""
        if self._silence is None:
            assert record is not None
            return self._spread(self._place(pack(record, stop)), self._before)
        return self._spread(self._silence, self._before)

    def gather(self, output: TickOutput) -> TickOutput:
        """The output, whole on every device."""
        gathered = self._gather(output)
        self._before = gathered.generation
        return gathered

    def follow(self, call: Callable[[], jax.Array]) -> None:
        """Makes calls until process 0 says stop; `call` dispatches one and returns its flag.

        The flag is read when the next call was dispatched, so that no device waits for this host. Whoever says stop
        therefore makes one more call.
        """
        stop, stopped = call(), False
        while not stopped:
            following = call()
            stop, stopped = following, bool(stop)

    def stop(self, call: Callable[[bool], None]) -> None:
        """Ends `follow` on the other processes; `call` dispatches one with this flag."""
        for flag in (True, False):
            call(flag)

    def require_process_0(self) -> None:
        """Raises RequestError on the other processes."""
        if self.index > 0:
            raise RequestError(f"requests enter at process 0, and this is process {self.index}; call follow() here")

    def _place(self, vector: np.ndarray) -> jax.Array:
        """[devices, n]: the vector at process 0's first device, zeros elsewhere, so that the sum is the vector."""

        def row(index: Any) -> np.ndarray:
            return (vector if index[0].start == self._sender else np.zeros_like(vector))[None]

        return jax.make_array_from_callback((self._rows.num_devices, *vector.shape), self._rows, row)


def _faults(mesh: Mesh, owners: list[int], index: int) -> list[str]:
    return [
        f"process {process} has no device of mesh {mesh.shape[PIPE]}x{mesh.shape[EXPERT]}; expected devices of every process"
        for process in sorted({0, index} - set(owners))
    ]


def pack(record: Control, stop: bool) -> np.ndarray:
    """Record and flag as one int32 vector; other types of 32 bits travel by their bits."""
    parts = [np.asarray(x.astype(np.int32) if x.dtype == bool else x).reshape(-1) for x in jax.tree.leaves(record)]
    return np.concatenate([np.array([stop], np.int32), *(x.view(np.int32) for x in parts)])


def unpack(vector: jax.Array, template: Control) -> tuple[Control, jax.Array]:
    """The inverse of `pack`, on the device; the leaves have the template's shapes and types."""
    leaves, structure = jax.tree.flatten(template)
    ends = np.cumsum([1, *(x.size for x in leaves)])
    parts = jnp.split(vector, ends[:-1])[1:]
    found = [_typed(part, x.dtype).reshape(x.shape) for part, x in zip(parts, leaves, strict=True)]
    return jax.tree.unflatten(structure, found), vector[0] != 0


def _typed(bits: jax.Array, dtype: np.dtype) -> jax.Array:
    if dtype.kind == "b":
        return bits != 0
    return bits if dtype.kind == "i" else jax.lax.bitcast_convert_type(bits, dtype)
