"""The order in which drafts of several requests compete for a place in the verify batch."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def admission_rank(
    survival: Float[Array, "R gamma"], candidates: Bool[Array, "R gamma"]
) -> tuple[Int[Array, "R gamma"], Float[Array, "n"]]:
    """The place of every draft in the order of admission, and the survivals in that order (0 behind the last candidate).

    Higher survival first; among equals the smaller position, then the smaller slot. Survival does not rise with the
    position, so the drafts of a slot stand in their own order, and the first K of the order are a prefix of every block.

    The order can be read as a process: of every slot the first draft that is not yet admitted competes, and the one of
    the largest survival is admitted. Its survival needs the drafts in front of it alone, all of them admitted before. So
    a draft's place depends on no token that is not in front of it, neither in its own slot nor, through the competition,
    in another: stopping anywhere by numbers known so far leaves the output's law alone.
    """
    slots, gamma = survival.shape
    key = jnp.where(candidates & (survival > 0), survival, 0)
    flat = key.T.reshape(-1)  # by position, then slot: the order of ties, since the sort is stable
    order = jnp.argsort(-flat, stable=True)
    place = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype))
    return place.reshape(gamma, slots).T, flat[order]


def admitted(rank: Int[Array, "R gamma"], candidates: Bool[Array, "R gamma"], count: Int[Array, ""]) -> Int[Array, "R"]:
    """Lengths by slot when the first `count` drafts of the order are admitted."""
    return jnp.sum((rank < count) & candidates, axis=1, dtype=jnp.int32)
