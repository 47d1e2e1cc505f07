"""What a scheduler sees, what it answers, and how its answer enters the requests of a round.

The rule that every scheduler keeps: whether draft j of a request is verified may depend on tokens that are already
decided and on the drafts in front of j, never on draft j itself or on a later one. A draft that is left out for what it
is would be missing from the output as often as it was left out. Confidence j is a function of draft j - 1 and of what
the target has read, so it may decide about draft j; confidence j + 1 may not.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.decode.state import Requests
from dspark_jax.errors import ConfigError, raise_all

_BELOW_1 = float(np.nextafter(np.float32(1), np.float32(0)))


@struct.dataclass
class Block:
    """The drafts of R slots that wait for the target, as far as a scheduler may know them.

    Attributes:
      confidence: calibrated P(draft j survives | the drafts before it did), in [0, 1].
      room: the most drafts of a slot that may be verified; 0 where the slot is not `active`.
      active: slots that take part in the next round.
      stale: survivals of the slot's last `history` blocks, newest first; 1 where its request had none, and below 1 otherwise.
      rested: rounds in which nothing was drafted since the newest of them; 0 unless the scheduler rests.
      expected: what `Resting.plan` has handed on for this block; None without it.
    """

    confidence: Float[Array, "R gamma"]
    room: Int[Array, "R"]
    active: Bool[Array, "R"]
    stale: Float[Array, "R history gamma"]
    rested: Int[Array, "R"] | None = None
    expected: Any = None

    @property
    def candidates(self) -> Bool[Array, "R gamma"]:
        """Drafts that may be verified at all."""
        return jnp.arange(self.confidence.shape[1]) < self.room[:, None]


class Scheduler(Protocol):
    """A frozen, hashable object: its settings are constants of the compiled program."""

    @property
    def history(self) -> int:
        """How many earlier blocks' survivals it wants in `Block.stale`."""
        ...

    def lengths(self, block: Block, axis: str | None = None) -> Int[Array, "R"]:
        """Drafts to verify, 0 … `block.room`, for every slot.

        Traceable, without a sync with the host. `axis` names the mesh axis that the request rows are split over; only
        numbers from stale confidences may be reduced over it.
        """
        ...


class Resting(Scheduler, Protocol):
    """A scheduler that may let the drafter rest, where `rests`, a constant, says so: the next round is then a plain step."""

    @property
    def rests(self) -> bool: ...

    def plan(self, block: Block, axis: str | None = None) -> tuple[Bool[Array, ""], Any]:
        """Before a block is drawn (its confidences are zeros): whether to rest, equal on all ranks of `axis`; and
        `Block.expected`.
        """
        ...


@struct.dataclass
class Plan:
    """The next round: `rest`, whether nothing is drafted or verified, equal on all ranks; `expected` of `Resting.plan`."""

    rest: Bool[Array, ""]
    expected: Any = None


def survival(confidence: Float[Array, "R gamma"]) -> Float[Array, "R gamma"]:
    """a_j, the product of the first j confidences: P(draft j survives); NaN counts as 0.

    Multiplied from left to right, because only then rounding keeps it non-increasing in j, on which the prefix order of
    the schedulers rests.
    """
    confidence = jnp.where(confidence > 0, confidence, 0)
    product, out = jnp.ones_like(confidence[:, 0]), []
    for j in range(confidence.shape[1]):
        product = product * confidence[:, j]
        out.append(product)
    return jnp.stack(out, axis=1)


