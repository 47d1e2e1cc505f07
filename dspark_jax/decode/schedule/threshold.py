"""Schedulers that look at one request at a time: a fixed length, and a cut at the first doubtful draft."""

import math
from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Int

from dspark_jax.decode.schedule.interface import Block
from dspark_jax.errors import ConfigError


@dataclass(frozen=True)
class FixedLength:
    """The first `length` drafts of every block, all of them where it is None.

    Exact: the length depends on nothing that is drawn.

    Raises:
      ConfigError: the length is negative or no integer.
    """

    length: int | None = None

    def __post_init__(self) -> None:
        if self.length is not None and not (isinstance(self.length, int) and self.length >= 0):
            raise ConfigError(f"length is {self.length!r}; expected an integer >= 0, or None for the whole block")

    @property
    def history(self) -> int:
        """See `Scheduler`."""
        return 0

    def lengths(self, block: Block, axis: str | None = None) -> Int[Array, "R"]:
        """See `Scheduler`."""
        return block.room if self.length is None else jnp.minimum(block.room, self.length)


@dataclass(frozen=True)
class Threshold:
    """Up to the first draft whose own confidence is below `threshold` (0 or less: the whole block).

    Exact: draft j is cut for confidence j or an earlier one, and those know the drafts in front of j alone. Confidence
    j + 1, which has seen draft j, is not asked about it.

    Raises:
      ConfigError: the threshold is no number, or above 1.
    """

    threshold: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.threshold) and self.threshold <= 1):
            raise ConfigError(f"threshold is {self.threshold!r}; expected a number <= 1 (0 or less: the whole block)")

    @property
    def history(self) -> int:
        """See `Scheduler`."""
        return 0

    def lengths(self, block: Block, axis: str | None = None) -> Int[Array, "R"]:
        """See `Scheduler`."""
        if self.threshold <= 0:
            return block.room
        kept = (block.confidence >= self.threshold) & block.candidates
        return jnp.sum(jnp.cumprod(kept.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
