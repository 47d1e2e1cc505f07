"""Rounds of the ring on a mesh, with random weights made on the devices, and the floor that they stand against.

The floor of a round: the bytes that the slowest rank must read in a tick over the read rate, times the ticks of a round, plus
the measured time of the round's collectives alone (`collectives_us`), in a program that has the ring's exchanges and nothing
between them.
"""

import math
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dspark_jax.bench.device_profile import DeviceProfile, profiled_each
from dspark_jax.bench.mesh_common import Shape, median_us, random_leaves
from dspark_jax.bench.round_programs import CALLS, PROFILED, REPEATS, SETTLING, first_line
from dspark_jax.bench.synthetic import SyntheticRing, shapes_of
from dspark_jax.config import TargetConfig
from dspark_jax.models.dispatch import gathered
from dspark_jax.parallel.mesh import EXPERT, PIPE
from dspark_jax.parallel.planner import StagePlan, given_stages, plan_stages
from dspark_jax.parallel.ring import STATE, Ring, RingConfig
from dspark_jax.parallel.ring_timer import RingTimer, abstract_params
from dspark_jax.parallel.stage import PipelineSpec
from dspark_jax.parallel.stage_cost import CostModel

LOOPS = 4  # rounds of collectives in one call
Say = Callable[[str], None]


class Timed(NamedTuple):
    """Rounds of one number of requests.

    Attributes:
      requests: that run; the program may have more slots.
      round_us: of a round of all microbatches, the median.
      tokens: of all requests in a round, in the mean.
      collectives_us: of a round's collectives alone.
      profile: of every device, as `mesh.devices.flat` has them; None without GPUs.
      bytes: of a device: weights, state and temporaries.
    """

    requests: int
    round_us: float
    tokens: float
    collectives_us: float
    profile: list[DeviceProfile] | None
    bytes: int


