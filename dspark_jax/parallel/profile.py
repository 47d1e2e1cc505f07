"""Measures the seconds of decoding steps on the mesh: the ring itself, in every bucket of rows and with every number of
requests, with and without drafting.

A step's time is that of one tick, in which every pipe rank works, each on another microbatch in the same bucket. The
program is the ring's own, with two changes: lengths are ordered by the host (`schedule.Ordered`), and the drafter can be
passed over by a branch. The time that drafting adds to a tick is what the drafter costs, the rest is the target's step.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.decode.noise import DraftNoise, draft_gumbel
from dspark_jax.decode.profile_table import Fingerprint, ProfileTable, measured
from dspark_jax.decode.protocols import Proposal
from dspark_jax.decode.schedule import Ordered
from dspark_jax.errors import ConfigError
from dspark_jax.parallel.mesh import EXPERT
from dspark_jax.parallel.parts import Stage
from dspark_jax.parallel.ring import Ring
from dspark_jax.parallel.ring_timer import RingTimer, drafts_of

CALLS, SETTLING = 8, 2  # calls of one measurement, and calls before it in which the ordered lengths take hold


@dataclass(frozen=True)
class Cell:
    """Steps of `requests` requests with `rows` rows in all, on every expert rank, which run in `bucket`.

    Attributes:
      seconds, without_draft: of one tick, one measurement a repeat; the same repeat measured both one after the other.
      plain: without drafting and with the anchors alone, in the same bucket, if it is the requests' smallest one; else empty.
    """

    requests: int
    rows: int
    bucket: int
    seconds: tuple[float, ...]
    without_draft: tuple[float, ...]
    plain: tuple[float, ...] = ()


@dataclass(frozen=True)
class StepTimes:
    """What was measured. The scheduler's own time is not in it."""

    cells: tuple[Cell, ...]

    @property
    def draft(self) -> dict[int, float]:
        """Seconds that drafting adds to a tick, by requests: medians over repeats and buckets."""
        found: dict[int, list[float]] = {}
        for cell in self.cells:
            found.setdefault(cell.requests, []).append(float(np.median(np.subtract(cell.seconds, cell.without_draft))))
        return {requests: max(0.0, float(np.median(times))) for requests, times in found.items()}

    @property
    def verify(self) -> dict[int, float]:
        """Seconds of a tick without drafting, by bucket: medians over repeats and requests."""
        found: dict[int, list[float]] = {}
        for cell in self.cells:
            found.setdefault(cell.bucket, []).append(float(np.median(cell.without_draft)))
        return {bucket: float(np.median(times)) for bucket, times in found.items()}

    @property
    def plain(self) -> dict[int, float]:
        """Seconds of a tick without drafting over the anchors alone, by requests: `verify` of their bucket, which all requests
        share, times the median share that is left without the drafts' rows.
        """
        verify = self.verify
        cells = [cell for cell in self.cells if cell.plain]
        return {c.requests: verify[c.bucket] * float(np.median(np.divide(c.plain, c.without_draft))) for c in cells}

    @property
    def residual(self) -> float:
        """How far draft + verify is from a measured tick at most, as a share of it."""
        draft, verify = self.draft, self.verify
        return max(abs(draft[c.requests] + verify[c.bucket] - t) / t for c in self.cells for t in [np.median(c.seconds)])

    def table(self, fingerprint: Fingerprint) -> ProfileTable:
        """For schedulers and files."""
        return measured(self.verify, self.draft, fingerprint, self.plain)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "draft": {"requests": list(self.draft), "seconds": list(self.draft.values())},
            "verify": {"rows": list(self.verify), "seconds": list(self.verify.values())},
            "plain": {"requests": list(self.plain), "seconds": list(self.plain.values())},
            "residual": self.residual,
            "cells": [vars(cell) for cell in self.cells],
        }


class _Switched:
    """A drafter that is passed over where no running request has a seed above 0."""

    choices = ()

    def __init__(self, inner: Any, vocab: int):
        self.inner, self.vocab = inner, vocab
        self.block_size, self.init_cache, self.write_context = inner.block_size, inner.init_cache, inner.write_context

    def propose(self, anchor, position, active, sampling, cache, draft_noise: DraftNoise = draft_gumbel) -> Proposal:
        shape = (*anchor.shape, self.block_size)
        none = Proposal(jnp.zeros(shape, anchor.dtype), jnp.zeros((*shape, self.vocab), jnp.bfloat16), jnp.zeros(shape))
        # The drafter's experts are spread over the ranks, so these must agree.
        wanted = jax.lax.pmax(jnp.max(jnp.where(active, sampling.seed, 0).astype(jnp.int32)), EXPERT) > 0
        return jax.lax.cond(
            wanted, lambda: self.inner.propose(anchor, position, active, sampling, cache, draft_noise), lambda: none
        )


