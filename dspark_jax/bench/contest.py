"""Several schedulers in one program: the host names the one that decides, between two calls.

Competitors in programs of their own would take one compilation each; here they share all branches of the ring and differ
in nothing but the lengths. What the host says travels in the schedule's history, behind the survivals of old blocks, the same
for all slots: the seconds of a step by bucket, and the competitor's number.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dspark_jax.decode.schedule import (
    Block,
    EarlyStop,
    FixedLength,
    Schedule,
    Scheduler,
    StaleSize,
    Threshold,
    bucket_index,
    bucket_sizes,
)
from dspark_jax.decode.state import Requests

LAG = 2  # of the form for service
WEIGHING = ("early-stop", "stale-size")  # schedulers that need step times


@dataclass(frozen=True)
class BucketCost:
    """As `StepCost`, from numbers on the device: seconds of a step by bucket; for ever behind the last one."""

    seconds_of: Float[Array, "buckets"]
    buckets: tuple[int, ...]

    def seconds(self, requests: Int[Array, ""], rows: Int[Array, "n"]) -> Float[Array, "n"]:
        """Of steps with so many rows; `requests` are always all."""
        return jnp.where(rows > self.buckets[-1], jnp.inf, self.seconds_of[bucket_index(rows, self.buckets)])


@dataclass(frozen=True)
class _Chosen:
    """The scheduler that a number on the device names."""

    schedulers: tuple[Scheduler, ...]
    number: Int[Array, ""]

    @property
    def lag(self) -> int:
        return LAG

    def lengths(self, block: Block, axis: str | None = None) -> Int[Array, "R"]:
        """See `Scheduler`."""
        return jax.lax.switch(self.number, [partial(s.lengths, axis=axis) for s in self.schedulers], block)


@dataclass(frozen=True)
class Contest(Schedule):
    """Fixed lengths, a threshold, Algorithm 1 and the form for service, under one roof.

    Attributes:
      fixed: lengths of the first competitors.
      threshold: of the next one.
      buckets: ascending rows of an expert rank, the last one those of whole blocks; at most as many as drafts in a block.
    """

    scheduler: Scheduler = dataclasses.field(default_factory=FixedLength)
    fixed: tuple[int, ...] = ()
    threshold: float = 0.5
    buckets: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, slots: int, gamma: int, fixed: Sequence[int], threshold: float, temperatures: tuple[float, ...] | None
    ) -> "Contest":
        """For `slots` requests of an expert rank; every fixed length has a bucket that it fills."""
        buckets = bucket_sizes(slots, gamma, [slots * (1 + n) for n in fixed])
        return cls(temperatures=temperatures, fixed=tuple(fixed), threshold=threshold, buckets=buckets)

    @property
    def names(self) -> tuple[str, ...]:
        """Competitors, in order."""
        return (*(f"fixed:{n}" for n in self.fixed), f"threshold:{self.threshold:g}", *WEIGHING)

    def orders(self, name: str, seconds: Sequence[float], slots: int, gamma: int) -> Float[np.ndarray, "slots lag gamma"]:
        """The history with which competitor `name` begins, with the seconds of a step by bucket; new requests are certain."""
        history = np.ones((slots, LAG + 2, gamma))
        history[:, LAG, : len(self.buckets)] = seconds
        history[:, LAG + 1, 0] = self.names.index(name)
        return history

    def init(self, slots: int, gamma: int) -> Float[Array, "R lag gamma"]:
        return jnp.ones((slots, LAG + 2, gamma), jnp.float32)

    def step(
        self, requests: Requests, committed: Int[Array, "R"], stale: Float[Array, "R lag gamma"], axis: str | None = None
    ) -> tuple[Requests, Float[Array, "R lag gamma"]]:
        orders = stale[:, LAG:]
        cost: Any = BucketCost(orders[0, 0, : len(self.buckets)], self.buckets)
        weighing = (EarlyStop(cost), StaleSize(cost, LAG))
        schedulers = (*map(FixedLength, self.fixed), Threshold(self.threshold), *weighing)
        chosen = Schedule(_Chosen(schedulers, orders[0, 1, 0].astype(jnp.int32)), self.temperatures)
        requests, past = chosen.step(requests, committed, stale[:, :LAG], axis)
        return requests, jnp.concatenate([past, orders], axis=1)
