"""Programs of `bench.stage_times`: one pipeline rank's tick, or the routed experts, on one device with random weights."""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, PartitionSpec

from dspark_jax.checkpoint.layout import entries, skeleton
from dspark_jax.config import DraftConfig, TargetConfig
from dspark_jax.decode.item import Item
from dspark_jax.decode.round import init_requests
from dspark_jax.parallel.mesh import EXPERT, PIPE, make_mesh
from dspark_jax.parallel.planner import StagePlan, given_stages, plan_stages
from dspark_jax.parallel.ring import Ring, RingConfig
from dspark_jax.parallel.stage import PipelineSpec, Ranges
from dspark_jax.parallel.stage_cost import CostModel, Workload
from dspark_kernels.expert_mlp import expert_mlp

GROUPS, RUNS = 10, 2  # so many groups, after one that only warms up, each the mean of so many runs
_FRONT = 2  # layers in front of the alternating ones in the published models

Shapes = dict[str, jax.ShapeDtypeStruct]


def scaled(config: TargetConfig, draft: DraftConfig, layers: int) -> tuple[TargetConfig, DraftConfig]:
    """The model with `layers` layers; its front, hash and draft layers in proportion, at least one of each that it has."""
    whole = config.num_hidden_layers

    def few(count: int) -> int:
        return min(count, max(1, round(count * layers / whole)))

    front = few(_FRONT)
    target = replace(
        config,
        num_hidden_layers=layers,
        compress_ratios=(*config.compress_ratios[:front], *config.compress_ratios[_FRONT : _FRONT + layers - front]),
        num_hash_layers=few(config.num_hash_layers),
    )
    taps = tuple(range(max(layers - len(draft.target_layer_ids), 0), layers))
    return target, replace(draft, num_stages=few(draft.num_stages), target_layer_ids=taps)


@dataclass(frozen=True)
class Setting:
    """A model and the tick that is timed: `requests` a microbatch, each with a whole block at the end of `context`."""

    config: TargetConfig
    draft: DraftConfig
    requests: int
    context: int
    dtype: str = "bfloat16"

    @property
    def rows(self) -> int:
        """Target rows of the tick."""
        return self.requests * (self.draft.block_size + 1)

    @property
    def load(self) -> Workload:
        return Workload(self.rows, self.context, chunk=1, dtype=self.dtype)

    def plan(self, cut: int | Ranges, costs: CostModel) -> StagePlan:
        """The planner's cut for a number of ranks, or the given one."""
        sizes: dict[str, Any] = {"rows": self.rows, "context": self.context, "chunk": 1, "dtype": self.dtype}
        make: Any = plan_stages if isinstance(cut, int) else given_stages
        return make(self.config, self.draft, cut, **sizes, costs=costs)

    def seconds(self, ranges: Ranges, rank: int, costs: CostModel) -> float:
        """Predicted for one rank of a cut, as a plan has it."""
        first, end = ranges[rank]
        total = math.fsum(costs.layer(self.config, self.draft, i, self.load) for i in range(first, end))
        if rank < len(ranges) - 1:
            return total
        return total + costs.head(self.config, self.draft, self.load) + costs.drafter(self.config, self.draft, self.load)


@cache
def _ring(setting: Setting, ranges: Ranges) -> Ring:
    """The ring's code for a mesh that need not exist here."""
    config, draft, dtype = setting.config, setting.draft, setting.dtype
    spec = PipelineSpec(config, draft, ranges, 1, jnp.dtype(dtype))
    shapes = stored(skeleton(config, draft, dtype=dtype, axis=EXPERT)[1], dtype)
    mesh: Any = AbstractMesh((len(ranges), 1), (PIPE, EXPERT))
    return Ring(spec, shapes, mesh, RingConfig(setting.requests, setting.context, chunk=1))


def stored(params: nnx.State, dtype: str) -> nnx.State:
    """Shapes with the types in which a loaded checkpoint has them."""
    types = {"weight": dtype, "fp32": "float32", "int": "int32"}  # codes and their scales are kept as they are
    old = {path: variable.get_value() for path, variable in nnx.to_flat_state(params)}
    new = {e.path: jax.ShapeDtypeStruct(old[e.path].shape, types.get(e.dtype, old[e.path].dtype)) for e in entries(params)}
    nnx.replace_by_pure_dict(params, nnx.traversals.unflatten_mapping(new))
    return params


