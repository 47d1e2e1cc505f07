"""Requests for the tiny model of `mesh_model`."""

import functools

import numpy as np

from dspark_jax.decode.sampling import SamplingParams
from helpers.mesh_model import VOCAB


@functools.cache
def requests(count: int = 8, seed: int = 3) -> list[tuple[list[int], SamplingParams]]:
    """Ragged prompts, greedy and sampled, some with stop tokens."""
    rng = np.random.default_rng(seed)
    found = []
    for i in range(count):
        prompt = rng.integers(0, VOCAB, int(rng.integers(1, 20))).tolist()
        stop = tuple(rng.integers(0, VOCAB, 2).tolist()) if i % 3 == 2 else ()
        found.append((prompt, SamplingParams(float(i % 2) * 0.9, 0, 0.95, i, int(rng.integers(4, 30)), stop)))
    return found
