"""The form for service: how many drafts comes from older confidences, which ones from today's."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dspark_jax.decode.schedule.interface import Block, survival
from dspark_jax.decode.schedule.order import admission_rank, admitted
from dspark_jax.decode.schedule.past import Past


@dataclass(frozen=True)
class StaleSize(Past):
    """Size from the confidences of `lag` and more rounds ago, choice by today's (paper, section 5.2).

    The size K is the number of drafts whose expected rate of tokens is best on the whole cost curve, valleys included,
    judged by the survivals of earlier blocks (`Past`). Equal rates go to the smaller size. Then the K drafts of largest
    survival today are verified.

    Exact: K is fixed before today's drafts are drawn, and depends on blocks that have been dealt with, `lag` rounds old or
    older: what of them was verified is part of the text, and what was not is forgotten, for draft noise is fresh every round
    (with noise keyed by absolute position alone, a forgotten draft would return, and K would know it). How many such rounds
    K is a mean of changes nothing about that. For a given K the choice is a stop at a fixed place of `admission_rank`, which
    looks at no token before it is admitted.

    Under an expert axis K is the same on every rank: the sums of stale survivals are added over the axis and the size is
    reduced to one number. Every rank then takes its own best K, so no confidence of today crosses ranks.

    Raises:
      ConfigError: the lag, the memory or the probe is below 1.
    """

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
        expected = self.handed(block, axis)
        return expected.tokens / expected.seconds, expected.drafts


@dataclass(frozen=True)
class StaleRate(Past):
    """Algorithm 1 with foresight: what a draft must promise comes from older confidences, what it does from today's.

    Drafts are admitted in today's order of survival (`admission_rank`), each as long as it is worth its time. The price of a
    second is the best expected rate of tokens, Theta, by the survivals of earlier blocks (`Past`). Where a step gets dear at
    the next draft and cheap behind it, the drafts behind count too, as many tokens as earlier blocks promised there, in
    proportion to the next draft's own survival. So the draft behind k others is admitted if for some j > k

        s · (G[j] − G[k]) / g[k]  >  Theta · (T[j] − T[k]),

    with its survival s, the earlier blocks' survivals g in their order, their sums G, and the seconds T of a step by number
    of drafts. Solved for s, this is a list of thresholds, one for each k.

    Exact: the thresholds are fixed before today's drafts are drawn, by the same numbers as the size of `StaleSize`. Whether
    the next draft is admitted then depends on its survival and those of the ones before it in the order, which know
    admitted drafts only. What today's block promises behind it is not looked at; earlier blocks stand for it.

    Under an expert axis the thresholds come from sums over the ranks, and every rank compares its own drafts with them.

    Raises:
      ConfigError: the lag, the memory or the probe is below 1.
    """

    def lengths(self, block: Block, axis: str | None = None) -> Int[Array, "R"]:
        """See `Scheduler`."""
        rank, today = admission_rank(survival(block.confidence), block.candidates)
        worth = (today > self.thresholds(block, axis)) & (today > 0)
        count = jnp.sum(jnp.cumprod(worth.astype(jnp.int32)), dtype=jnp.int32)
        return admitted(rank, block.candidates, count)

    def thresholds(self, block: Block, axis: str | None = None) -> Float[Array, "n"]:
        """The survival that the draft behind 0, 1, … others must exceed."""
        expected = self.handed(block, axis)
        places = jnp.arange(expected.tokens.size)
        within = places <= expected.drafts
        price = expected.price
        # [k, j]: what going on from k to j drafts takes, in tokens, and brings, in multiples of the next draft's survival.
        takes = price * (expected.seconds - expected.seconds[:-1, None])
        next_one = jnp.diff(expected.tokens)[:, None]
        brings = (expected.tokens - expected.tokens[:-1, None]) / jnp.where(next_one > 0, next_one, 1)
        steps = places - places[:-1, None]
        brings = jnp.clip(brings, 1, jnp.maximum(steps, 1))  # survivals fall; rounding must not make them rise
        ranks = 1 if axis is None else jax.lax.psum(1, axis)  # the price is that of all ranks together
        return jnp.min(jnp.where((steps > 0) & within, takes / brings, jnp.inf), axis=1) / ranks
