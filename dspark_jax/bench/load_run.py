"""One concurrency of `bench.load`: two programs, with and without the drafter, and their timed rounds."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from dspark_jax.bench.contest import Contest
from dspark_jax.parallel.ring import TickOutput
from dspark_jax.parallel.ring_timer import RingTimer, Slot

PLAIN = "plain"
SETTLING = 3  # calls before the clock starts: schedulers for service look two rounds and more back
LEAST_ROUNDS = 8  # timed rounds of every request
MOST_ROUNDS = 64  # behind one prompt; more begin with new prompts


class Workload(Protocol):
    """What requests begin with."""

    @property
    def position(self) -> int:
        """Where prompts begin; the context in front of them is empty."""
        ...

    @property
    def temperature(self) -> float:
        """Of sampling."""
        ...

    @property
    def longest(self) -> int:
        """Most tokens of a prompt."""
        ...

    def prompts(self, slots: Sequence[Slot], batch: int) -> dict[Slot, Sequence[int]]:
        """A prompt for every slot, other ones in every batch."""
        ...


@dataclass(frozen=True)
class Run:
    """Timed rounds of one competitor: sums over all requests.

    Attributes:
      seconds: of the timed calls.
      ticks: of those.
      rounds: verification rounds, one for each request and round.
      tokens, verified, accepted: in these rounds.
      rested: of these rounds, those behind which the drafter rested.
    """

    seconds: float
    ticks: int
    rounds: int
    tokens: int
    verified: int
    accepted: int
    rested: int = 0

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    @classmethod
    def sum(cls, runs: Sequence["Run"]) -> "Run":
        return cls(*(sum(values) for values in zip(*(vars(run).values() for run in runs), strict=True)))


def capacity(gamma: int, workload: Workload, rounds_per_call: int) -> int:
    """Positions that a request needs in the longest batch, all drafts accepted."""
    rounds = (2 + SETTLING) * rounds_per_call + MOST_ROUNDS + rounds_per_call
    return workload.position + workload.longest + (rounds + 1) * (gamma + 1) + 2


class Point:
    """All competitors with `requests` requests side by side, all of them running all the time.

    Args:
      drafting: a ring with a `Contest`.
      plain: one without the drafter.
    """

    def __init__(self, requests: int, drafting: RingTimer, plain: RingTimer, workload: Workload, seed: int):
        self.requests, self.drafting, self.plain, self.workload, self.seed = requests, drafting, plain, workload, seed
        contest: Any = drafting.ring.sizes.schedule
        self.contest: Contest = contest
        self.seconds = [1.0] * len(contest.measured)  # of steps, as `Contest.measured` says, once they are measured

    @property
    def names(self) -> tuple[str, ...]:
        """Competitors, plain decoding first."""
        return (PLAIN, *self.contest.names)

    def allocate(self) -> None:
        for timer in (self.drafting, self.plain):
            timer.allocate()

    def free(self) -> None:
        for timer in (self.drafting, self.plain):
            timer.free()

    def measure_steps(self, repeats: int, rounds: int) -> None:
        """Fills in the seconds of a step by the drafts of each request, and without any drafting; medians over repeats."""
        names = self.contest.measured
        self.run(PLAIN, 0, rounds)  # these warm up
        self.run(names[-2], 0, rounds)
        found = [[run.seconds / run.ticks for run in row] for row in self.interleaved(names, repeats, rounds, lambda *_: None)]
        self.seconds = np.median(found, axis=0).tolist()

    def interleaved(
        self, names: Sequence[str], repeats: int, rounds: int, tell: Callable[[int, str], None]
    ) -> Iterator[list[Run]]:
        """The runs of each repeat, in the order of `names`. A repeat begins with another competitor than the one before."""
        for repeat in range(repeats):
            runs = {}
            for i in range(len(names)):
                name = names[(i + repeat) % len(names)]
                tell(repeat, name)
                runs[name] = self.run(name, repeat, rounds)
            yield [runs[name] for name in names]

    def run(self, name: str, repeat: int, rounds: int) -> Run:
        """At least `rounds` rounds, summed over the requests; competitors have equal prompts and seeds in a repeat."""
        each = max(LEAST_ROUNDS, math.ceil(rounds / self.requests))
        batches = math.ceil(each / MOST_ROUNDS)
        return Run.sum([self._batch(name, repeat * batches + b, math.ceil(each / batches)) for b in range(batches)])

    def _batch(self, name: str, batch: int, rounds: int) -> Run:
        timer = self.plain if name == PLAIN else self.drafting
        ring = timer.ring
        slots = [(m, s) for m in range(ring.pipe) for s in range(ring.sizes.slots)]
        seeds = {slot: (self.seed + batch * len(slots) + i) % 2**31 for i, slot in enumerate(slots)}
        timer.start(
            self.workload.prompts(slots, batch), seeds,
            position=self.workload.position, temperature=self.workload.temperature,
        )  # fmt: skip
        if name != PLAIN:
            timer.set_history(self.contest.orders(name, self.seconds, ring.local_slots))
        for _ in range(SETTLING):
            timer.call()
        calls = math.ceil(rounds / ring.sizes.rounds)
        seconds, outputs = timer.timed(calls)
        return self._read(timer, seconds, outputs)

    def _read(self, timer: RingTimer, seconds: float, outputs: Sequence[TickOutput]) -> Run:
        fields = ("count", "verified", "accepted", "rested")
        emissions = [[_last(getattr(o.emission, f)) for f in fields] for o in outputs]
        count, verified, accepted, rested = (np.concatenate(x) for x in zip(*emissions, strict=True))
        ticks, rounds = len(outputs) * timer.ticks, int((count > 0).sum())
        expected = len(outputs) * timer.ring.sizes.rounds * self.requests
        if rounds != expected:
            raise RuntimeError(f"{rounds} rounds ran where {expected} should have: a request has ended in a timed call")
        return Run(seconds, ticks, rounds, int(count.sum()), int(verified.sum()), int(accepted.sum()), int(rested.sum()))


def _last(x: Any) -> np.ndarray:
    return np.zeros(1) if x is None else np.asarray(x)[-1:]
