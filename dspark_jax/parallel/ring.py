"""The ring: one program in which every pipeline rank works on another microbatch in every tick.

A tick, on every rank: take the item that the rank before has sent; run the own stage on it, with the state of the
item's microbatch; send the result on. The last rank finishes the round (sampling, commit, draft) and sends the first
one the microbatch's next item. With P ranks P microbatches are in flight, and P ticks are a round of each. One rank is
a ring of itself.

With a schedule the last rank also decides how many of the new drafts will be verified, and in which bucket of packed rows,
the smallest that holds those of the fullest expert rank. The item carries both, so all ranks run it in that bucket. Where the
schedule rests, the last rank passes its drafter over in the same tick, and the item carries lengths of 0.
"""

import dataclasses
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float32, Int

from dspark_jax.decode.item import Control, Item, Layout, Packing, idle_control, merge
from dspark_jax.decode.logprobs import no_logprobs
from dspark_jax.decode.round import advance, init_requests
from dspark_jax.decode.sampling import MAX_LOGPROBS
from dspark_jax.decode.schedule import Schedule, bucket_index, bucket_sizes, packed_rows
from dspark_jax.decode.state import Emission, Requests, decode_item
from dspark_jax.decode.verify import REJECTION, verify_faults
from dspark_jax.eplb.placement import Placement
from dspark_jax.errors import ConfigError, raise_all
from dspark_jax.models.moe import Routed
from dspark_jax.models.numerics import compiler_options
from dspark_jax.parallel.mesh import EXPERT, PIPE
from dspark_jax.parallel.parts import Stage
from dspark_jax.parallel.stacking import Stacked
from dspark_jax.parallel.stage import Pipeline, PipelineSpec

MAX_STOPS = 8


@dataclasses.dataclass(frozen=True)
class RingConfig:
    """Sizes of a ring, all static.

    Attributes:
      slots: request slots of one microbatch, over all expert ranks.
      max_len: most positions of a request, prompt included.
      chunk: prompt tokens of one tick and slot.
      rounds: rounds of one call.
      stops: most stop tokens of a request.
      logprobs: most alternatives a token in the emissions' log-probabilities; None leaves those out of the program.
      count_experts: count the rows of every logical expert in every tick; False leaves the counters out of the program.
      schedule: how many drafts are verified; None verifies whole blocks.
      buckets: with a schedule, the ascending numbers of packed rows that a decoding tick may have on one expert rank. All
        rows that there can be are always one more bucket. By default quarters of these.
      verify: how drafts are verified: REJECTION or COUPLED (`decode.verify`).
    """

    slots: int
    max_len: int
    chunk: int = 64
    rounds: int = 1
    stops: int = MAX_STOPS
    logprobs: int | None = None
    count_experts: bool = False
    schedule: Schedule | None = None
    buckets: tuple[int, ...] | None = None
    verify: str = REJECTION


@struct.dataclass
class RingState:
    """What stays on the devices between calls; every leaf is [pipe, expert * lanes, …], lanes by (microbatch, slot).

    Attributes:
      item: the packed item that each rank is about to send.
      caches: target and draft caches by key of `Ring.caches`.
      requests: of the last rank; the other ranks' are never read.
      generation: number of the request that each slot had last.
      stale: the schedule's history of the last rank (`Schedule.init`); None without one.
    """

    item: dict[str, jax.Array]
    caches: dict[str, jax.Array]
    requests: Requests
    generation: Int[Array, "P S"]
    stale: Float32[Array, "P S history gamma"] | None = None


class TickOutput(NamedTuple):
    """What a tick of one rank did; [pipe, ticks, …] out of a call.

    `emission` and `generation` count on the last rank; `rows` are the valid rows that the rank worked on, by slot.
    `expert_counts` are rows by logical expert, at the rank's layer positions (zeros behind them), one such block for each
    expert rank; None unless they are counted. Draft stages count where requests draft. `bucket` is the number of rows that the
    rank's branch has, the same for all slots; None without a schedule.
    """

    emission: Emission
    generation: Int[Array, "R"]
    rows: Int[Array, "R"]
    expert_counts: Int[Array, "positions E"] | None = None
    bucket: Int[Array, "R"] | None = None