class Rounds:
    """Programs of one mesh over one set of weights and one cut.

    Args:
      requests: side by side, ascending; each is filled up to slots that the mesh can share out.

    Raises ConfigError if the mesh cannot share the model out.
    """

    def __init__(self, shape: Shape, mesh: Mesh, requests: Iterable[int]):
        self.shape, self.mesh, self.requests = shape, mesh, tuple(requests)
        self.pipe, self.expert = mesh.shape[PIPE], mesh.shape[EXPERT]
        self.rounds = 1 if mesh.devices.flat[0].platform == "cpu" else 4  # of a call
        calls = 2 + SETTLING + REPEATS * CALLS + PROFILED
        self.max_len = shape.context + (calls * self.rounds + 1) * (shape.draft.block_size + 1) + 2
        self.plan = plan_stages(shape.config, shape.draft, self.pipe, **self._load(max(self.requests)))
        self.params: dict[str, jax.Array] | None = None
        self.timers = {n: self._timer(n) for n in self.requests}

    def slots(self, requests: int) -> int:
        """Of a microbatch."""
        return self.expert * math.ceil(requests / (self.pipe * self.expert))

    def rows(self, requests: int) -> int:
        """Target rows of a tick over all expert ranks, empty slots included."""
        return self.slots(requests) * (self.shape.draft.block_size + 1)

    def predicted(self, requests: int, costs: CostModel | None = None) -> StagePlan:
        """The cut, costed for so many requests."""
        c, draft = self.shape.config, self.shape.draft
        more: dict[str, Any] = {} if costs is None else {"costs": costs}
        return given_stages(c, draft, self.plan.ranges, self.pipe, **self._load(requests), **more)

    def _load(self, requests: int) -> dict[str, Any]:
        sizes = {"rows": self.rows(requests), "context": self.shape.context, "expert": self.expert}
        return sizes | {"chunk": 1, "dtype": self.shape.dtype}

    def _timer(self, requests: int) -> RingTimer:
        s = self.shape
        spec = PipelineSpec(s.config, s.draft, self.plan.ranges, self.expert, jnp.dtype(s.dtype))
        sizes = RingConfig(self.slots(requests), self.max_len, 1, self.rounds)
        ring = SyntheticRing(spec, shapes_of(s.config, s.draft, s.dtype), self.mesh, sizes, s.rounds)
        return RingTimer(ring, abstract_params(ring))

    def fits(self) -> str:
        """Why the weights cannot be on these devices; "" if they can, or nobody knows."""
        limit = (self.mesh.devices.flat[0].memory_stats() or {}).get("bytes_limit")
        if limit is None or self.plan.memory.parameters < limit:
            return ""
        return f"weights of {self.plan.memory.parameters / 1e9:.1f} GB a device, and JAX has {limit / 1e9:.1f} GB of it"

    def place(self) -> None:
        """Makes the weights."""
        ring, pipeline = self.timers[self.requests[0]].ring, self.timers[self.requests[0]].ring.pipeline
        whole = {key: jax.ShapeDtypeStruct((self.pipe, *x.shape), x.dtype) for key, x in pipeline.params.shapes.items()}
        self.params = random_leaves(whole, pipeline.specs, ring.mesh, self.shape.config.n_routed_experts)
        jax.block_until_ready(self.params)

    def free(self) -> None:
        """Forgets the weights."""
        self.params = None
        for timer in self.timers.values():
            timer.params = {}

    def compile(self, say: Say) -> list[int]:
        """All programs side by side; returns the requests of those that could be compiled."""

        def compiled(requests: int) -> bool:
            try:
                say(f"{_requests(requests)}: compiled in {self.timers[requests].compile():.1f} s")
            except jax.errors.JaxRuntimeError as error:
                say(f"{_requests(requests)}: cannot be compiled: {first_line(error)[:300]}")
                return False
            return True

        with ThreadPoolExecutor(min(len(self.requests), os.cpu_count() or 1)) as pool:
            sound = list(pool.map(compiled, self.requests))
        return [n for n, good in zip(self.requests, sound, strict=True) if good]

    def time(self, requests: int, say: Say) -> Timed | None:
        """After `compile`; None, with the reason said, where the devices are too small."""
        timer = self.timers[requests]
        try:
            if self.params is None:
                self.place()
            assert self.params is not None
            timer.params = {key: self.params[key] for key in timer.params}
            return self._time(timer, requests)
        except jax.errors.JaxRuntimeError as error:
            say(f"{_requests(requests)}: not measured: {first_line(error)[:300]}")
            return None
        finally:
            timer.free()

    def _time(self, timer: RingTimer, requests: int) -> Timed:
        timer.allocate()
        tokens = np.random.default_rng(0).integers(0, self.shape.config.vocab_size, requests)
        slots = [(m, s) for s in range(timer.ring.sizes.slots) for m in range(self.pipe)][:requests]
        prompts = {slot: (int(token),) for slot, token in zip(slots, tokens, strict=True)}
        timer.start(prompts, {slot: i for i, slot in enumerate(slots)}, position=self.shape.context)
        timer.timed(SETTLING)
        seconds, counts = [], []
        for _ in range(REPEATS):
            taken, outputs = timer.timed(CALLS)
            seconds.append(taken / (CALLS * self.rounds))
            counts += [np.asarray(o.emission.count)[-1] for o in outputs]
        count = np.stack(counts)
        ran, expected = int((count > 0).sum()), len(counts) * self.rounds * requests
        if ran != expected:
            raise RuntimeError(f"{ran} rounds ran where {expected} should have: a request has ended in a timed call")
        profile = profiled_each(lambda: timer.timed(PROFILED), PROFILED * timer.ticks)
        held = sum(x.nbytes for x in jax.tree.leaves((timer.params, timer.state))) // self.mesh.size + timer.temporaries
        alone = collectives_us(timer.ring)
        tokens_a_round = float(count.sum()) / len(counts) / self.rounds
        return Timed(requests, 1e6 * float(np.median(seconds)), tokens_a_round, alone, profile, held)

    def floor_us(self, requests: int, rate: float) -> float:
        """Microseconds of a round's reading alone, at `rate` bytes/s on every device."""
        return 1e6 * self.pipe * self.predicted(requests, reading(rate)).tick_seconds


