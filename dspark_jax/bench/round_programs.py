"""Programs of `bench.round`: rings over one set of random weights, timed, profiled, and with their experts counted."""

import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.bench.device_profile import DeviceProfile, profiled
from dspark_jax.bench.synthetic import SyntheticRing, random_params, ring_makers, shapes_of
from dspark_jax.config import DraftConfig, TargetConfig
from dspark_jax.decode.calibrate import Rounds
from dspark_jax.parallel.mesh import make_mesh
from dspark_jax.parallel.ring import Ring, RingConfig
from dspark_jax.parallel.ring_timer import RingTimer, abstract_params
from dspark_jax.parallel.stage import PipelineSpec

ROUND, PLAIN = "round", "plain step"
SETTLING, REPEATS, CALLS, PROFILED = 3, 3, 4, 2  # calls: before the clock starts, then repeats of timed ones, profiled ones


@dataclass(frozen=True)
class Subject:
    """A model's configurations and sizes, all checked.

    Attributes:
      rounds: where acceptance is drawn from, or None.
      calls: rounds of one call.
    """

    name: str
    config: TargetConfig
    draft: DraftConfig
    dtype: str
    context: int
    rounds: Rounds | None
    calls: int

    @property
    def capacity(self) -> int:
        """Positions that a request needs if every draft is accepted."""
        calls = 2 + SETTLING + REPEATS * CALLS + PROFILED
        return self.context + (calls * self.calls + 1) * (self.draft.block_size + 1) + 2


class Program(NamedTuple):
    """One ring: requests side by side, and whether they draft.

    Attributes:
      counter: the same ring with counters of the experts' rows; None where they are not counted.
    """

    requests: int
    drafting: bool
    timer: RingTimer
    counter: RingTimer | None

    @property
    def name(self) -> str:
        return f"batch {self.requests}, {ROUND if self.drafting else PLAIN}"

    def timers(self) -> list[tuple[str, RingTimer]]:
        """What is compiled, by name."""
        counting = [] if self.counter is None else [(f"{self.name}, counting experts", self.counter)]
        return [(self.name, self.timer), *counting]


class Measured(NamedTuple):
    """Of one program.

    Attributes:
      tick_us: microseconds of a round or step, the median of the repeats.
      profile: None without a GPU.
      tokens: of a request and round, in the mean.
      state: bytes of caches and requests.
      visited: experts that rows visit in a tick, by target layer and then draft stage; None where they are not counted.
    """

    tick_us: float
    profile: DeviceProfile | None
    tokens: float
    state: int
    visited: list[float] | None


def make_programs(what: Subject, batches: Sequence[int], count_experts: bool) -> list[Program]:
    """Compiled programs over one set of weights, two for every batch (four with counters); without what cannot be compiled."""
    mesh, shapes = make_mesh(), shapes_of(what.config, what.draft, what.dtype)

    def timer(n: int, draft: DraftConfig | None, count: bool) -> RingTimer:
        spec = PipelineSpec(what.config, draft, ((0, what.config.num_hidden_layers),), 1, jnp.dtype(what.dtype))
        sizes = RingConfig(n, what.capacity, 1, what.calls, count_experts=count)
        if draft and what.rounds is not None:
            ring: Ring = SyntheticRing(spec, shapes, mesh, sizes, what.rounds)
        else:
            ring = Ring(spec, shapes, mesh, sizes)
        return RingTimer(ring, abstract_params(ring))

    found = [
        Program(n, draft is not None, timer(n, draft, False), timer(n, draft, True) if count_experts else None)
        for n in batches
        for draft in (what.draft, None)
    ]
    whole = found[0].timer.ring
    with ThreadPoolExecutor(min(32, 2 * (os.cpu_count() or 1))) as pool:
        making = [pool.submit(make) for make in ring_makers(whole)]
        compiled = [[pool.submit(_compiled, name, one) for name, one in program.timers()] for program in found]
        for leaf in making:
            leaf.result()
        params = random_params(whole)
        sound = [program for program, jobs in zip(found, compiled, strict=True) if all(job.result() for job in jobs)]
    for program in sound:
        for _, one in program.timers():
            one.params = {key: params[key] for key in one.params}
    return sound


def _compiled(name: str, timer: RingTimer) -> bool:
    try:
        say(f"{name}: compiled in {timer.compile():.1f} s")
    except jax.errors.JaxRuntimeError as error:
        say(f"{name}: cannot be compiled: {first_line(error)}")
        return False
    return True


def measure(program: Program, what: Subject) -> Measured:
    """Times the program, profiles it, and counts. Raises RuntimeError if a request has ended in a timed call."""
    timer = program.timer
    state = _begin(timer, what)
    ticks, seconds, tokens = CALLS * timer.ticks, [], []
    for _ in range(REPEATS):
        taken, outputs = timer.timed(CALLS)
        seconds.append(taken / ticks)
        tokens += [np.asarray(output.emission.count)[-1] for output in outputs]
    if not (counts := np.stack(tokens)).all():
        raise RuntimeError(f"{program.name}: a request has ended in a timed call")
    profile = profiled(lambda: timer.timed(PROFILED), PROFILED * timer.ticks)
    timer.free()
    visited = None if program.counter is None else _visited(program.counter, what)
    return Measured(1e6 * float(np.median(seconds)), profile, float(counts.mean()), state, visited)


def _begin(timer: RingTimer, what: Subject) -> int:
    """Starts all requests and runs them for a while; returns the bytes of the state."""
    timer.allocate()
    slots = [(0, slot) for slot in range(timer.ring.sizes.slots)]
    first = np.random.default_rng(0).integers(0, what.config.vocab_size, len(slots))
    prompts = {slot: (int(token),) for slot, token in zip(slots, first, strict=True)}
    timer.start(prompts, {slot: i for i, slot in enumerate(slots)}, position=what.context)
    for _ in range(SETTLING):
        timer.call()
    return bytes_of(timer.state)


def _visited(counter: RingTimer, what: Subject) -> list[float]:
    _begin(counter, what)
    counts = [np.asarray(output.expert_counts)[0] for output in counter.timed(CALLS)[1]]  # each [ticks, positions, E]
    counter.free()
    return (np.concatenate(counts) > 0).sum(axis=-1).mean(axis=0).tolist()


_BEGIN = time.perf_counter()


def say(text: str) -> None:
    """Progress, on stderr."""
    print(f"[{time.perf_counter() - _BEGIN:6.1f} s] {text}", file=sys.stderr, flush=True)


def bytes_of(tree: Any) -> int:
    """Of all its arrays."""
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def first_line(error: Exception) -> str:
    """Of its message."""
    return str(error).partition("\n")[0]