class Ring:
    """The compiled ring of a model on a mesh.

    Args:
      spec: the model's stages.
      params: the whole model's parameters (`nnx.split(SpeculativeLM)[1]`) or their shapes.
      mesh: from `make_mesh`, with as many pipe ranks as `spec` has ranges.
      sizes: of the program.

    Raises ConfigError that names every contradiction.
    """

    def __init__(self, spec: PipelineSpec, params: nnx.State, mesh: Mesh, sizes: RingConfig):
        raise_all(ConfigError, "ring", list(_faults(spec, mesh, sizes)))
        self.spec, self.mesh, self.sizes = spec, mesh, sizes
        self.pipeline = Pipeline(spec, params)
        self.pipe, self.gamma = spec.pipe, spec.gamma
        self.width = max(sizes.chunk, self.gamma + 1)
        self.local_slots = sizes.slots // spec.expert  # of one microbatch on one device
        # A decoding round, and a round in which some slot takes a chunk of its prompt; in front, smaller decoding rounds.
        self.buckets = bucket_sizes(self.local_slots, self.gamma, sizes.buckets) if sizes.schedule else ()
        widths = sorted({self.gamma + 1, self.width})
        self.layouts = (*(Layout(self.gamma + 1, n) for n in self.buckets[:-1]), *map(Layout, widths))
        self.lanes = self.pipe * self.local_slots
        self.caches = self._cache_layout()

    @cached_property
    def item_bytes(self) -> int:
        """Bytes that one device sends in one tick."""
        return sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in jax.eval_shape(self._idle_item).values())

    # -- state ---------------------------------------------------------------------------------------------------------

    def _stage(self, leaves: dict[str, Any], rank: int) -> Stage:
        return self.pipeline.stage(leaves, rank)

    def _drafter(self, stage: Stage) -> Any:
        """What drafts on the last rank, None on the others; measurements put theirs around it."""
        return stage.drafter

    def _rank_caches(self, rank: int) -> tuple[Any, Any]:
        """The empty caches of one device of `rank`."""
        stage = self._stage(self.pipeline.params.shapes, rank)
        drafter = self._drafter(stage)
        target = stage.init_cache(self.lanes, self.sizes.max_len, self.gamma + 1)
        return target, (drafter.init_cache(self.lanes, self.sizes.max_len) if drafter else ())

    def _cache_layout(self) -> Stacked:
        return Stacked([jax.eval_shape(partial(self._rank_caches, rank)) for rank in range(self.pipe)])

    def _idle_item(self) -> dict[str, jax.Array]:
        return self._packing.pack(self._empty_item())

    def _empty_item(self) -> Item:
        r, c = self.local_slots, self.spec.config
        control = jax.tree.map(jnp.asarray, idle_control(r, self.width, self.sizes.stops))
        return Item(
            control=control,
            verify=jnp.zeros((r,), jnp.int32),
            streams=jnp.zeros((r, self.width, c.hc_mult * c.hidden_size), self.spec.dtype),
            context=jnp.zeros((r, self.width, self.spec.context_width), jnp.float32),
        )

    @cached_property
    def _packing(self) -> Packing:
        return Packing.of(jax.eval_shape(self._empty_item))

    def init_state(self) -> RingState:
        """Idle slots and empty items, placed on the mesh."""

        def init() -> RingState:
            caches = {k: jnp.zeros(x.shape, x.dtype) for k, x in self.caches.shapes.items()}
            requests = init_requests(self.lanes, self.gamma, self.spec.config.vocab_size, self.sizes.stops)
            stale = self.sizes.schedule.init(self.lanes, self.gamma) if self.sizes.schedule else None
            state = RingState(self._idle_item(), caches, requests, jnp.zeros((self.lanes,), jnp.int32), stale)
            return jax.tree.map(lambda x: x[None], state)

        return jax.jit(jax.shard_map(init, mesh=self.mesh, in_specs=(), out_specs=STATE, check_vma=False))()

    def idle_control(self) -> Control:
        """A record without work for every microbatch: leaves [pipe, slots, …] (numpy)."""
        one = idle_control(self.sizes.slots, self.width, self.sizes.stops)
        return jax.tree.map(lambda x: np.stack([x] * self.pipe), one)

    def place_control(self, control: Control) -> Control:
        """The record on the mesh: the same on all pipe ranks, slots split over the expert ranks."""
        sharding = NamedSharding(self.mesh, RECORD)
        return jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, sharding, lambda i, x=x: x[i]), control)

    # -- program -------------------------------------------------------------------------------------------------------

    @cached_property
    def step(self):
        """(params, state, control) -> (state, TickOutput [pipe, ticks, slots, …]): one call; the state is donated."""
        mapped = jax.shard_map(
            self._call,
            mesh=self.mesh,
            in_specs=(self.pipeline.specs, STATE, RECORD),
            out_specs=(STATE, PartitionSpec(PIPE, None, EXPERT)),
            check_vma=False,
        )
        return jax.jit(mapped, donate_argnums=1, compiler_options=compiler_options(self.spec.config))

    def _call(self, params: dict[str, jax.Array], state: RingState, control: Control) -> tuple[RingState, TickOutput]:
        params, state = jax.tree.map(lambda x: x[0], (params, state))
        rank = jax.lax.axis_index(PIPE)
        ring = [(i, (i + 1) % self.pipe) for i in range(self.pipe)]
        branches = [partial(self._run_stage, rank, layout) for rank in range(self.pipe) for layout in self.layouts]
        idle = jax.tree.map(lambda x: jnp.zeros_like(x[0]), control)

        def tick(state: RingState, t: jax.Array) -> tuple[RingState, TickOutput]:
            item = self._packing.unpack(jax.lax.ppermute(state.item, PIPE, ring))
            # The record of a microbatch is merged when its item passes the first rank in the first round of the call.
            record = jax.tree.map(lambda x, none: jnp.where(t < self.pipe, x[t % self.pipe], none), control, idle)
            if self.buckets:  # the last rank has chosen one of these; the host only says where a chunk is
                chosen = jnp.where(record.bucket > 0, len(self.buckets), item.control.bucket)
                record = dataclasses.replace(record, bucket=chosen)
            item = merge(item, record, rank == 0)
            microbatch = (t - rank) % self.pipe
            branch = rank * len(self.layouts) + jnp.minimum(item.control.bucket[0], len(self.layouts) - 1)
            item, caches, *rest, output = jax.lax.switch(
                branch, branches, params, item, state.caches, state.requests, state.generation, state.stale, microbatch
            )
            return RingState(self._packing.pack(item), caches, *rest), output

        state, outputs = jax.lax.scan(tick, state, jnp.arange(self.sizes.rounds * self.pipe))
        return jax.tree.map(lambda x: x[None], (state, outputs))

    def _run_stage(self, rank, layout: Layout, params, item: Item, caches, requests: Requests, generation, stale, microbatch):
        """One tick of `rank` over rows in this layout, with the microbatch's lanes of caches and requests."""
        stage, r = self._stage(params, rank), self.local_slots
        target_cache, draft_cache = self.caches.take(caches, rank)
        work = item.work(layout.width)
        # The only microbatch has all lanes in order, and attention then reads keys and values where they lie.
        rows = layout.rows(work, microbatch * r + jnp.arange(r) if self.pipe > 1 else None)
        if rank == 0:
            streams = stage.embed_streams(rows.token)
            context = jnp.zeros((layout.size(r), item.context.shape[-1]), jnp.float32)
        else:
            c = self.spec.config
            streams = layout.take(item.streams, c.hc_mult, c.hidden_size)
            context = layout.take(item.context, item.context.shape[-1])
        streams, context, target_cache, choices = stage.forward(rows, streams, context, target_cache)
        emission, number = _no_emission(r, self.gamma, self.sizes), jnp.zeros((r,), jnp.int32)
        if rank < self.pipe - 1:
            streams, context = layout.put(item.streams, streams), layout.put(item.context, context)
            sent = dataclasses.replace(item, streams=streams, context=context)
        else:
            view = partial(_view, start=microbatch * r, size=r)
            # The drafter's state is small: it works on the microbatch's part, where slot r has lane r.
            own, number, history, drafts = jax.tree.map(view, (requests, generation, stale, draft_cache))
            rows = dataclasses.replace(rows, lane=None)
            own, number, history = _begin(own, number, history, item.control)
            drafter = self._drafter(stage)
            own, drafts, history, emission = advance(
                stage, drafter, own, drafts, history, work, rows, stage.hidden(streams), context, self.sizes.max_len,
                self.sizes.logprobs, self.sizes.schedule, EXPERT, self.sizes.verify,
            )  # fmt: skip
            choices += drafter.choices if drafter else ()
            sent = self._next_item(item, own)
            back = partial(_put, start=microbatch * r)
            requests, generation, stale, draft_cache = jax.tree.map(
                back, (requests, generation, stale, draft_cache), (own, number, history, drafts)
            )
        counts = self._count(choices) if self.sizes.count_experts else None
        bucket = jnp.full((r,), layout.size(r), jnp.int32) if self.buckets else None
        output = TickOutput(emission, number, work.count, counts, bucket)
        caches = self.caches.put(caches, rank, (target_cache, draft_cache))
        return sent, caches, requests, generation, stale, output

    def _count(self, choices: tuple[Routed, ...]) -> Int[Array, "positions E"]:
        """Rows by expert at this rank's positions, filled up to the most that a rank has."""
        counts = jnp.stack([choice.load() for choice in choices]).astype(jnp.int32)
        most = max(map(len, self.spec.expert_layers))
        return jnp.pad(counts, ((0, most - len(choices)), (0, 0)))

    def _next_item(self, item: Item, requests: Requests) -> Item:
        """The microbatch's next item: the anchors and drafts of the running slots."""
        work = decode_item(requests, self.gamma)
        token = jnp.pad(work.token, ((0, 0), (0, self.width - self.gamma - 1)))
        no, bucket = jnp.zeros_like(work.final), jnp.zeros_like(item.control.bucket)
        if self.buckets:
            bucket += bucket_index(packed_rows(requests.active, work.verify, EXPERT), self.buckets)
        control = dataclasses.replace(
            item.control,
            admit=no, fresh=no, abort=no, token=token, start=work.start, count=work.count, final=work.final,
            bucket=bucket,
        )  # fmt: skip
        return dataclasses.replace(item, control=control, verify=work.verify)