class Weighted(Protocol):
    """What has random weights.

    Attributes:
      params: shapes of the weights by key.
      experts: what integers among them count to.
    """

    params: Shapes
    experts: int


class Program(Weighted, Protocol):
    """What is compiled ahead of its weights and then timed.

    Attributes:
      temporaries: bytes beside arguments and results; after `compile`.
    """

    temporaries: int

    def compile(self) -> float:
        """Returns the seconds it took."""
        ...

    def start(self, params: dict[str, jax.Array]) -> Callable[[], Any]:
        """A function that runs the program once more and returns floats which depend on the run."""
        ...


class Stage:
    """One rank's tick. What it has of other ranks' input is random."""

    def __init__(self, setting: Setting, ranges: Ranges, rank: int):
        self.setting, self.rank, self.experts, self.temporaries = setting, rank, setting.config.n_routed_experts, 0
        self.ring = ring = _ring(setting, ranges)
        shapes = ring.pipeline.params.shapes
        self.params = {key: shapes[key] for key in ring.pipeline.params.paths[rank]}
        self.caches = {key: ring.caches.shapes[key] for key in ring.caches.paths[rank]}

    @cached_property
    def _tick(self) -> Any:
        whole = PartitionSpec()
        mapped = jax.shard_map(
            partial(self.ring._run_stage, self.rank, self.ring.layouts[0]),
            mesh=make_mesh(), in_specs=(whole,) * 7, out_specs=(whole,) * 6, check_vma=False,
        )  # fmt: skip
        return jax.jit(mapped, donate_argnums=(2, 3, 4))

    def compile(self) -> float:
        begin = time.perf_counter()
        arguments = jax.eval_shape(lambda: (self._item(), *self._state()))
        self.run = self._tick.lower(self.params, *arguments, jnp.int32(0)).compile()
        self.temporaries = _temporaries(self.run)
        return time.perf_counter() - begin

    def start(self, params: dict[str, jax.Array]) -> Callable[[], Any]:
        item, state, first = self._item(), self._state(), jnp.int32(0)

        def once() -> Any:
            nonlocal state
            sent, *new, _ = self.run(params, item, *state, first)
            state = tuple(new)
            return sent.streams, new[1].confidence + 0  # the requests themselves are donated to the next run

        return once

    def _state(self) -> tuple[Any, Any, Any, None]:
        """Empty caches, idle requests and their numbers; no schedule."""
        ring = self.ring
        caches = {key: jnp.zeros(x.shape, x.dtype) for key, x in self.caches.items()}
        # Donated: no two leaves may share a buffer.
        requests = init_requests(ring.lanes, ring.gamma, self.setting.config.vocab_size, ring.sizes.stops)
        return caches, jax.tree.map(jnp.copy, requests), jnp.zeros((ring.lanes,), jnp.int32), None

    def _item(self) -> Item:
        """New requests in every run, each a block of random tokens at the end of the context, and random streams."""
        s, gamma, rng = self.setting, self.ring.gamma, np.random.default_rng(0)
        empty, slots = self.ring._empty_item(), np.ones(s.requests, np.int32)
        control = replace(
            empty.control,
            token=jnp.asarray(rng.integers(0, s.config.vocab_size, empty.control.token.shape), jnp.int32),
            start=jnp.asarray(slots * (s.context - 2 * (gamma + 1))),
            count=jnp.asarray(slots * (gamma + 1)),
            final=jnp.asarray(slots > 0),
            fresh=jnp.asarray(slots > 0),
            max_tokens=jnp.asarray(slots * s.context),
        )
        streams = jax.random.normal(jax.random.key(0), empty.streams.shape, empty.streams.dtype)
        return replace(empty, control=control, streams=streams, verify=jnp.asarray(slots * gamma))


