"""What a call of the ring did, on the host: its commits, and what every rank worked on."""

from typing import Any, NamedTuple

import jax
import numpy as np

from dspark_jax.parallel.ring import TickOutput


class Tick(NamedTuple):
    """One tick of the pipeline: for each rank the microbatch it worked on and its valid rows (0: a bubble).

    `bucket` is the rows that it computed on every expert rank, filled up; None without a scheduler.
    """

    microbatch: tuple[int, ...]
    rows: tuple[int, ...]
    bucket: tuple[int, ...] | None = None


def read_output(output: TickOutput) -> tuple[Any, np.ndarray, list[Tick]]:
    """Emission and generation of the last rank, [ticks, slots, …], and the ticks."""
    host = jax.device_get(output)
    rows = host.rows.sum(axis=2)
    pipe, count = rows.shape
    ticks = []
    for t in range(count):
        bucket = None if host.bucket is None else tuple(int(n) for n in host.bucket[:, t, 0])
        microbatch = tuple((t - rank) % pipe for rank in range(pipe))
        ticks.append(Tick(microbatch, tuple(int(n) for n in rows[:, t]), bucket))
    return jax.tree.map(lambda x: x[-1], host.emission), host.generation[-1], ticks