STATE = PartitionSpec(PIPE, EXPERT)
RECORD = PartitionSpec(None, EXPERT)


def _faults(spec: PipelineSpec, mesh: Mesh, sizes: RingConfig):
    if dict(mesh.shape) != {PIPE: spec.pipe, EXPERT: spec.expert}:
        yield f"the mesh is {dict(mesh.shape)}; the stages need {PIPE} = {spec.pipe} and {EXPERT} = {spec.expert}"
    if sizes.slots < 1 or sizes.slots % spec.expert:
        yield f"slots is {sizes.slots}; expected a positive multiple of the expert axis, {spec.expert}"
    if not spec.config.n_routed_experts:
        yield from _dense_faults(spec, sizes)
    elif spec.placement is not None:
        yield from _placement_faults(spec, spec.placement)
    elif spec.config.n_routed_experts % spec.expert:
        yield f"{EXPERT} is {spec.expert}; expected a divisor of the model's {spec.config.n_routed_experts} routed experts"
    if not 2 <= sizes.max_len <= spec.config.max_position_embeddings:
        yield f"max_len is {sizes.max_len}; expected 2 … {spec.config.max_position_embeddings}"
    for name in ("chunk", "rounds", "stops"):
        if getattr(sizes, name) < 1:
            yield f"{name} is {getattr(sizes, name)}; expected at least 1"
    yield from _bucket_faults(spec, sizes)
    yield from verify_faults(sizes.verify)
    most = min(MAX_LOGPROBS, spec.config.vocab_size)
    if sizes.logprobs is not None and not 0 <= sizes.logprobs <= most:
        yield f"logprobs is {sizes.logprobs}; expected None (off) or 0 … {most}"


