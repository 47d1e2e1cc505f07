"""A ring in steady state under a stopwatch: requests start where and when a measurement wants them."""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Float

from dspark_jax.decode.item import Control
from dspark_jax.parallel.ring import STATE, Ring, TickOutput

Slot = tuple[int, int]  # microbatch, slot
ENDLESS = 2**30  # tokens of a request that no measurement reaches the end of


class RingTimer:
    """The compiled program of a ring, and its state between calls. No request ends by itself before its context is full.

    Args:
      ring: what is measured.
      params: the ring's parameters, placed on its mesh; shared, never written. For `compile` their shapes are enough.
    """

    def __init__(self, ring: Ring, params: dict[str, Any]):
        self.ring, self.params = ring, params
        self.state: Any = None
        self._step: Any = None
        self._idle = ring.place_control(ring.idle_control())

    @property
    def ticks(self) -> int:
        """Ticks of one call."""
        return self.ring.sizes.rounds * self.ring.pipe

    def compile(self) -> float:
        """Returns the seconds it took. Nothing is allocated."""
        begin = time.perf_counter()
        state = jax.tree.map(self._placed, jax.eval_shape(self.ring.init_state))
        self._step = self.ring.step.lower(self.params, state, self._idle).compile()
        return time.perf_counter() - begin

    @property
    def temporaries(self) -> int:
        """Bytes of the compiled program beside weights, state and results."""
        analysis = self._step.memory_analysis()
        return analysis.temp_size_in_bytes if analysis else 0

    def _placed(self, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """A leaf of the state with its sharding; JAX does not split arrays without elements (drafts of plain decoding)."""
        spec = STATE if math.prod(x.shape) else PartitionSpec()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(self.ring.mesh, spec))

    def allocate(self) -> None:
        """Makes the state, empty."""
        self.state = self.ring.init_state()

    def free(self) -> None:
        """Forgets the state."""
        self.state = None

    def call(self, record: Control | None = None) -> TickOutput:
        """Dispatches one call, by default without admissions."""
        self.state, output = self._step(self.params, self.state, self._idle if record is None else record)
        return output

    def timed(self, calls: int) -> tuple[float, list[TickOutput]]:
        """Seconds from idle devices until the last of so many calls has ended, and the calls' outputs."""
        jax.block_until_ready(self.state)
        begin = time.perf_counter()
        outputs = [self.call() for _ in range(calls)]
        jax.block_until_ready((outputs[-1], self.state))
        return time.perf_counter() - begin, outputs

    def start(
        self, prompts: Mapping[Slot, Sequence[int]], seeds: Mapping[Slot, int], *, position: int = 0, temperature: float = 1.0
    ) -> None:
        """Ends what runs and reads new prompts, whose last chunks all go the same way at the same time; all have begun then.

        Behind a `position` above 0 the prompts follow an empty context, as long as it.
        """
        chunk = self.ring.sizes.chunk
        need = {slot: -(-len(ids) // chunk) for slot, ids in prompts.items()}
        calls = max(need.values())
        for call in range(calls):
            record = self.ring.idle_control()
            for slot, ids in prompts.items():
                at = (call - calls + need[slot]) * chunk
                if at >= 0:
                    _admit(record, slot, ids[at : at + chunk], position + at, at + chunk >= len(ids))
                    record.fresh[slot] = at == 0
                    record.sampling.temperature[slot], record.sampling.seed[slot] = temperature, seeds[slot]
            if call == 0:
                record.abort[:] = ~record.admit
            record.bucket[:] = np.any(record.admit, axis=1, keepdims=True)
            self.call(self.ring.place_control(record))
        self.call()  # the chunks of the later microbatches reach the last rank in here

    def set_history(self, values: Float[np.ndarray, "slots history gamma"]) -> None:
        """The schedule's history of every microbatch's slots on every expert rank."""
        old = self.state.stale
        lanes = old.shape[1] // values.shape[0]
        whole = np.broadcast_to(np.tile(values.astype(np.float32), (lanes, 1, 1)), old.shape)
        new = jax.make_array_from_callback(old.shape, old.sharding, lambda i: whole[i])
        self.state = self.state.replace(stale=new)


def _admit(record: Control, slot: Slot, part: Sequence[int], start: int, final: bool) -> None:
    record.admit[slot] = True
    record.token[slot][: len(part)] = part
    record.start[slot], record.count[slot], record.final[slot] = start, len(part), final
    record.generation[slot], record.max_tokens[slot] = 1, ENDLESS


def abstract_params(ring: Ring) -> dict[str, jax.ShapeDtypeStruct]:
    """The ring's parameters before they are there: shapes and places."""
    return {
        key: jax.ShapeDtypeStruct((ring.pipe, *x.shape), x.dtype, sharding=NamedSharding(ring.mesh, ring.pipeline.specs[key]))
        for key, x in ring.pipeline.params.shapes.items()
    }


def drafts_of(total: int, requests: int, slots: int) -> np.ndarray:
    """`total` drafts over the first `requests` of `slots` slots, as evenly as can be: [slots]."""
    each, more = divmod(total, requests)
    return np.array([each + (i < more) if i < requests else 0 for i in range(slots)], np.int32)
