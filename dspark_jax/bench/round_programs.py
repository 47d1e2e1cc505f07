"""Programs of `bench.round` over one set of random weights: timed, profiled, and with their experts counted.

A V4-style model runs as a ring of one rank, a dense one by `dense_round`.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.bench.dense_round import DenseTimer
from dspark_jax.bench.device_profile import DeviceProfile, profiled
from dspark_jax.bench.synthetic import SyntheticRing, random_params, ring_makers, shapes_of
from dspark_jax.config import DraftConfig, TargetConfig
from dspark_jax.config_dense import DenseConfig
from dspark_jax.config_drafter import StandaloneConfig
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
      config, draft: of a V4-style model, or of a dense one (`DenseConfig` and `StandaloneConfig`).
      rounds: where acceptance is drawn from, or None.
      calls: rounds of one call.
      temperature: of all requests.
    """

    name: str
    config: TargetConfig | DenseConfig
    draft: DraftConfig | StandaloneConfig
    dtype: str
    context: int
    rounds: Rounds | None
    calls: int
    temperature: float = 1.0

    @property
    def capacity(self) -> int:
        """Positions that a request needs if every draft is accepted."""
        calls = 2 + SETTLING + REPEATS * CALLS + PROFILED
        return self.context + (calls * self.calls + 1) * (self.draft.block_size + 1) + 2


class Timer(Protocol):
    """A compiled program and its state between calls; what `measure` needs of one.

    Attributes:
      params: weights by key, or before they are there their shapes; shared, never written.
      ticks: rounds of one call.
      temporaries: bytes of the compiled program beside weights, state and results.
    """

    params: dict[str, Any]
    state: Any

    @property
    def ticks(self) -> int: ...

    @property
    def temporaries(self) -> int: ...

    def compile(self) -> float:
        """Returns the seconds it took. Nothing is allocated."""
        ...

    def makers(self) -> list[Callable[[], Any]]:
        """What compiles all that `weights` needs, each call one shape."""
        ...

    def weights(self) -> dict[str, jax.Array]:
        """Random weights, made on the device."""
        ...

    def begin(self, tokens: Sequence[int], position: int, temperature: float) -> None:
        """Makes the state, in which request i has `tokens[i]` behind an empty context, and seed i."""
        ...

    def timed(self, calls: int) -> tuple[float, list[Any]]:
        """Seconds from idle devices until the last of so many calls has ended, and the calls' outputs."""
        ...

    def counts(self, output: Any) -> np.ndarray:
        """Tokens that requests committed in the ticks of a call: [ticks, requests]."""
        ...

    def free(self) -> None:
        """Forgets the state."""
        ...


class _RingTimer(RingTimer):
    """`Timer` of a ring of one rank."""

    def makers(self) -> list[Callable[[], Any]]:
        return ring_makers(self.ring)

    def weights(self) -> dict[str, jax.Array]:
        return random_params(self.ring)

    def begin(self, tokens: Sequence[int], position: int, temperature: float) -> None:
        self.allocate()
        prompts = {(0, slot): (int(token),) for slot, token in enumerate(tokens)}
        self.start(prompts, {at: at[1] for at in prompts}, position=position, temperature=temperature)

    def counts(self, output: Any) -> np.ndarray:
        return np.asarray(output.emission.count)[-1]


class Program(NamedTuple):
    """Requests side by side, and whether they draft.

    Attributes:
      counter: the same program with counters of the experts' rows; None where they are not counted.
    """

    requests: int
    drafting: bool
    timer: Timer
    counter: Timer | None

    @property
    def name(self) -> str:
        return f"batch {self.requests}, {ROUND if self.drafting else PLAIN}"

    def timers(self) -> list[tuple[str, Timer]]:
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
    timer = (_dense if isinstance(what.config, DenseConfig) else _ring)(what)
    found = [
        Program(n, drafting, timer(n, drafting, False), timer(n, drafting, True) if count_experts else None)
        for n in batches
        for drafting in (True, False)
    ]
    whole = found[0].timer
    with ThreadPoolExecutor(min(32, 2 * (os.cpu_count() or 1))) as pool:
        making = [pool.submit(make) for make in whole.makers()]
        compiled = [[pool.submit(_compiled, name, one) for name, one in program.timers()] for program in found]
        for leaf in making:
            leaf.result()
        params = whole.weights()
        sound = [program for program, jobs in zip(found, compiled, strict=True) if all(job.result() for job in jobs)]
    for program in sound:
        for _, one in program.timers():
            one.params = {key: params[key] for key in one.params}
    return sound


def _ring(what: Subject) -> Callable[[int, bool, bool], Timer]:
    config, draft = what.config, what.draft
    assert isinstance(config, TargetConfig) and isinstance(draft, DraftConfig)
    shapes, mesh = shapes_of(config, draft, what.dtype), make_mesh()

    def timer(requests: int, drafting: bool, count: bool) -> Timer:
        spec = PipelineSpec(config, draft if drafting else None, ((0, config.num_hidden_layers),), 1, jnp.dtype(what.dtype))
        sizes = RingConfig(requests, what.capacity, 1, what.calls, count_experts=count)
        if drafting and what.rounds is not None:
            ring: Ring = SyntheticRing(spec, shapes, mesh, sizes, what.rounds)
        else:
            ring = Ring(spec, shapes, mesh, sizes)
        return _RingTimer(ring, abstract_params(ring))

    return timer


def _dense(what: Subject) -> Callable[[int, bool, bool], Timer]:
    config, draft = what.config, what.draft
    assert isinstance(config, DenseConfig) and isinstance(draft, StandaloneConfig)
    return lambda requests, drafting, _: DenseTimer(
        config, draft if drafting else None, what.dtype, requests, what.capacity, what.calls
    )


def _compiled(name: str, timer: Timer) -> bool:
    try:
        say(f"{name}: compiled in {timer.compile():.1f} s")
    except jax.errors.JaxRuntimeError as error:
        say(f"{name}: cannot be compiled: {first_line(error)}")
        return False
    return True


def measure(program: Program, what: Subject) -> Measured:
    """Times the program, profiles it, and counts. Raises RuntimeError if a request has ended in a timed call."""
    timer = program.timer
    state = _begin(timer, program.requests, what)
    ticks, seconds, tokens = CALLS * timer.ticks, [], []
    for _ in range(REPEATS):
        taken, outputs = timer.timed(CALLS)
        seconds.append(taken / ticks)
        tokens += [timer.counts(output) for output in outputs]
    if not (counts := np.stack(tokens)).all():
        raise RuntimeError(f"{program.name}: a request has ended in a timed call")
    profile = profiled(lambda: timer.timed(PROFILED), PROFILED * timer.ticks)
    timer.free()
    visited = None if program.counter is None else _visited(program.counter, program.requests, what)
    return Measured(1e6 * float(np.median(seconds)), profile, float(counts.mean()), state, visited)


def _begin(timer: Timer, requests: int, what: Subject) -> int:
    """Starts all requests and runs them for a while; returns the bytes of the state."""
    tokens = np.random.default_rng(0).integers(0, what.config.vocab_size, requests).tolist()
    timer.begin(tokens, what.context, what.temperature)
    timer.timed(SETTLING)
    return bytes_of(timer.state)


def _visited(counter: Timer, requests: int, what: Subject) -> list[float]:
    _begin(counter, requests, what)
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