class _MeasuredRing(Ring):
    def _drafter(self, stage: Stage) -> Any:
        drafter = stage.drafter
        return drafter and _Switched(drafter, self.spec.config.vocab_size)


def request_counts(slots: int) -> tuple[int, ...]:
    """Powers of two up to `slots`, and `slots`."""
    powers = itertools.takewhile(lambda n: n < slots, (2**i for i in itertools.count()))
    return (*powers, slots)


def grid(slots: int, gamma: int, buckets: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """(requests, rows, bucket) of every cell that there can be, with as many rows as its bucket and its requests take."""
    found = []
    for requests in request_counts(slots):
        for below, bucket in zip((0, *buckets), buckets, strict=False):
            rows = min(bucket, requests * (gamma + 1))
            if rows > max(below, requests - 1):
                found.append((requests, rows, bucket))
    return found


def measure_steps(
    ring: Ring, params: dict[str, jax.Array], *, repeats: int = 5, progress: Callable[[str], None] | None = None
) -> StepTimes:
    """Times `ring`'s steps in its buckets (by default quarters), with every power of two of its slots as requests.

    Compiles a program of its own, as large as the ring's with a schedule, and needs memory for its caches. The cells are
    measured one after the other, again in every repeat, so that a drift of the device meets all of them.

    Args:
      ring: which model, mesh and sizes; its own schedule, if it has one, is not used.
      params: its parameters, on the mesh.
      progress: called with the name of each step.

    Raises:
      ConfigError: there is no drafter, `repeats` is below 1, or `max_len` leaves no room for a few rounds.
    """
    if repeats < 1:
        raise ConfigError(f"repeats is {repeats}; expected at least 1")
    sizes = replace(ring.sizes, schedule=Ordered(), count_experts=False)
    timer = RingTimer(_MeasuredRing(ring.spec, ring.pipeline.whole, ring.mesh, sizes), params)
    ring = timer.ring
    room = (sizes.max_len - 2) // (ring.gamma + 1) // sizes.rounds - SETTLING - 2
    if room < 1:
        least = (SETTLING + 3) * sizes.rounds * (ring.gamma + 1) + 2
        raise ConfigError(f"max_len is {sizes.max_len}; expected at least {least} positions to measure steps in")
    tell = progress or (lambda _: None)
    tell("compiling the program that is measured")
    timer.compile()
    timer.allocate()
    cells = grid(ring.local_slots, ring.gamma, ring.buckets)
    smallest = {cell for i, cell in enumerate(cells) if cell[0] not in {other[0] for other in cells[:i]}}
    kinds = ("without draft", "whole", "plain")
    found: dict[tuple[tuple[int, int, int], str], list[float]] = {}
    for repeat in range(-1, repeats):  # the first only warms up
        for i, cell in enumerate(cells):
            tell(f"measuring, repeat {max(repeat, 0) + 1} of {repeats}, step {i + 1} of {len(cells)}")
            for kind in kinds if cell in smallest else kinds[:2]:
                rows = cell[0] if kind == "plain" else cell[1]
                seconds = _measure(timer, (cell[0], rows, cell[2]), kind == "whole", min(CALLS, room))
                if repeat >= 0:
                    found.setdefault((cell, kind), []).append(seconds)
    order = ("whole", "without draft", "plain")
    return StepTimes(tuple(Cell(*cell, *(tuple(found.get((cell, kind), ())) for kind in order)) for cell in cells))


def _measure(timer: RingTimer, cell: tuple[int, int, int], draft: bool, calls: int) -> float:
    """Seconds of a tick."""
    ring, (requests, rows, bucket) = timer.ring, cell
    local = ring.local_slots
    slots = [(m, s) for m in range(ring.pipe) for s in range(ring.sizes.slots) if s % local < requests]
    used = (calls + SETTLING + 2) * ring.sizes.rounds * (ring.gamma + 1)
    position = max(0, min(ring.sizes.max_len // 2, ring.sizes.max_len - 2 - used))
    timer.start({slot: [0] for slot in slots}, dict.fromkeys(slots, int(draft)), position=position)
    history = np.ones((local, 1, ring.gamma))
    history[:, 0, 0] = drafts_of(rows - requests, requests, local)
    timer.set_history(history)
    for _ in range(SETTLING):
        timer.call()
    seconds, outputs = timer.timed(calls)
    for output in outputs:
        ran = np.unique(np.asarray(output.bucket))
        valid = np.unique(np.asarray(output.rows).sum(axis=2) / ring.spec.expert)
        if (*ran, *valid) != (bucket, rows):
            raise RuntimeError(f"a step should have had {rows} rows in bucket {bucket}; it had {valid} in {ran}")
    return seconds / (calls * timer.ticks)
