"""The drafter behind a branch that passes it over."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from dspark_jax.decode.protocols import Drafter, Proposal


def draft_unless(rest: Bool[Array, ""] | None, drafter: Drafter, inputs: tuple[Any, ...], old: Proposal) -> Proposal:
    """The slots' proposals: fresh ones by `drafter.propose(*inputs)` where slots are active, else the `old` ones.

    With `rest` the drafter is not run at all; the value must be equal on all ranks that its collectives span. None leaves
    the branch out of the program. A drafter's `choices`, where it has any, are then rows that count nowhere (id -1).
    """

    def drafted() -> tuple[Proposal, Any]:
        def pick(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(inputs[2].reshape(-1, *[1] * (new.ndim - 1)), new, old)

        return jax.tree.map(pick, drafter.propose(*inputs), old), getattr(drafter, "choices", ())

    if rest is None:
        return drafted()[0]
    none = jax.tree.map(lambda x: jnp.full(x.shape, -1, x.dtype), jax.eval_shape(drafted)[1])
    proposal, choices = jax.lax.cond(rest, lambda: (old, none), drafted)
    if choices:  # those of the branch do not exist outside of it
        setattr(drafter, "choices", choices)  # noqa: B010
    return proposal
