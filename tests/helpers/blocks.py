"""Blocks with confidences and step times of one's choice, for schedulers without a model."""

from typing import Any

import jax
import numpy as np

from dspark_jax.decode.schedule import Block, Scheduler, StepCost, survival

_survival = jax.jit(survival)


def block_of(confidence, room=None, stale: np.ndarray | None = None) -> Block:
    """Numpy leaves: compiled functions take them as they are."""
    c = np.asarray(confidence, np.float32)
    room = np.full(len(c), c.shape[1]) if room is None else np.asarray(room)
    stale = np.ones((len(c), 2, c.shape[1])) if stale is None else stale
    leaves: tuple[Any, ...] = (c, room.astype(np.int32), room >= 0, stale.astype(np.float32))
    return Block(*leaves)


_lengths = jax.jit(lambda scheduler, block: scheduler.lengths(block), static_argnums=0)


def lengths(scheduler: Scheduler, block: Block) -> list[int]:
    return _lengths(scheduler, block).tolist()


def stairs(steps: dict[int, float], draft: float = 0.0) -> StepCost:
    """Seconds of the first step that holds the rows."""
    return StepCost(tuple(next(t for size, t in steps.items() if rows <= size) for rows in range(max(steps) + 1)), (draft,))


def stale_of(confidence) -> np.ndarray:
    """The same survivals in both earlier rounds."""
    a = np.asarray(_survival(np.asarray(confidence, np.float32)))
    return np.stack([a, a], axis=1)


def random_block(rng: np.random.Generator, slots: int = 4, gamma: int = 5) -> Block:
    """Confidences from a few values, so that there are ties and zeros."""
    values = np.float32([0, 0.25, 0.5, 0.75, 1])
    room = rng.integers(0, gamma + 1, slots)
    old = np.cumprod(rng.choice(values, (slots, 2, gamma)), axis=-1)
    return block_of(rng.choice(values, (slots, gamma)), room, old)


def thresholds_of(cost: StepCost, requests: int, gains: np.ndarray) -> list[float]:
    """Straight from the docstring: what going on from k drafts must be worth, the least over where to stop."""
    tokens = requests + np.r_[0, gains.cumsum()]
    seconds = np.asarray(cost.rows[requests:])[: len(gains) + 1] + cost.requests[-1]
    price = max(tokens / seconds)
    return [
        min(price * (seconds[j] - seconds[k]) * gains[k] / gains[k:j].sum() for j in range(k + 1, len(gains) + 1))
        for k in range(len(gains))
    ]


# Three requests, with stairs at 4, 8 and 16 rows and a draft cost of 1.
THREE = [[0.9, 0.8, 0.5], [0.6, 0.5, 0.9], [0.95, 0.9, 0.85]]
STAIRS = stairs({4: 5.0, 8: 5.5, 16: 9.0}, draft=1.0)
JAGGED = stairs({3: 5.0, 4: 7.2, 8: 7.3, 16: 12.0}, draft=1.0)
RISING = StepCost(tuple(np.cumsum(np.random.default_rng(5).uniform(0.02, 0.4, 25)).tolist()))
