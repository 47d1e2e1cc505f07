"""What earlier blocks promised: the number of tokens to expect of a batch before it is drawn."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.decode.schedule.cost import StepCost
from dspark_jax.decode.schedule.interface import Block
from dspark_jax.errors import ConfigError, raise_all

BLOCKS = 64  # earlier blocks, of all requests together, that an expectation is a mean of
MEMORY = 32  # most of them of one request
PROBE = 16  # rounds without drafting end with one that drafts, for its confidences


class Expected(NamedTuple):
    """Of a step with 0, 1, … drafts a rank: `tokens`, summed over the ranks, and `seconds`; `drafts` a rank there can be.

    `plain` are the seconds of a step without drafting, infinite where they are not known.
    """

    tokens: Float[Array, "n"]
    seconds: Float[Array, "n"]
    drafts: Int[Array, ""]
    plain: Float[Array, ""]

    @property
    def price(self) -> Float[Array, ""]:
        """The best tokens a second of a step that drafts."""
        within = jnp.arange(self.tokens.size) <= self.drafts
        return jnp.max(jnp.where(within, self.tokens / self.seconds, 0))


@dataclass(frozen=True)
class Past:
    """A base for schedulers that plan a batch before it is drawn.

    The survivals that the active slots' blocks had in one earlier round, in their order of admission, are a guess of the
    next round's. One round of few requests is a poor guess, so it is the mean over the last rounds, as many as give BLOCKS
    blocks, but at most `memory`; none of them is younger than `lag` rounds. For a request that has not had that many, its
    own blocks are repeated; one that has had none counts as certain of its drafts (survival 1), and starts with all of them.

    Where the best expected rate is below that of a plain step (`StepCost.plain`; a cost without it never rests), the next
    round rests: the drafter only reads what is committed, and nothing is verified. Every `probe`-th such round drafts as usual.

    Exact: whether a round rests is fixed before its block would be drawn, by the blocks that also fix the size, `lag` rounds
    old or older (rested rounds count); today's confidences do not exist yet. A rested round is one of plain decoding. Under
    an expert axis the decision comes from sums over the ranks and is reduced to one value: all run the drafter, or none.

    Raises:
      ConfigError: the lag, the memory or the probe is below 1.
    """

    cost: StepCost
    lag: int = 2
    memory: int = MEMORY
    probe: int = PROBE

    def __post_init__(self) -> None:
        least = {"lag": "1 round: today's confidences must not choose the size", "memory": "1 round", "probe": "1 round"}
        bad = [name for name in least if not (isinstance(getattr(self, name), int) and getattr(self, name) >= 1)]
        faults = [f"{name} is {getattr(self, name)!r}; expected at least {least[name]}" for name in bad]
        raise_all(ConfigError, type(self).__name__, faults)

    @property
    def history(self) -> int:
        """See `Scheduler`."""
        return self.lag - 1 + self.memory

    @property
    def rests(self) -> bool:
        """See `Resting`."""
        return self.cost.plain is not None

    def plan(self, block: Block, axis: str | None = None) -> tuple[Bool[Array, ""], Expected]:
        """See `Resting`."""
        expected = self.expected(block, axis)
        rested = 0 if block.rested is None else jnp.max(jnp.where(block.active, block.rested, 0))
        rest = ((expected.price < expected.tokens[0] / expected.plain) & (rested < self.probe - 1)).astype(jnp.int32)
        if axis is not None:
            # Slots' counts differ between ranks, so one that must probe makes all ranks draft.
            rest = jax.lax.pmin(rest, axis)
        return rest > 0, expected

    def handed(self, block: Block, axis: str | None = None) -> Expected:
        """What `plan` has handed on; `expected` where it was not asked."""
        return self.expected(block, axis) if block.expected is None else block.expected

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
        plain = self.cost.plain_seconds(requests)
        seconds = self.cost.seconds(requests, requests + jnp.arange(tokens.size))
        return Expected(tokens, seconds, drafts, jnp.asarray(jnp.inf) if plain is None else plain)

    def _gains(self, block: Block, requests: Int[Array, ""]) -> Float[Array, "n"]:
        """Survivals in the order of admission, 0 behind the last candidate: the mean over as many rounds as `requests` need."""
        past = block.stale[:, : self.history]
        depth = past.shape[1] - self.lag + 1
        # The newest block that is `lag` rounds old; rounds rested since have made all of them older.
        newest = self.lag - 1 if block.rested is None else jnp.maximum(self.lag - 1 - block.rested, 0)[:, None]
        had = jnp.sum(past[:, :, 0] < 1, axis=1)[:, None] - newest  # only a block that never was has survivals of 1
        own = newest + jnp.arange(depth) % jnp.maximum(had, 1)
        past = jnp.take_along_axis(past, jnp.broadcast_to(own, (past.shape[0], depth))[:, :, None], axis=1)
        past = jnp.where(block.candidates[:, None] & (past > 0), past, 0)
        past = jnp.moveaxis(past, 1, 0).reshape(depth, -1)
        rounds = jnp.clip(-(-BLOCKS // jnp.maximum(requests, 1)), 1, depth)

        def mean(past: Float[Array, "h n"]) -> Float[Array, "n"]:
            ordered = -jnp.sort(-past, axis=1)
            return jnp.sum(jnp.where(jnp.arange(depth)[:, None] < rounds, ordered, 0), axis=0) / rounds

        # Many requests need one round, and sorting all of theirs would take longer than the rest of the schedule.
        return jax.lax.cond(rounds > 1, mean, lambda past: -jnp.sort(-past[0]), past)
