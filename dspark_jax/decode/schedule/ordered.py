"""Lengths that the host orders, for measurements."""

import dataclasses
from dataclasses import dataclass, field

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dspark_jax.decode.schedule.interface import Plan, Schedule, Scheduler
from dspark_jax.decode.schedule.threshold import FixedLength
from dspark_jax.decode.state import Requests


@dataclass(frozen=True)
class Ordered(Schedule):
    """Verifies as many drafts of a slot as its history says, at [slot, 0, 0]; nothing else is written there.

    Exact: the lengths depend on nothing that is drawn. A fresh request begins with length 1, as histories begin with ones.
    """

    scheduler: Scheduler = field(default_factory=FixedLength)

    def init(self, slots: int, gamma: int) -> Float[Array, "R 1 gamma"]:
        return jnp.ones((slots, 1, gamma), jnp.float32)

    def step(
        self,
        requests: Requests,
        committed: Int[Array, "R"],
        stale: Float[Array, "R 1 gamma"],
        axis: str | None = None,
        plan: Plan | None = None,
    ) -> tuple[Requests, Float[Array, "R 1 gamma"]]:
        ordered = jnp.minimum(stale[:, 0, 0].astype(jnp.int32), requests.num_drafts)
        drafted = requests.active & (committed > 0)
        return dataclasses.replace(requests, num_drafts=jnp.where(drafted, ordered, requests.num_drafts)), stale
