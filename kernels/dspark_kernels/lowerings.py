"""What the operations' api modules share: which lowering runs, and gradients of kernels that have none."""

from collections.abc import Callable
from typing import Literal

import jax

Implementation = Literal["reference", "triton", "interpret"]


def choose(implementation: Implementation | None, unsuited: str | None) -> Implementation:
    """The lowering that runs: the one asked for, else Triton on CUDA where the shapes suit, else the reference.

    Args:
      implementation: "reference" (jnp), "triton" (CUDA only), "interpret" (the Triton kernel on any device, slow: for
        tests), or None.
      unsuited: why the kernel cannot take these arguments, None if it can.

    Raises:
      ValueError: an unknown name, or a kernel is asked for that cannot take the arguments.
    """
    if implementation not in (None, "reference", "triton", "interpret"):
        raise ValueError(f"implementation is {implementation!r}: expected None, 'reference', 'triton' or 'interpret'")
    if implementation is None:
        return "triton" if unsuited is None and jax.default_backend() == "gpu" else "reference"
    if implementation != "reference" and unsuited is not None:
        raise ValueError(f"implementation={implementation!r} does not suit: {unsuited}; use None or 'reference'")
    return implementation


def with_reference_gradient[Result](
    kernel: Callable[..., Result], reference: Callable[..., Result], *args: object
) -> Result:
    """`kernel(*args)`, differentiated as `reference(*args)`, which must return the same tree of shapes."""

    @jax.custom_jvp
    def call(*args: object) -> Result:
        return kernel(*args)

    @call.defjvp
    def _(primals: tuple, tangents: tuple) -> tuple[Result, Result]:
        return call(*primals), jax.jvp(reference, primals, tangents)[1]

    return call(*args)
