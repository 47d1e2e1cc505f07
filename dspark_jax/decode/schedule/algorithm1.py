"""Algorithm 1 of the paper: admit drafts by survival as long as the expected rate of tokens rises."""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Int

from dspark_jax.decode.schedule.cost import StepCost, expected_rate
from dspark_jax.decode.schedule.interface import Block, survival
from dspark_jax.decode.schedule.order import admission_rank, admitted


@dataclass(frozen=True)
class EarlyStop:
    """Greedy with an early stop (paper, Algorithm 1).

    The drafts of all requests are admitted in the order of `admission_rank`. Before each one the expected rate
    Theta = tau / T is compared with the best so far, where tau is the number of requests plus the survivals admitted;
    at the first admission that would not raise it, the batch is closed.

    Exact: up to that point Theta is a function of survivals that know admitted drafts only. What stands behind the stop is
    not looked at, even where a cost curve with steps would make a longer batch worth while: a search over the whole path
    would let confidence j + 1, which has seen draft j, decide whether draft j is verified.

    Under an expert axis every rank plans for its own rows, with the cost of a rank that is loaded like itself: today's
    confidences are compared within a rank only. The ranks then have batches of different sizes, and the largest one
    chooses the bucket (`packed_rows`), which changes no result.
    """

    cost: StepCost

    @property
    def history(self) -> int:
        """See `Scheduler`."""
        return 0

    def lengths(self, block: Block, axis: str | None = None) -> Int[Array, "R"]:
        """See `Scheduler`."""
        rank, gains = admission_rank(survival(block.confidence), block.candidates)
        requests = jnp.sum(block.active, dtype=jnp.int32)
        tokens = requests + jnp.concatenate([jnp.zeros(1), jnp.cumsum(gains)])
        rate = expected_rate(self.cost, requests, tokens)
        rises = (rate[1:] > rate[:-1]) & (gains > 0)
        count = jnp.sum(jnp.cumprod(rises.astype(jnp.int32)), dtype=jnp.int32)
        return admitted(rank, block.candidates, count)
