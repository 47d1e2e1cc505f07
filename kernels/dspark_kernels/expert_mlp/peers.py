"""Other grouped products of bf16 weights [E, in, out], where they can be imported; for benchmarks."""

import functools
import importlib
from collections.abc import Callable

import jax
from jaxtyping import Array, Float, Int

Step = Callable[[Float[Array, "N in"], Float[Array, "E in out"], Int[Array, "E"]], Float[Array, "N out"]]


def steps(rows: int) -> dict[str, Step]:
    """By name; rows sorted by expert. `lax.ragged_dot` expands to dense products on GPUs: left out for many rows."""
    found: dict[str, Step] = {}
    if rows <= 64:
        found["lax.ragged_dot"] = lambda x, w, sizes: jax.lax.ragged_dot(x, w, sizes)
    try:
        from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu

        for block_m, block_n in ((64, 128), (128, 128)):
            options = {"block_m": block_m, "block_n": block_n, "block_k": 64, "max_concurrent_steps": 4, "grid_block_n": 4}
            found[f"ragged_dot_mgpu {block_m}x{block_n}"] = functools.partial(_mgpu, ragged_dot_mgpu.ragged_dot, options)
    except ImportError:
        pass
    try:
        tokamax = importlib.import_module("tokamax")
        found["tokamax"] = lambda x, w, sizes: tokamax.ragged_dot(x, w, sizes, implementation="mosaic")
    except ImportError:
        pass
    return found


def _mgpu(product: Callable, options: dict, x: Array, w: Array, sizes: Array) -> Array:
    return product(x, w, group_sizes=sizes, **options)
