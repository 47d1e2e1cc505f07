"""The form for service: how many drafts comes from older confidences, which ones from today's."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dspark_jax.decode.schedule.cost import StepCost, expected_rate
from dspark_jax.decode.schedule.interface import Block, survival
from dspark_jax.decode.schedule.order import admission_rank, admitted
from dspark_jax.errors import ConfigError


@dataclass(frozen=True)
class StaleSize:
    """Size from the confidences of `lag` rounds ago, choice by today's (paper, section 5.2).

    The size K is the number of drafts whose expected rate of tokens is best on the whole cost curve, valleys included,
    judged by the survivals that the same slots' blocks had `lag` rounds ago (1 for a request that had none: it starts
    with all its drafts). Equal rates go to the smaller size. Then the K drafts of largest survival today are verified.

    Exact: K is fixed before today's drafts are drawn, and depends on blocks that have been dealt with: what of them was
    verified is part of the text, and what was not is forgotten, for draft noise is fresh every round (with noise keyed by
    absolute position alone, a forgotten draft would return, and K would know it). For a given K the choice is a stop at a
    fixed place of `admission_rank`, which looks at no token before it is admitted.

    Under an expert axis K is the same on every rank: the sums of stale survivals are added over the axis and the size is
    reduced to one number. Every rank then takes its own best K, so no confidence of today crosses ranks.

    Raises:
      ConfigError: the lag is below 1.
    """

    cost: StepCost
    lag: int = 2

    def __post_init__(self) -> None:
        if not (isinstance(self.lag, int) and self.lag >= 1):
            raise ConfigError(f"lag is {self.lag!r}; expected at least 1 round: today's confidences must not choose the size")

    def lengths(self, block: Block, axis: str | None = None) -> Int[Array, "R"]:
        """See `Scheduler`."""
        rank, _ = admission_rank(survival(block.confidence), block.candidates)
        return admitted(rank, block.candidates, self.size(block, axis))

    def size(self, block: Block, axis: str | None = None) -> Int[Array, ""]:
        """K, the drafts that a rank may verify in all; equal on all ranks of `axis`."""
        rate, drafts = self.rates(block, axis)
        best = jnp.argmax(jnp.where(jnp.arange(rate.size) <= drafts, rate, -1)).astype(jnp.int32)
        # Equal numbers went in; one more reduction makes the size equal whatever a rank's own rounding did.
        return best if axis is None else jax.lax.pmax(best, axis)

    def rates(self, block: Block, axis: str | None = None) -> tuple[Float[Array, "n"], Int[Array, ""]]:
        """Expected tokens a second with 0, 1, … drafts a rank, and how many drafts there are (on the rank with most)."""
        _, gains = admission_rank(block.stale[:, self.lag - 1], block.candidates)
        requests = jnp.sum(block.active, dtype=jnp.int32)
        drafts = jnp.sum(block.candidates, dtype=jnp.int32)
        tokens = requests + jnp.concatenate([jnp.zeros(1), jnp.cumsum(gains)])
        if axis is not None:
            tokens = jax.lax.psum(tokens, axis)
            requests, drafts = jax.lax.pmax((requests, drafts), axis)
        return expected_rate(self.cost, requests, tokens), drafts