def _requests(count: int) -> str:
    return f"{count} request{'s' * (count != 1)}"


def reading(rate: float) -> CostModel:
    """Costs of nothing but reading."""
    return replace(
        CostModel(), read_bandwidth=rate, matmul_rate=1e30, launch=0, logit_passes=0, head_passes=0, grouped_experts=True
    )


def collectives_us(ring: Ring) -> float:
    """Microseconds of the collectives of one round, alone: hops, expert layers, embedding and head. 0 on one device."""
    if ring.mesh.size == 1:
        return 0.0
    spec, c = ring.spec, ring.spec.config
    assert isinstance(c, TargetConfig)
    rows, drafted = ring.local_slots * (ring.gamma + 1), ring.local_slots * ring.gamma
    hops = [(i, (i + 1) % ring.pipe) for i in range(ring.pipe)]

    def layer(x: jax.Array) -> jax.Array:
        ids = jnp.zeros((len(x), c.num_experts_per_tok), jnp.int32)
        local = lambda x, ids, w: x.astype(jnp.float32) * (w + ids).sum(axis=-1, keepdims=True)  # noqa: E731
        return gathered(x, ids + x[:, :1].astype(jnp.int32), ids.astype(jnp.float32), local, 1, EXPERT).astype(x.dtype)

    def head(x: jax.Array) -> jax.Array:
        whole = jax.lax.all_gather(x, EXPERT, tiled=True)
        part = jnp.broadcast_to(whole[:, :1].astype(jnp.float32), (len(whole), spec.padded_vocab // spec.expert))
        logits = jax.lax.all_to_all(jax.lax.optimization_barrier(part), EXPERT, split_axis=0, concat_axis=1, tiled=True)
        return x + jax.lax.optimization_barrier(logits)[:, :1].astype(x.dtype)

    def embed(x: jax.Array) -> jax.Array:
        whole = jax.lax.all_gather(x[:, 0].astype(jnp.int32), EXPERT, tiled=True)
        part = jnp.broadcast_to(whole[:, None].astype(x.dtype), (len(whole), c.hidden_size))
        return jax.lax.psum_scatter(jax.lax.optimization_barrier(part), EXPERT, scatter_dimension=0, tiled=True)

    def stage(rank: int, x: jax.Array) -> jax.Array:
        first, end = spec.ranges[rank]
        x = embed(x) if rank == 0 else x
        for _ in range(end - first):
            x = layer(x)
        if rank < ring.pipe - 1:
            return x
        x = head(x)
        if spec.draft is None:
            return x
        block = embed(x[:drafted])
        for _ in range(len(spec.expert_layers[rank]) - (end - first)):
            block = layer(block)
        return x.at[:drafted].set(head(block))

    def call(x: jax.Array) -> jax.Array:
        def tick(carry: tuple[Any, jax.Array], _: jax.Array) -> tuple[tuple[Any, jax.Array], None]:
            item, x = carry
            item = jax.lax.ppermute(item, PIPE, hops)
            x = jax.lax.switch(jax.lax.axis_index(PIPE), [partial(stage, rank) for rank in range(ring.pipe)], x)
            return (item, x), None

        item = ring._idle_item()
        (item, x), _ = jax.lax.scan(tick, (item, x[0]), jnp.arange(LOOPS * ring.pipe))
        return x[None] + sum(leaf[0, 0].astype(x.dtype) for leaf in item.values())

    run = jax.jit(jax.shard_map(call, mesh=ring.mesh, in_specs=STATE, out_specs=STATE, check_vma=False))
    x = jnp.ones((ring.pipe, rows * spec.expert, c.hidden_size), spec.dtype)
    x = jax.device_put(x, jax.sharding.NamedSharding(ring.mesh, STATE))
    return median_us(lambda: run(x), LOOPS)
