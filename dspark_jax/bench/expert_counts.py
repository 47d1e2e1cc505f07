"""What counting rows by expert costs: the same load on two engines, with and without counters, in turns.

    python -m dspark_jax.bench.expert_counts --model nano --mesh 1x1 --slots 32

prints both medians of the seconds of a call, and their ratio. `--cpu-time` takes the process's CPU seconds instead: for a
CPU that others use too.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from dspark_jax.decode.sampling import SamplingParams
from dspark_jax.parallel.mesh_config import load_mesh
from dspark_jax.serve.engine import Engine

PROMPT = [3, 4, 5, 6]


class Steps(Protocol):
    """What is measured of an engine."""

    def fill(self) -> None:
        """Gives every free place a request; not timed."""
        ...

    def step(self) -> object:
        """One call of the device."""
        ...


@dataclass(frozen=True)
class Cost:
    """Medians over all calls, in seconds."""

    plain: float
    counting: float

    @property
    def overhead(self) -> float:
        """Fraction of a call that counting adds."""
        return self.counting / self.plain - 1


class FullEngine:
    """An engine whose places are always taken, by requests that end at the context's limit."""

    def __init__(self, engine: Engine):
        self.engine = engine

    def fill(self) -> None:
        for _ in range(self.engine.slots - len(self.engine._entries)):
            self.engine.submit(PROMPT, SamplingParams(max_tokens=self.engine.max_len), ignore_eos=True)

    def step(self) -> None:
        for key, output in self.engine.step():
            if output.finish_reason:
                self.engine.result(key)  # forgotten, so that its place is filled again


def compare(
    plain: Steps,
    counting: Steps,
    blocks: int = 20,
    calls: int = 20,
    clock: Callable[[], float] = time.perf_counter,
) -> Cost:
    """Blocks of calls in turns, so that a machine that slows down slows both; the first block of each is a warm-up."""
    seconds: dict[Steps, list[float]] = {plain: [], counting: []}
    for block in range(blocks + 1):
        for engine in (plain, counting) if block % 2 else (counting, plain):
            engine.fill()
            engine.step()  # takes up what was filled
            for _ in range(calls):
                begin = clock()
                engine.step()
                if block:
                    seconds[engine].append(clock() - begin)
    return Cost(statistics.median(seconds[plain]), statistics.median(seconds[counting]))


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; prints one line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="nano")
    parser.add_argument("--mesh", default="1x1")
    parser.add_argument("--slots", type=int, default=None)
    parser.add_argument("--max-len", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--cpu-time", action="store_true")
    options = parser.parse_args(arguments)
    shape = load_mesh(options.mesh)
    made = [
        FullEngine(Engine(options.model, mesh=shape.make(), slots=options.slots, max_len=options.max_len, count_experts=window))
        for window in (None, (0, 10))
    ]
    for one in made:
        one.engine.warmup()
    clock = time.process_time if options.cpu_time else time.perf_counter
    cost = compare(*made, blocks=options.blocks, clock=clock)
    print(
        f"{options.model} on mesh {shape}, {made[0].engine.slots} slots: {1e3 * cost.plain:.3f} ms a call, counting"
        f" {1e3 * cost.counting:.3f} ms: {cost.overhead:+.2%}"
    )


if __name__ == "__main__":
    main()