class Experts:
    """The routed experts of one layer alone."""

    def __init__(self, setting: Setting):
        c, dtype = setting.config, jnp.dtype(setting.dtype)
        self.setting, self.experts, self.temporaries = setting, c.n_routed_experts, 0
        wide, narrow = (c.hidden_size, c.moe_intermediate_size), (c.moe_intermediate_size, c.hidden_size)
        shapes = {"w1": wide, "w3": wide, "w2": narrow}
        self.params = {key: jax.ShapeDtypeStruct((c.n_routed_experts, *shape), dtype) for key, shape in shapes.items()}

    def compile(self) -> float:
        begin, limit = time.perf_counter(), self.setting.config.swiglu_limit

        def call(p: dict[str, jax.Array], x: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
            return expert_mlp(x, ids, weights, p["w1"], p["w3"], p["w2"], limit=limit)

        self.run = jax.jit(call).lower(self.params, *jax.eval_shape(self._rows)).compile()
        self.temporaries = _temporaries(self.run)
        return time.perf_counter() - begin

    def start(self, params: dict[str, jax.Array]) -> Callable[[], Any]:
        rows = self._rows()
        return lambda: self.run(params, *rows)

    def _rows(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        s, c, rng = self.setting, self.setting.config, np.random.default_rng(0)
        chosen = rng.random((s.rows, c.n_routed_experts)).argsort(axis=1)[:, : c.num_experts_per_tok]
        x = jax.random.normal(jax.random.key(0), (s.rows, c.hidden_size), jnp.dtype(s.dtype))
        return x, jnp.asarray(chosen, jnp.int32), jnp.full(chosen.shape, 1 / c.num_experts_per_tok, jnp.float32)


def _temporaries(compiled: Any) -> int:
    analysis = compiled.memory_analysis()
    return analysis.temp_size_in_bytes if analysis else 0


def measure(program: Program) -> tuple[list[float], bool]:
    """Seconds of a run, the mean of each group after the first, and whether what it computed is finite.

    The program's weights exist only in here.
    """
    params = make_weights(program.params, program.experts)
    jax.block_until_ready(params)
    once, found, out = program.start(params), [], None
    for group in range(GROUPS + 1):
        begin = time.perf_counter()
        for _ in range(RUNS):
            out = once()
        jax.block_until_ready(out)
        if group:
            found.append((time.perf_counter() - begin) / RUNS)
    finite = all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(out))
    for array in params.values():
        array.delete()
    return found, finite


def make_weights(shapes: Shapes, experts: int) -> dict[str, jax.Array]:
    """Random weights on the device, by key."""
    return {key: _maker(*_made(key, x, experts))(jnp.int32(i)) for i, (key, x) in enumerate(shapes.items())}


def makers(programs: Iterable[Weighted]) -> list[Callable[[], Any]]:
    """What compiles all that `make_weights` needs for these programs, each call one shape."""
    distinct = {_made(key, x, p.experts) for p in programs for key, x in p.params.items()}
    return [partial(_maker, *made) for made in sorted(distinct, key=str)]


def _made(key: str, x: jax.ShapeDtypeStruct, experts: int) -> tuple[tuple[int, ...], Any, tuple[int, int]]:
    """Shape, type, and the range of integers: experts by token id, codes of any bits, or scales of codes."""
    if x.dtype != jnp.uint8:
        return x.shape, x.dtype, (0, experts)
    return x.shape, x.dtype, (118, 121) if "scale" in key else (0, 256)  # ue8m0: 2^-9 … 2^-7


@cache
def _maker(shape: tuple[int, ...], dtype: Any, integers: tuple[int, int]) -> Any:
    """The compiled function from a seed to a leaf."""
    return jax.jit(partial(_leaf, shape, dtype, integers)).lower(jax.ShapeDtypeStruct((), jnp.int32)).compile()


def _leaf(shape: tuple[int, ...], dtype: Any, integers: tuple[int, int], seed: jax.Array) -> jax.Array:
    key = jax.random.key(seed)
    if dtype == jnp.uint8:
        one = jax.random.randint(key, shape[-2:], *integers).astype(dtype)
        return jnp.broadcast_to(one, shape)
    if jnp.issubdtype(dtype, jnp.integer):
        return jax.random.randint(key, shape, *integers, dtype)
    if len(shape) < 2:
        return jnp.ones(shape, dtype)
    if jnp.dtype(dtype).itemsize == 1:  # fp8 codes, whose scales make them small
        return jnp.broadcast_to(jax.random.normal(key, shape[-2:]).astype(dtype), shape)
    matrix = jax.random.normal(key, shape[-2:], dtype) / math.sqrt(shape[-2])
    return jax.random.uniform(key, (*shape[:-2], 1, 1), dtype, 0.5, 1.0) * matrix
