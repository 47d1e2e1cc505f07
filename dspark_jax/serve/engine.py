"""The serving engine: requests come and go at any time, and every rank of the mesh works in every tick."""

import atexit
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from dspark_jax.api import LM
from dspark_jax.checkpoint.reader import Weights
from dspark_jax.config import DraftConfig, Numerics
from dspark_jax.config_dense import DenseConfig
from dspark_jax.decode.item import Control
from dspark_jax.decode.profile_table import Fingerprint
from dspark_jax.decode.sampling import SamplingParams
from dspark_jax.decode.schedule_source import SchedulerOption, fingerprint_of, schedule_source
from dspark_jax.decode.verify import REJECTION
from dspark_jax.eplb.namespace import ExpertLayers
from dspark_jax.eplb.placement import Placement
from dspark_jax.eplb.relayout import relayout
from dspark_jax.eplb.validation import PlacementSource, resolve_placement
from dspark_jax.errors import ConfigError, RequestError, memory_for
from dspark_jax.parallel.mesh import checked_mesh
from dspark_jax.parallel.profile import StepTimes, measure_steps
from dspark_jax.parallel.ring import Ring, TickOutput
from dspark_jax.parallel.stage import Ranges
from dspark_jax.parallel.stage_memory import stage_memory
from dspark_jax.requests import Params, Prompt, RequestReader
from dspark_jax.results import Completion, RoundOutput, Tally
from dspark_jax.serve.build import build
from dspark_jax.serve.entry import Entry
from dspark_jax.serve.model import NO_EXPERTS
from dspark_jax.serve.processes import Processes, spans_processes
from dspark_jax.serve.scheduler import Commit, Scheduler
from dspark_jax.serve.ticks import Tick, read_output
from dspark_jax.text import TextStream, as_tokenizer

TIMELINE = 10_000  # ticks that are remembered


