"""The host's half of continuous batching: which request has which slot, and the record of the next call.

Pure Python and numpy: it knows no device. The device's results come one call late, so nothing here depends on knowing
them at once: a slot is given away when its finish was read, and every commit names the generation it belongs to.
"""

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from dspark_jax.decode.batch import Request
from dspark_jax.decode.item import Control
from dspark_jax.decode.logprobs import TokenLogprobs, read_logprobs
from dspark_jax.decode.state import FINISH_REASONS, RUNNING, Emission

Slot = tuple[int, int]  # microbatch, slot
MAX_GENERATION = 2**31 - 1


@dataclass
class Running:
    """A request in a slot."""

    key: Hashable
    request: Request
    slot: Slot
    generation: int
    sent: int = 0  # prompt tokens handed over
    first: bool = True  # no token was committed yet


@dataclass(frozen=True)
class Commit:
    """What one tick committed for the request `key`; see `decode.state.Emission`."""

    key: Hashable
    prefill: bool
    tokens: tuple[int, ...]
    accepted: int
    verified: int
    finish_reason: str | None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    rested: bool = False


@dataclass
class Scheduler:
    """Slots of `microbatches` × `slots`; prompts go in chunks of `chunk` tokens, one chunk a slot and call.

    A waiting request takes a slot of the microbatch that has the fewest requests, and in it of the expert rank with the
    fewest, so that pipeline and expert ranks have equal work.
    """

    microbatches: int
    slots: int
    expert: int
    chunk: int
    waiting: deque[tuple[Hashable, Request]] = field(default_factory=deque)
    running: dict[Hashable, Running] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._free = {(m, s) for m in range(self.microbatches) for s in range(self.slots)}
        self._by_generation: dict[int, Running] = {}
        self._aborted: set[Slot] = set()  # slots whose last request must be told to end
        self._next = 0

    @property
    def busy(self) -> bool:
        """Whether a call would have work."""
        return bool(self.waiting or self.running or self._aborted)

    def submit(self, key: Hashable, request: Request) -> None:
        """Queues a request."""
        self.waiting.append((key, request))

    def abort(self, key: Hashable) -> bool:
        """Ends a request now; False if it is not here (it has ended, or never was)."""
        if key in self.running:
            run = self.running.pop(key)
            del self._by_generation[run.generation]
            self._aborted.add(run.slot)
            self._free.add(run.slot)
            return True
        kept = deque(item for item in self.waiting if item[0] != key)
        found = len(kept) < len(self.waiting)
        self.waiting = kept
        return found

    def plan(self, record: Control) -> Control:
        """Fills an idle record [microbatches, slots, …] (numpy, changed in place): aborts, new requests, next chunks."""
        for m, s in self._aborted:
            record.abort[m, s] = True
        self._aborted.clear()
        while self.waiting and self._free:
            self._start(*self.waiting.popleft())
        for run in self.running.values():
            if run.sent < len(run.request.prompt):
                self._chunk(run, record)
        # Every slot of a microbatch, on every expert rank, must run the same bucket.
        record.bucket[:] = np.any(record.admit, axis=1, keepdims=True)
        return record

    def _start(self, key: Hashable, request: Request) -> None:
        load_m, load_e = np.zeros(self.microbatches, int), np.zeros((self.microbatches, self.expert), int)
        for run in self.running.values():
            load_m[run.slot[0]] += 1
            load_e[run.slot[0], self._rank(run.slot[1])] += 1
        slot = min(self._free, key=lambda at: (load_m[at[0]], load_e[at[0], self._rank(at[1])], at))
        self._free.remove(slot)
        self._next = self._next % MAX_GENERATION + 1
        run = Running(key, request, slot, self._next)
        self.running[key] = self._by_generation[run.generation] = run

    def _rank(self, slot: int) -> int:
        return slot // (self.slots // self.expert)

    def _chunk(self, run: Running, record: Control) -> None:
        at, prompt, params = run.slot, run.request.prompt, run.request.params
        part = prompt[run.sent : run.sent + self.chunk]
        record.admit[at] = True
        record.fresh[at] = run.sent == 0
        record.token[at][: len(part)] = part
        record.start[at], record.count[at] = run.sent, len(part)
        run.sent += len(part)
        record.final[at] = run.sent == len(prompt)
        record.generation[at] = run.generation
        record.max_tokens[at] = params.max_tokens
        record.stop[at][: len(run.request.stop)] = run.request.stop
        sampling = record.sampling
        sampling.temperature[at], sampling.top_p[at] = params.temperature, params.top_p
        sampling.top_k[at], sampling.seed[at] = params.top_k, params.seed

    def absorb(self, emission: Emission, generation: np.ndarray) -> Iterator[Commit]:
        """The commits of one call's ticks, emission [ticks, slots, …] of the last rank, in order; frees finished slots.

        What belongs to an aborted request is dropped: its generation is not known any more.
        """
        for t, s in np.argwhere(np.asarray(emission.count) > 0):
            run = self._by_generation.get(int(generation[t, s]))
            if run is None:
                continue
            reason = int(emission.reason[t, s])
            tokens = tuple(int(x) for x in emission.token[t, s, : emission.count[t, s]])
            finish = None if reason == RUNNING else FINISH_REASONS[reason]
            accepted, verified = int(emission.accepted[t, s]), int(emission.verified[t, s])
            logprobs = read_logprobs(emission.logprobs, (t, s), len(tokens), run.request.params.logprobs)
            rested = emission.rested is not None and bool(emission.rested[t, s])
            commit = Commit(run.key, run.first, tokens, accepted, verified, finish, logprobs, rested)
            run.first = False
            if finish is not None:
                del self.running[run.key], self._by_generation[run.generation]
                self._free.add(run.slot)
            yield commit


def slot_counts(slots: int, microbatches: int, expert: int) -> tuple[int, Sequence[str]]:
    """Slots of one microbatch for `slots` in all, and the faults of the number."""
    part = microbatches * expert
    if not isinstance(slots, int | np.integer) or slots < part or slots % part:
        return 0, [f"slots is {slots!r}; expected a positive multiple of pipe × expert = {part}"]
    return slots // microbatches, []
