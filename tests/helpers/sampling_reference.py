"""The slow, obvious version of temperature, top-k and top-p: sort, cut, renormalise, in float64."""

import numpy as np


def softmax(x: np.ndarray) -> np.ndarray:
    x = np.asarray(x, np.float64)
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def ranking(logits: np.ndarray) -> np.ndarray:
    """Ids of one row from the largest logit down, ties by the lowest id."""
    return np.lexsort((np.arange(len(logits)), -np.asarray(logits, np.float64)))


def reference_law(logits: np.ndarray, temperature: float, top_k: int = 0, top_p: float = 1.0) -> np.ndarray:
    """The distribution [V] that one row of logits [V] is sampled from."""
    logits = np.asarray(logits, np.float64)
    order = ranking(logits)
    law = np.zeros(len(logits))
    if temperature == 0:
        law[order[0]] = 1
        return law
    kept = order[: top_k or None]
    mass = softmax(logits[kept] / temperature)
    if top_p < 1:
        size = int(np.searchsorted(np.cumsum(mass), top_p * (1 - 1e-7))) + 1
        kept, mass = kept[:size], mass[:size]
    law[kept] = mass / mass.sum()
    return law