class Engine:
    """Continuous batching with speculative decoding on a mesh.

    Requests are decoded in `slots` places, more of them wait in order. Prompts are read in chunks while others decode.
    Every method may be called from any thread; the device's work is done by whoever calls `step`, `stream` or
    `generate`.

    On a mesh of several processes (`parallel.distributed`) every process makes the engine, with the same arguments.
    Requests enter at process 0; the others call `follow`, which returns when process 0 calls `close` or leaves its
    `with` block.

    Args:
      model: a shipped model's name, a checkpoint folder, a GGUF file, or an `LM` (its weights are laid out anew for the mesh).
      mesh: from `make_mesh`; one device by default.
      stages: layers of every pipe rank: half-open ranges, "0-20,21-42" or "21,22"; by default the planner's
        (`parallel.planner`), for full batches at `max_len`.
      slots: requests decoded side by side, a multiple of pipe × expert; 8 of them for every one of those by default.
      dtype: of weights and activations; float32 on a CPU and bfloat16 elsewhere by default.
      weights, numerics: what devices hold of an fp8 or fp4 checkpoint, and how activations are rounded, as for `load`; an `LM`
        has chosen already.
      max_len: most positions of a request, prompt included; by default the model's, at most 4096.
      chunk: prompt tokens of one tick and slot.
      rounds_per_call: rounds of one device call; more hide the host's work and let new requests wait longer.
      speculate: False leaves the drafter out: plain decoding.
      drafter, draft_tokens: a dense model's drafter and the drafts of a round, as for `load`; an `LM` has its own.
      max_logprobs: the largest `SamplingParams.logprobs` of a request, at most 20. By default no request may ask for
        log-probabilities, and the compiled program does not compute them.
      placement: slots of the experts: a load-balancer file, its content as a mapping, or a `Placement`; see
        docs/expert_placement.md. Ignored, with a warning, where the mesh has one expert rank.
      count_experts: first iteration whose rows are counted by expert, and the first that is not any more (`expert_counter`,
        `eplb.collect`). By default the compiled program has no counter.
      scheduler, profile, temperatures, unsigned: how many drafts are verified, see `schedule_source` and
        docs/scheduling.md; whole blocks by default. profile="measure": `warmup` measures step times itself (`measure_steps`)
        with a program that is not used again, so it compiles two rings and takes about twice as long.
      buckets: with a scheduler, packed rows on an expert rank that a decoding tick may have (`RingConfig.buckets`); by default
        those of `profile`, or quarters.
      verify: how drafts are verified, "rejection" or "coupled", as for `load`; an `LM` given as `model` does not decide it.

    Raises CheckpointError or ConfigError before any device work; a value in the weights that is no number is found when the
    weights are placed.
    """

    def __init__(
        self,
        model: str | Path | LM,
        *,
        mesh: Mesh | None = None,
        stages: str | Ranges | None = None,
        slots: int | None = None,
        dtype: jax.typing.DTypeLike | None = None,
        weights: Weights = "dequantised",
        numerics: Numerics = "default",
        max_len: int | None = None,
        chunk: int = 64,
        rounds_per_call: int = 1,
        speculate: bool = True,
        drafter: str | Path | None = None,
        draft_tokens: int | None = None,
        max_logprobs: int | None = None,
        placement: PlacementSource | None = None,
        count_experts: tuple[int, int] | None = None,
        scheduler: SchedulerOption | None = None,
        profile: str | Path | None = None,
        temperatures: str | Path | None = None,
        unsigned: bool = False,
        buckets: Sequence[int] | None = None,
        verify: str = REJECTION,
    ):
        mesh = checked_mesh(mesh)
        built = build(
            model, mesh, stages=stages, slots=slots, dtype=dtype, weights=weights, numerics=numerics, max_len=max_len,
            chunk=chunk, rounds_per_call=rounds_per_call, speculate=speculate, drafter=drafter, draft_tokens=draft_tokens,
            max_logprobs=max_logprobs, placement=placement, count_experts=count_experts,
            scheduler=schedule_source(scheduler, profile, temperatures, unsigned, measurable=not spans_processes(mesh)),
            buckets=buckets, verify=verify,
        )  # fmt: skip
        self.ring, self.plan, self._schedule, self.expert_counter = built.ring, built.plan, built.schedule, built.counter
        spec, sizes, config = built.ring.spec, built.ring.sizes, built.model.config
        self.slots, self.max_len, self.chat = sizes.slots * spec.pipe, sizes.max_len, built.model.chat
        tokenizer, params = built.model.tokenizer, built.model.params
        self.mesh, self.config, self.draft_config, self.tokenizer = mesh, config, spec.draft, as_tokenizer(tokenizer)
        self.gamma = spec.gamma
        self._processes = Processes(self.ring) if spans_processes(mesh) else None
        self._owes_stop = False
        with memory_for("placing the weights"):
            self._params = self.ring.pipeline.place(params, mesh)
        self._reader = RequestReader(config, self.tokenizer, self.max_len, max_logprobs)
        self._scheduler = Scheduler(spec.pipe, sizes.slots, spec.expert, chunk)
        self._entries: dict[Hashable, Entry] = {}
        self._numbers = itertools.count()
        self._pending: deque[TickOutput] = deque()
        self._state: Any = None
        self._step: Any = None
        self._lock = threading.RLock()
        self.timeline: deque[Tick] = deque(maxlen=TIMELINE)
        self.step_times: StepTimes | None = None  # what `warmup` has measured, with profile="measure"
        self._owe_stop()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- requests ------------------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: Hashable | None = None,
        ignore_eos: bool = False,
    ) -> Hashable:
        """Queues a request and returns its id, by default a number not in use. Raises RequestError that names every fault."""
        self._check_process()
        request = self._reader.read([prompt], params, ignore_eos)[0]
        with self._lock:
            index = next(self._numbers)
            while request_id is None and index in self._entries:  # a caller has chosen that number as an id
                index = next(self._numbers)
            key = index if request_id is None else request_id
            if key in self._entries:
                raise RequestError(f"request_id {key!r} is in use; choose another, or read that request to its end first")
            tally = Tally(self.gamma, request.params.logprobs is not None)
            self._entries[key] = Entry(index, prompt, request.prompt, tally, TextStream(self.decode), time.perf_counter())
            self._scheduler.submit(key, request)
        return key

    def abort(self, request_id: Hashable) -> None:
        """Ends a request; its stream ends with finish_reason "abort". Nothing happens if it has ended already.

        Raises RequestError for an unknown id.
        """
        with self._lock:
            entry = self._entry(request_id)
            if entry.finish_reason is None:
                self._scheduler.abort(request_id)
                entry.abort(request_id)

    def stream(self, request_id: Hashable) -> Iterator[RoundOutput]:
        """What every round commits to a request, as it arrives; runs the device while it waits.

        The request is forgotten at the end; a stream that is closed before aborts it.
        """
        return self._outputs(request_id, self._entry(request_id))

    def _outputs(self, request_id: Hashable, entry: Entry) -> Iterator[RoundOutput]:
        try:
            output = None
            while output is None or output.finish_reason is None:
                with self._lock:
                    if not entry.outputs:
                        self.step()
                if entry.outputs:
                    output = entry.outputs.popleft()
                    yield output
        finally:
            if request_id in self._entries:
                self.abort(request_id)
                del self._entries[request_id]

    def result(self, request_id: Hashable) -> Completion:
        """The whole answer to a request, which is then forgotten; runs the device until it has ended."""
        entry = self._entry(request_id)
        for _ in self.stream(request_id):
            pass
        return entry.completion(self.decode)

    def generate(
        self, prompts: Sequence[Prompt], params: Params = None, *, ignore_eos: bool = False
    ) -> list[Completion]:
        """Answers every prompt; arguments and errors as for `LM.generate`."""
        self._check_process()
        requests = self._reader.read(prompts, params, ignore_eos)
        keys = [
            self.submit(prompt, request.params, request_id=object(), ignore_eos=ignore_eos)
            for prompt, request in zip(prompts, requests, strict=True)
        ]
        return [self.result(key) for key in keys]

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt, the beginning-of-sequence token first."""
        return self._reader.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; special tokens have none, incomplete characters become U+FFFD."""
        return self.tokenizer.decode([int(i) for i in ids])

    @property
    def placement(self) -> Placement | None:
        """Where the experts are; None: each once, in order."""
        return self.ring.spec.placement

    def set_placement(self, placement: PlacementSource | None) -> None:
        """Moves the experts; the checkpoint is not read, and running requests go on with the same tokens.

        A program is compiled for the new placement, then expert weights are copied from device to device, leaf by leaf
        (`eplb.relayout`). The caches do not depend on where experts are. If a device runs out of memory during the copy,
        the engine is lost.

        Args:
          placement: as for `Engine`; None: each expert once, in order.

        Raises ConfigError, before anything has changed, if it does not fit, or if the mesh spans processes.
        """
        if self._processes is not None:
            raise ConfigError("set_placement works in one process; give the placement to Engine in every process instead")
        spec, sizes = self.ring.spec, self.ring.sizes
        if isinstance(spec.config, DenseConfig):
            raise ConfigError(f"set_placement: the model {NO_EXPERTS}")
        stages = spec.draft if isinstance(spec.draft, DraftConfig) else None
        placed = resolve_placement(placement, ExpertLayers.of(spec.config, stages), spec.expert)
        ring = Ring(replace(spec, placement=placed), self.ring.pipeline.whole, self.mesh, sizes)
        if self._schedule is not None:  # step times belong to a placement
            self._schedule.check_table(replace(self.fingerprint, placement=placed.digest if placed else ""))
        with self._lock:
            if placed == self.placement:
                return
            step = self._step
            if step is not None:
                record = ring.place_control(ring.idle_control())
                step = ring.step.lower(ring.pipeline.abstract(self.mesh), self._state, record).compile()
            self._params = relayout(self._params, self.ring.pipeline, ring.pipeline, self.mesh)
            self.ring, self._step = ring, step
            load = replace(self.plan.load, num_slots=placed.num_slots if placed else None)
            memory = stage_memory(self.config, self.draft_config, self.plan.ranges, load)
            self.plan = replace(self.plan, load=load, memory=memory)

    # -- device --------------------------------------------------------------------------------------------------------

    def measure_steps(self, repeats: int = 5, progress: Callable[[str], None] | None = None) -> StepTimes:
        """Times decoding steps in this engine's buckets (`parallel.profile`); `.table(self.fingerprint)` is for files.

        A ring for measuring is compiled, and needs memory for caches of its own; running requests are not touched.

        Raises ConfigError without a drafter, for a `max_len` of a few rounds, and on several processes.
        """
        if self._processes is not None:
            raise ConfigError("measure_steps works in one process; give a file of step times to Engine in every process")
        return measure_steps(self.ring, self._params, repeats=repeats, progress=progress)

    @property
    def fingerprint(self) -> Fingerprint:
        """What step times of this engine belong to."""
        spec = self.ring.spec
        return fingerprint_of(spec.config, spec.draft, spec.dtype, self.mesh, ranges=spec.ranges, placement=spec.placement)

    def _adopt_step_times(self, tell: Callable[[str], None]) -> None:
        """Measures what the schedule needs, and makes the ring that uses it."""
        ring, source = self.ring, self._schedule
        assert source is not None
        self.step_times = self.measure_steps(progress=tell)
        self._schedule = source = source.measured(self.step_times.table(self.fingerprint))
        sizes = replace(ring.sizes, schedule=source.schedule(ring.local_slots, ring.gamma))  # the buckets were measured
        self.ring = Ring(ring.spec, ring.pipeline.whole, self.mesh, sizes)

    def warmup(self, progress: Callable[[str], None] | None = None) -> float:
        """Compiles everything that serving needs and runs it once; returns the seconds it took. Then nothing compiles.

        `progress` is called with the name of each step.
        """
        begin = time.perf_counter()
        tell = progress or (lambda _: None)
        with self._lock, memory_for("making caches and program"):
            if self._step is None:
                if self._schedule is not None and self._schedule.measure:
                    self._adopt_step_times(tell)
                tell("allocating caches")
                self._state = self.ring.init_state()
                record, _ = self._place(self.ring.idle_control())
                tell("compiling the ring")
                step = self.ring.step.lower(self._params, self._state, record).compile()
                tell("running an empty round")
                jax.block_until_ready(self._run(step, record))
                self._step = step
        return time.perf_counter() - begin

    @property
    def busy(self) -> bool:
        """Whether a request is waiting or running, so that `step` has work."""
        return self._scheduler.busy

    def step(self) -> list[tuple[Hashable, RoundOutput]]:
        """Dispatches one call, reads the one before it, and returns what that one committed, by request id.

        Without work it does nothing.
        """
        self._check_process()
        self.warmup()
        with self._lock:
            if not self.busy:
                return []
            self._call(self._scheduler.plan(self.ring.idle_control()))
            if len(self._pending) < 2:
                return []
            found = [self._deliver(commit) for commit in self._absorb(self._pending.popleft())]
            if not self.busy:
                while self._pending:  # every request's end was read: what is in flight belongs to nobody
                    self._count(self._pending.popleft())
            return found

    def _place(self, record: Control | None, stop: bool = False) -> tuple[Control, Any]:
        """The record on the mesh and, on several processes, process 0's word whether to stop."""
        if self._processes is not None:
            return self._processes.spread(record, stop)
        assert record is not None
        return self.ring.place_control(record), None

    def _run(self, step: Any, record: Control) -> TickOutput:
        """Dispatches one call of the ring; its output can be read in every process."""
        self._state, output = step(self._params, self._state, record)
        return output if self._processes is None else self._processes.gather(output)

    def _call(self, record: Control, stop: bool = False) -> None:
        self._owe_stop()
        self._pending.append(self._run(self._step, self._place(record, stop)[0]))

    def _count(self, output: TickOutput) -> None:
        if self.expert_counter is not None:
            self.expert_counter.add(np.asarray(output.expert_counts))

    def _absorb(self, output: TickOutput) -> Iterator[Commit]:
        self._count(output)
        emission, generation, ticks = read_output(output)
        self.timeline += ticks
        yield from self._scheduler.absorb(emission, generation)

    # -- several processes -----------------------------------------------------------------------------------------------

    @property
    def follows(self) -> bool:
        """Whether this process takes part in the calls of another one, process 0, by `follow`."""
        return self._processes is not None and self._processes.index > 0

    def follow(self) -> None:
        """Makes the device calls of process 0's engine until that is closed; for the other processes.

        Raises RequestError on process 0 and where one process has the whole mesh.
        """
        processes = self._processes
        if processes is None or not self.follows:
            raise RequestError("follow() is for the processes other than 0; submit requests to this engine instead")
        self.warmup()
        with self._lock:
            processes.follow(self._follow_call)
            jax.block_until_ready(self._state)

    def _follow_call(self) -> jax.Array:
        record, stop = self._place(None)
        self._run(self._step, record)
        return stop

    def close(self) -> None:
        """Lets `follow` return on the other processes; on one process it does nothing.

        What is in flight is read before, so `stream` and `result` still have it. The engine serves on if the other
        processes follow again. An engine that was not closed is closed when Python ends.
        """
        with self._lock:
            if self._processes is None or not self._owes_stop:
                return
            try:
                self.warmup()
                self._processes.stop(lambda flag: self._call(self.ring.idle_control(), flag))
                while self._pending:
                    for commit in self._absorb(self._pending.popleft()):
                        self._deliver(commit)
            finally:
                self._owes_stop = False
                atexit.unregister(self.close)

    def _owe_stop(self) -> None:
        """Notes that the other processes wait for calls, and must be told when no more will come."""
        if self._processes is not None and not self.follows and not self._owes_stop:
            self._owes_stop = True
            atexit.register(self.close)

    def _check_process(self) -> None:
        if self._processes is not None:
            self._processes.require_process_0()

    # -- results -------------------------------------------------------------------------------------------------------

    def _deliver(self, commit: Commit) -> tuple[Hashable, RoundOutput]:
        return commit.key, self._entries[commit.key].deliver(commit)

    def _entry(self, request_id: Hashable) -> Entry:
        self._check_process()
        if request_id not in self._entries:
            raise RequestError(
                f"request_id {request_id!r} is unknown; expected one that submit returned and that was not read to its end"
            )
        return self._entries[request_id]
