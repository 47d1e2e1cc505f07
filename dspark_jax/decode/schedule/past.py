"""What earlier blocks promised: the number of tokens to expect of a batch before it is drawn."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dspark_jax.decode.schedule.cost import StepCost
from dspark_jax.decode.schedule.interface import Block
from dspark_jax.errors import ConfigError, raise_all

BLOCKS = 64  # earlier blocks, of all requests together, that an expectation is a mean of
MEMORY = 32  # most of them of one request


class Expected(NamedTuple):
    """Of a step with 0, 1, … drafts a rank: `tokens`, summed over the ranks, and `seconds`; `drafts` a rank there can be."""

    tokens: Float[Array, "n"]
    seconds: Float[Array, "n"]
    drafts: Int[Array, ""]


@dataclass(frozen=True)
class Past:
    """A base for schedulers that plan a batch before it is drawn.

    The survivals that the active slots' blocks had in one earlier round, in their order of admission, are a guess of the
    next round's. One round of few requests is a poor guess, so it is the mean over the last rounds, as many as give BLOCKS
    blocks, but at most `memory`; none of them is younger than `lag` rounds. For a request that has not had that many, its
    own blocks are repeated; one that has had none counts as certain of its drafts (survival 1), and starts with all of them.

    Raises:
      ConfigError: the lag or the memory is below 1.
    """

    cost: StepCost
    lag: int = 2
    memory: int = MEMORY

    def __post_init__(self) -> None:
        least = {"lag": "1 round: today's confidences must not choose the size", "memory": "1 round"}
        bad = [name for name in least if not (isinstance(getattr(self, name), int) and getattr(self, name) >= 1)]
        faults = [f"{name} is {getattr(self, name)!r}; expected at least {least[name]}" for name in bad]
        raise_all(ConfigError, type(self).__name__, faults)

    @property
    def history(self) -> int:
        """See `Scheduler`."""
        return self.lag - 1 + self.memory

    def expected(self, block: Block, axis: str | None = None) -> Expected:
        """Tokens and seconds by number of drafts, from stale survivals and the cost alone; equal on all ranks of `axis`."""
        requests = jnp.sum(block.active, dtype=jnp.int32)
        drafts = jnp.sum(block.candidates, dtype=jnp.int32)
        everyone = requests if axis is None else jax.lax.psum(requests, axis)
        gains = self._gains(block, everyone)
        tokens = requests + jnp.concatenate([jnp.zeros(1), jnp.cumsum(gains)])
        if axis is not None:
            tokens = jax.lax.psum(tokens, axis)
            requests, drafts = jax.lax.pmax((requests, drafts), axis)
        return Expected(tokens, self.cost.seconds(requests, requests + jnp.arange(tokens.size)), drafts)

    def _gains(self, block: Block, requests: Int[Array, ""]) -> Float[Array, "n"]:
        """Survivals in the order of admission, 0 behind the last candidate: the mean over as many rounds as `requests` need."""
        past = block.stale[:, self.lag - 1 : self.history]
        depth = past.shape[1]
        had = jnp.sum(past[:, :, 0] < 1, axis=1)  # only a block that never was has survivals of 1
        own = jnp.arange(depth) % jnp.maximum(had, 1)[:, None]
        past = jnp.take_along_axis(past, own[:, :, None], axis=1)
        past = jnp.where(block.candidates[:, None] & (past > 0), past, 0)
        past = jnp.moveaxis(past, 1, 0).reshape(depth, -1)
        rounds = jnp.clip(-(-BLOCKS // jnp.maximum(requests, 1)), 1, depth)

        def mean(past: Float[Array, "h n"]) -> Float[Array, "n"]:
            ordered = -jnp.sort(-past, axis=1)
            return jnp.sum(jnp.where(jnp.arange(depth)[:, None] < rounds, ordered, 0), axis=0) / rounds

        # Many requests need one round, and sorting all of theirs would take longer than the rest of the schedule.
        return jax.lax.cond(rounds > 1, mean, lambda past: -jnp.sort(-past[0]), past)