def _bucket_faults(spec: PipelineSpec, sizes: RingConfig):
    if sizes.schedule is not None and spec.draft is None:
        yield "schedule is given, but there is no drafter whose drafts it could count; expected None"
    buckets = sizes.buckets or ()
    if sizes.buckets is not None and sizes.schedule is None:
        yield f"buckets is {sizes.buckets}; expected None without a schedule: whole blocks have one size"
    if any(n < 1 for n in buckets) or any(a >= b for a, b in zip(buckets, buckets[1:], strict=False)):
        yield f"buckets is {buckets}; expected ascending numbers of rows from 1 on"
    if spec.draft is not None and sizes.slots > 0:
        slots = sizes.slots // spec.expert
        whole = slots * (spec.gamma + 1)
        large = [n for n in buckets if n > whole]
        if large:
            yield (
                f"buckets has {', '.join(map(str, large))}; expected at most {whole}, the rows of {slots} whole blocks on an"
                " expert rank"
            )


def _dense_faults(spec: PipelineSpec, sizes: RingConfig):
    if spec.placement is not None:
        yield "a placement is given, and a dense model has no experts to place; leave it out"
    if sizes.count_experts:
        yield "count_experts is on, and a dense model has no experts whose rows could be counted; leave it out"


def _placement_faults(spec: PipelineSpec, placement: Placement):
    layers, experts = sum(map(len, spec.expert_layers)), spec.config.n_routed_experts
    expected = {"num_layers": layers, "num_experts": experts, "expert_ranks": spec.expert}
    for name, value in expected.items():
        if getattr(placement, name) != value:
            yield f"the placement's {name} is {getattr(placement, name)}; the stages need {value}"


