"""Looking into traced programs."""

from collections.abc import Iterator

import jax


def equations(jaxpr) -> Iterator:
    """Every equation, those of inner programs too."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in jax.tree.leaves(tuple(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)