@dataclass(frozen=True)
class Schedule:
    """A scheduler with the temperatures that calibrate the drafter's confidence: c_j = sigmoid(logit_j / T_j).

    Raises:
      ConfigError: a temperature is no finite number above 0.
    """

    scheduler: Scheduler
    temperatures: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        bad = [t for t in self.temperatures or () if not (math.isfinite(t) and t > 0)]
        raise_all(ConfigError, "temperatures", [f"{t!r}; expected finite numbers above 0" for t in bad])

    @property
    def rests(self) -> bool:
        """Whether the scheduler may rest (`Resting`); if not, the program has no branch for it."""
        return bool(getattr(self.scheduler, "rests", False))

    def init(self, slots: int, gamma: int) -> Float[Array, "R history gamma"]:
        """The history of idle slots. Where the scheduler rests, its first row counts: 1 + rounds rested since a block."""
        return jnp.ones((slots, self.scheduler.history + self.rests, gamma), jnp.float32)

    def confidence(self, logits: Float[Array, "R gamma"]) -> Float[Array, "R gamma"]:
        """Calibrated probabilities.

        Raises:
          ConfigError: there are temperatures for another block size.
        """
        if self.temperatures is None:
            return jax.nn.sigmoid(logits)
        if len(self.temperatures) != logits.shape[1]:
            raise ConfigError(
                f"temperatures: {len(self.temperatures)} of them for a drafter of block size {logits.shape[1]}; expected"
                " one a position: calibrate this model again"
            )
        return jax.nn.sigmoid(logits / jnp.asarray(self.temperatures, logits.dtype))

    def step(
        self,
        requests: Requests,
        committed: Int[Array, "R"],
        stale: Float[Array, "R history gamma"],
        axis: str | None = None,
        plan: Plan | None = None,
    ) -> tuple[Requests, Float[Array, "R history gamma"]]:
        """Sets `num_drafts` of the slots that have just drafted; call it behind the draft.

        requests: with `num_drafts` at the most that the context allows. committed: `Emission.count` of the same tick.
        stale: the history by slot, handed back with today's survivals in front. plan: of the same tick, where the drafter
        may have rested; then the lengths are 0 and histories only count the round. Slots that committed nothing keep their
        length and their history.
        """
        if plan is None:
            plan = self.plan(requests, committed, stale, axis)
        confidence = self.confidence(requests.confidence)
        block, stale = self._block(requests, committed, stale, confidence)
        drafted = block.active
        chosen = self.scheduler.lengths(dataclasses.replace(block, expected=plan.expected) if plan else block, axis)
        if plan:
            chosen = jnp.where(plan.rest, 0, chosen)
        requests = dataclasses.replace(requests, num_drafts=jnp.where(drafted, chosen, requests.num_drafts))
        today = jnp.minimum(survival(confidence), _BELOW_1)[:, None]
        pushed = jnp.concatenate([today, block.stale], axis=1)[:, : block.stale.shape[1]]
        if plan:
            pushed = jnp.concatenate([jnp.ones_like(today), pushed], axis=1)
            pushed = jnp.where(plan.rest, stale.at[:, 0].add(1), pushed)
        return requests, jnp.where(drafted[:, None, None], pushed, stale)

    def plan(
        self, requests: Requests, committed: Int[Array, "R"], stale: Float[Array, "R history gamma"], axis: str | None = None
    ) -> Plan | None:
        """Whether the drafter rests in this tick; None where the scheduler never rests. Call it before drafting.

        Arguments as for `step`; the drafts and confidences in `requests` are not looked at.
        """
        if not self.rests:
            return None
        scheduler: Any = self.scheduler
        block, _ = self._block(requests, committed, stale, jnp.zeros_like(requests.confidence))
        return Plan(*scheduler.plan(block, axis))

    def _block(self, requests: Requests, committed, stale, confidence) -> tuple[Block, Float[Array, "R history gamma"]]:
        """The block as the scheduler sees it, and the whole history without what predecessors left in it."""
        drafted = requests.active & (committed > 0)
        # A request whose tokens all come from this tick has just left its prompt: the history is its predecessor's.
        first = (requests.emitted <= committed)[:, None, None]
        stale = jnp.where(first & drafted[:, None, None], 1.0, stale)
        rested = stale[:, 0, 0].astype(jnp.int32) - 1 if self.rests else None
        past = stale[:, 1:] if self.rests else stale
        return Block(confidence, jnp.where(drafted, requests.num_drafts, 0), drafted, past, rested), stale
