"""Several schedulers in one program: the host names the one that decides, between two calls.

Competitors in programs of their own would take one compilation each; here they share all branches of the ring and differ
in nothing but the lengths. What the host says travels in the schedule's history, behind the survivals of old blocks, the same
for all slots: the competitor's number, and the seconds of a step by number of drafts of each request and of a plain one.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.decode.schedule import (
    Block,
    EarlyStop,
    FixedLength,
    Plan,
    Schedule,
    Scheduler,
    StaleRate,
    StaleSize,
    Threshold,
    bucket_sizes,
)
from dspark_jax.decode.schedule.past import MEMORY, Past
from dspark_jax.decode.state import Requests

WEIGHING = ("early-stop", "stale-size", "stale-rate")  # schedulers that need step times
LAG = 2  # of the last two
PAST = 1 + LAG - 1 + MEMORY  # rows of a history in front of the orders: the count of rested rounds, blocks to look at
REST = "rest"  # named to measure a step that passes the drafter over


@dataclass(frozen=True)
class LengthCost:
    """As `StepCost`, from numbers on the device: seconds of steps in which each of `slots` requests verifies 0 … gamma drafts.

    Linear between them: within a bucket a step with fewer rows takes less time where rows choose experts, and what there is
    of a cliff between buckets lies between two of the measured lengths. For ever behind the last one.
    """

    seconds_of: Float[Array, "lengths"]
    slots: int
    plain: Float[Array, ""]

    def seconds(self, requests: Int[Array, ""], rows: Int[Array, "n"]) -> Float[Array, "n"]:
        """Of steps with so many rows; `requests` are always all."""
        measured = self.slots * jnp.arange(1, self.seconds_of.size + 1)
        return jnp.where(rows > measured[-1], jnp.inf, jnp.interp(rows, measured, self.seconds_of))

    def plain_seconds(self, requests: Int[Array, ""]) -> Float[Array, ""]:
        """Of a step that passes the drafter over; `requests` are always all."""
        return self.plain


class _Rest(FixedLength):
    """Never drafts."""

    rests = True


@dataclass(frozen=True)
class _Chosen:
    """The scheduler that a number on the device names."""

    schedulers: tuple[Scheduler, ...]
    number: Int[Array, ""]

    rests = True

    @property
    def history(self) -> int:
        return PAST - 1

    def lengths(self, block: Block, axis: str | None = None) -> Int[Array, "R"]:
        """See `Scheduler`."""
        return jax.lax.switch(self.number, [partial(s.lengths, axis=axis) for s in self.schedulers], block)

    def plan(self, block: Block, axis: str | None = None) -> tuple[Bool[Array, ""], Any]:
        """See `Resting`."""
        plans = [partial(s.plan, axis=axis) if isinstance(s, Past) else None for s in self.schedulers]
        shape = jax.eval_shape(next(filter(None, plans)), block)[1]

        def fixed(block: Block, rest: bool) -> tuple[Bool[Array, ""], Any]:
            return jnp.asarray(rest), jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shape)

        fixed_by = (partial(fixed, rest=isinstance(s, _Rest)) for s in self.schedulers)
        return jax.lax.switch(self.number, [own or none for own, none in zip(plans, fixed_by, strict=True)], block)


@dataclass(frozen=True)
class Contest(Schedule):
    """Fixed lengths, a threshold, and the schedulers that need step times, under one roof.

    Attributes:
      fixed: lengths of the first competitors.
      threshold: of the next one.
      buckets: ascending rows of an expert rank, the last one those of whole blocks.
      gamma: drafts of a block; every length up to it can be named for measuring, competitor or not.
    """

    scheduler: Scheduler = dataclasses.field(default_factory=FixedLength)
    fixed: tuple[int, ...] = ()
    threshold: float = 0.5
    buckets: tuple[int, ...] = ()
    gamma: int = 1

    @classmethod
    def of(
        cls, slots: int, gamma: int, fixed: Sequence[int], threshold: float, temperatures: tuple[float, ...] | None
    ) -> "Contest":
        """For `slots` requests of an expert rank; every fixed length has a bucket that it fills, and so have anchors alone."""
        buckets = bucket_sizes(slots, gamma, [slots * (1 + n) for n in (0, *fixed)])
        return cls(temperatures=temperatures, fixed=tuple(fixed), threshold=threshold, buckets=buckets, gamma=gamma)

    @property
    def names(self) -> tuple[str, ...]:
        """Competitors, in order."""
        return (*(f"fixed:{n}" for n in self.fixed), *self._adaptive)

    @property
    def measured(self) -> tuple[str, ...]:
        """By which the seconds of a step are measured: the fixed lengths 0 … gamma, and a step without drafting."""
        return (*(f"fixed:{n}" for n in range(self.gamma + 1)), REST)

    @property
    def rests(self) -> bool:
        return True

    @property
    def _adaptive(self) -> tuple[str, ...]:
        return f"threshold:{self.threshold:g}", *WEIGHING

    @property
    def _orders(self) -> int:
        """Rows of a history that the orders fill: the competitor's number and gamma + 2 times."""
        return -(-(self.gamma + 3) // self.gamma)

    def orders(self, name: str, seconds: Sequence[float], slots: int) -> Float[np.ndarray, "slots history gamma"]:
        """The history with which `name` begins, with the seconds of steps as in `measured`; new requests are certain."""
        said = np.ones(self._orders * self.gamma)
        said[: len(seconds) + 1] = [(*self.measured, *self._adaptive).index(name), *seconds]
        history = np.ones((slots, PAST + self._orders, self.gamma))
        history[:, PAST:] = said.reshape(-1, self.gamma)
        return history

    def init(self, slots: int, gamma: int) -> Float[Array, "R history gamma"]:
        return jnp.ones((slots, PAST + self._orders, gamma), jnp.float32)

    def step(
        self,
        requests: Requests,
        committed: Int[Array, "R"],
        stale: Float[Array, "R history gamma"],
        axis: str | None = None,
        plan: Plan | None = None,
    ) -> tuple[Requests, Float[Array, "R history gamma"]]:
        requests, past = self._chosen(stale).step(requests, committed, stale[:, :PAST], axis, plan)
        return requests, jnp.concatenate([past, stale[:, PAST:]], axis=1)

    def plan(
        self, requests: Requests, committed: Int[Array, "R"], stale: Float[Array, "R history gamma"], axis: str | None = None
    ) -> Plan | None:
        return self._chosen(stale).plan(requests, committed, stale[:, :PAST], axis)

    def _chosen(self, stale: Float[Array, "R history gamma"]) -> Schedule:
        number, *seconds, plain = stale[0, PAST:].reshape(-1)[: self.gamma + 3]
        cost: Any = LengthCost(jnp.stack(seconds), stale.shape[0], plain)
        weighing = (EarlyStop(cost), StaleSize(cost, LAG), StaleRate(cost, LAG))
        schedulers = (*map(FixedLength, range(self.gamma + 1)), _Rest(0), Threshold(self.threshold), *weighing)
        return Schedule(_Chosen(schedulers, number.astype(jnp.int32)), self.temperatures)
