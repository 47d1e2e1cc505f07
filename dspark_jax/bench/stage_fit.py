"""Rates of the stages' cost model (`parallel.stage_cost`), fitted to measured seconds."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from scipy.optimize import least_squares

from dspark_jax.parallel.stage_cost import CostModel

# What is fitted; names that share a line are multiplied by one factor, because no measurement tells them apart.
UNKNOWN = (
    ("read_bandwidth",),
    ("matmul_rate",),
    ("overlap",),
    ("layer_launches",),
    ("compressor_launches",),
    ("indexer_launches",),
    ("head_launches", "step_launches"),
    ("logit_passes",),
    ("head_passes",),
    ("block_spread",),
)
PRIOR = 0.01  # relative error that a factor e away from the given value is worth
FARTHEST = 20.0  # largest factor away from it


class Measured(NamedTuple):
    """A measurement: `cost` is what a cost model predicts for it."""

    cost: Callable[[CostModel], float]
    seconds: float


def fit(found: Sequence[Measured], base: CostModel) -> CostModel:
    """The model with the least squared relative errors of its predictions.

    The values of `UNKNOWN` are moved by factors from those of `base`, and what the measurements do not determine stays
    near them. Seconds of a launch stay those of `base`, and so does what is 0 there.

    Raises:
      ValueError: there is no measurement, or one is not positive.
    """
    seconds = np.array([m.seconds for m in found])
    if not len(seconds) or not (seconds > 0).all():
        raise ValueError(f"measured seconds are {seconds.tolist()}; expected at least one, all positive")

    def residuals(factors: np.ndarray) -> np.ndarray:
        return np.concatenate([errors(found, _moved(base, factors)), PRIOR * factors])

    reach = np.log(FARTHEST)
    return _moved(base, least_squares(residuals, np.zeros(len(UNKNOWN)), bounds=(-reach, reach)).x)


def errors(found: Sequence[Measured], model: CostModel) -> list[float]:
    """Predicted over measured seconds, less 1."""
    return [m.cost(model) / m.seconds - 1 for m in found]


def _moved(base: CostModel, factors: np.ndarray) -> CostModel:
    """`base` with the unknowns multiplied by e to the power of `factors`."""
    moves = zip(UNKNOWN, np.exp(factors), strict=True)
    changed = {name: float(getattr(base, name) * factor) for names, factor in moves for name in names}
    return replace(base, **changed | {"overlap": max(changed["overlap"], 1.0)})