def _begin(
    requests: Requests, generation: jax.Array, stale: jax.Array | None, control: Control
) -> tuple[Requests, jax.Array, Any]:
    """Requests, their numbers and a schedule's history, whose slots have forgotten what fresh and aborted slots held."""
    fresh = control.fresh

    def pick(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(fresh.reshape(-1, *[1] * (old.ndim - 1)), new, old)

    zero = jnp.zeros_like(requests.length)
    begun = dataclasses.replace(
        requests,
        length=pick(zero, requests.length),
        emitted=pick(zero, requests.emitted),
        num_drafts=pick(zero, requests.num_drafts),
        active=requests.active & ~fresh & ~control.abort,
        max_tokens=pick(control.max_tokens, requests.max_tokens),
        stop=pick(control.stop, requests.stop),
        sampling=jax.tree.map(pick, control.sampling, requests.sampling),
    )
    history = None if stale is None else pick(jnp.ones_like(stale), stale)
    return begun, pick(control.generation, generation), history


def _no_emission(slots: int, gamma: int, sizes: RingConfig) -> Emission:
    zero = jnp.zeros((slots,), jnp.int32)
    none = no_logprobs(slots, gamma + 1, sizes.logprobs)
    rested = zero if sizes.schedule and sizes.schedule.rests else None
    return Emission(jnp.zeros((slots, gamma + 1), jnp.int32), zero, zero, zero, zero, none, rested)


def _view(x: jax.Array, start: jax.Array, size: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, start, size)


def _put(x: jax.Array, part: jax.Array, start: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(x, part, start, 0)
