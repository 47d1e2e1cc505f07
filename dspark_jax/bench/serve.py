"""Serving under load: requests arrive at random times at an engine, and each is timed."""

import math
import time
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from dspark_jax.decode.sampling import SamplingParams
from dspark_jax.errors import RequestError, raise_all
from dspark_jax.requests import Prompt, RequestReader
from dspark_jax.serve.engine import Engine, Tick


@dataclass(frozen=True)
class Load:
    """When requests arrive.

    Attributes:
      rate: arrivals a second of a Poisson process; None lets all arrive at once.
      requests: how many.
      seed: of the times, and of the order in which prompts are taken.
    """

    rate: float | None = None
    requests: int = 32
    seed: int = 0

    def faults(self) -> list[str]:
        """What is wrong with the values."""
        found = []
        if self.rate is not None and not (math.isfinite(self.rate) and self.rate > 0):
            found.append(f"rate = {self.rate!r}; expected a finite number of requests a second > 0")
        if self.requests < 1:
            found.append(f"requests = {self.requests!r}; expected an integer >= 1")
        if self.seed < 0:
            found.append(f"seed = {self.seed!r}; expected an integer >= 0")
        return found

    def arrivals(self) -> np.ndarray:
        """Seconds [requests] at which they arrive, ascending; the first is 0."""
        if self.rate is None:
            return np.zeros(self.requests)
        gaps = np.random.default_rng(self.seed).exponential(1 / self.rate, self.requests)
        return np.cumsum(gaps) - gaps[0]

    def order(self, prompts: int) -> np.ndarray:
        """Which of so many prompts each request has: all of them, shuffled, again and again."""
        rng = np.random.default_rng((self.seed, 1))  # other numbers than the times'
        turns = -(-self.requests // prompts)
        return np.concatenate([rng.permutation(prompts) for _ in range(turns)])[: self.requests]


class Percentiles(NamedTuple):
    """Seconds."""

    p50: float
    p99: float


@dataclass(frozen=True)
class Served:
    """One request; times in seconds since the first arrival.

    Attributes:
      arrival: when it was due. Waiting counts from here, also where the loop was late to submit it.
      first, last: when its first and its last token were read.
      tokens, rounds: what it got, and in how many verification rounds.
      verified, accepted: drafts that the target checked, and those of them that are in the answer.
      rested: rounds that were plain steps because the drafter rested.
    """

    arrival: float
    first: float
    last: float
    tokens: int
    rounds: int
    verified: int = 0
    accepted: int = 0
    rested: int = 0


@dataclass(frozen=True)
class ServeReport:
    """What a load has measured.

    Attributes:
      served: the requests, in order of arrival.
      ticks: of the pipeline, in order; none runs while there is no request.
      seconds: from the first arrival to the last token.
      compile_seconds: of the warm-up, which is not in the figures.
    """

    served: tuple[Served, ...]
    ticks: tuple[Tick, ...]
    seconds: float
    compile_seconds: float

    @property
    def tokens(self) -> int:
        """Tokens of all requests together."""
        return sum(r.tokens for r in self.served)

    @property
    def tokens_per_second(self) -> float:
        """Of all requests together."""
        return self.tokens / self.seconds

    @property
    def time_to_first_token(self) -> Percentiles | None:
        """From arrival, waiting for a slot included."""
        return _percentiles([r.first - r.arrival for r in self.served])

    @property
    def time_per_output_token(self) -> Percentiles | None:
        """A request's mean seconds a token behind its first; requests of one token have none."""
        return _percentiles([(r.last - r.first) / (r.tokens - 1) for r in self.served if r.tokens > 1])

    @property
    def tokens_per_round(self) -> float | None:
        """Tau over all requests, the first tokens left out; None without a round."""
        return (self.tokens - len(self.served)) / self.rounds if self.rounds else None

    @property
    def rounds(self) -> int:
        """Rounds of all requests together."""
        return sum(r.rounds for r in self.served)

    @property
    def verified(self) -> int:
        """Drafts that the target checked."""
        return sum(r.verified for r in self.served)

    @property
    def accepted(self) -> int:
        """Those of them that are in an answer."""
        return sum(r.accepted for r in self.served)

    @property
    def buckets(self) -> dict[int, int]:
        """Ticks of the last rank by the rows that it computed on an expert rank; empty without a scheduler."""
        sizes = Counter(tick.bucket[-1] for tick in self.ticks if tick.bucket is not None)
        return dict(sorted(sizes.items()))

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Of every pipe rank the share of ticks in which it had rows."""
        rows = np.array([tick.rows for tick in self.ticks])
        return tuple((rows > 0).mean(axis=0).tolist())

    def as_dict(self) -> dict[str, Any]:
        """For JSON; every key is always there."""
        first, each = self.time_to_first_token, self.time_per_output_token
        return {
            "seconds": self.seconds,
            "tokens": self.tokens,
            "tokens_per_second": self.tokens_per_second,
            "time_to_first_token": first and first._asdict(),
            "time_per_output_token": each and each._asdict(),
            "tokens_per_round": self.tokens_per_round,
            "verified_drafts": self.verified,
            "wasted_drafts": self.verified - self.accepted,
            "rested_rounds": sum(r.rested for r in self.served),
            "buckets": self.buckets,
            "busy": list(self.busy),
            "ticks": len(self.ticks),
            "compile_seconds": self.compile_seconds,
        }


def serve_load(
    engine: Engine, prompts: Sequence[Prompt], params: SamplingParams, load: Load, *, ignore_eos: bool = False
) -> ServeReport:
    """Sends `load` to an engine, in one thread, and waits for the last answer.

    Everything is compiled and has run once before the clock starts, and requests that the engine already has are run to
    their ends. Request i is sampled with seed `params.seed + i`.

    Raises RequestError that names every fault of load, prompts and parameters before any device work.
    """
    raise_all(RequestError, "load", load.faults())
    RequestReader(engine.config, engine.tokenizer, engine.max_len).read(prompts, params, ignore_eos)
    compile_seconds = engine.warmup()
    engine.generate([prompts[0]], replace(params, max_tokens=2))
    _drain(engine)
    engine.timeline.clear()
    return _Run(engine, prompts, params, load, ignore_eos).report(compile_seconds)


class _Run:
    """One load on its way through the engine."""

    def __init__(
        self, engine: Engine, prompts: Sequence[Prompt], params: SamplingParams, load: Load, ignore_eos: bool
    ):
        self.engine, self.params, self.ignore_eos = engine, params, ignore_eos
        self.prompts = [prompts[i] for i in load.order(len(prompts))]
        self.arrivals = load.arrivals()
        self.number: dict[Hashable, int] = {}  # of the requests that run, by the engine's id
        self.first: dict[int, float] = {}
        self.served: dict[int, Served] = {}
        self.ticks: list[Tick] = []

    def report(self, compile_seconds: float) -> ServeReport:
        begin, sent, count = time.perf_counter(), 0, len(self.prompts)
        while len(self.served) < count:
            now = time.perf_counter() - begin
            while sent < count and self.arrivals[sent] <= now:
                self._submit(sent)
                sent += 1
            if not self.number:
                time.sleep(self.arrivals[sent] - now)
                continue
            self._step(begin)
        seconds = max(r.last for r in self.served.values())
        _drain(self.engine)
        self._keep_ticks()
        served = tuple(self.served[i] for i in range(count))
        return ServeReport(served, tuple(self.ticks), seconds, compile_seconds)

    def _submit(self, i: int) -> None:
        params = replace(self.params, seed=(self.params.seed + i) % 2**32)
        self.number[self.engine.submit(self.prompts[i], params, ignore_eos=self.ignore_eos)] = i

    def _step(self, begin: float) -> None:
        outputs = self.engine.step()
        now = time.perf_counter() - begin
        self._keep_ticks()
        for key, output in outputs:
            i = self.number[key]
            self.first.setdefault(i, now)
            if output.finish_reason:
                answer = self.engine.result(key)
                self.served[i] = Served(
                    float(self.arrivals[i]), self.first[i], now, len(answer.tokens), answer.rounds,
                    sum(answer.verify_lengths), sum(answer.drafted), answer.rested_rounds,
                )  # fmt: skip
                del self.number[key]

    def _keep_ticks(self) -> None:
        """The engine forgets old ticks; here all are kept."""
        self.ticks += self.engine.timeline
        self.engine.timeline.clear()


def _drain(engine: Engine) -> None:
    """Reads the call that was dispatched before the last answer was known."""
    while engine.busy:
        engine.step()


def _percentiles(values: Sequence[float]) -> Percentiles | None:
    return Percentiles(*(float(x) for x in np.percentile(values, (50, 99)))) if values else None
