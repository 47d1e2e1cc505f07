"""How evenly a placement loads the ranks, measured on statistics."""

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from dspark_jax.eplb.config import LoadBalancerConfig
from dspark_jax.eplb.loads import imbalance, rank_loads
from dspark_jax.eplb.placement import auto_assignment
from dspark_jax.eplb.statistics import ExpertStatistics
from dspark_jax.eplb.validation import row_faults, slot_faults
from dspark_jax.errors import ConfigError, raise_all

FIGURES = ("mean", "std", "imbalance", "total")


@dataclass(frozen=True)
class LoadReport:
    """Loads of the ranks, in rows, one entry a layer.

    `mean`, `std` and `imbalance` are taken over the ranks in each iteration that gave the layer rows, then averaged
    over these iterations, as TensorRT-LLM reports them: a rank waits for the fullest one in every iteration. `total` is
    what a planner can bring to 0.

    Attributes:
      layers: layer indices.
      mean: rows of a rank.
      std: standard deviation (unbiased) of the ranks' rows.
      imbalance: max / mean - 1.
      total: max / mean - 1 of the rows summed over the iterations.
      loads: [layers, ranks], rows summed over the iterations.
    """

    layers: tuple[int, ...]
    mean: Float[np.ndarray, "layers"]
    std: Float[np.ndarray, "layers"]
    imbalance: Float[np.ndarray, "layers"]
    total: Float[np.ndarray, "layers"]
    loads: Float[np.ndarray, "layers ranks"]

    def overall(self, layers: Container[int] | None = None) -> dict[str, float]:
        """Mean of each figure over the layers, or over those of them that are in `layers` (at least one)."""
        chosen = [layers is None or layer in layers for layer in self.layers]
        return {name: float(np.mean(getattr(self, name)[chosen])) for name in FIGURES}

    def as_dict(self) -> dict[str, Any]:
        """For JSON: figures of each layer, and of all."""
        figures = {name: getattr(self, name) for name in FIGURES}
        by_layer = {
            str(layer): {name: float(values[i]) for name, values in figures.items()} for i, layer in enumerate(self.layers)
        }
        return {"layers": by_layer, "all": self.overall()}


def load_report(statistics: ExpertStatistics, slot_to_expert: Int[np.ndarray, "layers slots"], expert_ranks: int) -> LoadReport:
    """Loads under a placement, a row of which belongs to each of `statistics.layers`.

    An expert's rows count as spread evenly over its replicas.
    """
    figures = []
    for layer, slots in zip(statistics.layers, slot_to_expert, strict=True):
        loads = rank_loads(statistics.by_iteration(layer), slots, expert_ranks)
        ran = loads[loads.sum(axis=1) > 0]
        std = ran.std(axis=1, ddof=1) if expert_ranks > 1 else np.zeros(len(ran))
        averages = [values.mean() if len(ran) else 0.0 for values in (ran.mean(axis=1), std, imbalance(ran))]
        figures.append((*averages, float(imbalance(loads.sum(axis=0))), loads.sum(axis=0)))
    mean, std, average, total, summed = (np.array(column) for column in zip(*figures, strict=True))
    return LoadReport(tuple(statistics.layers), mean, std, average, total, summed)


def placed(statistics: ExpertStatistics, config: LoadBalancerConfig, expert_ranks: int) -> Int[np.ndarray, "layers slots"]:
    """The placement that a load-balancer section gives the recorded layers; other layers of it are left alone.

    Raises:
      ConfigError: the section does not fit the statistics: every fault in one message.
    """
    layers, experts, rows = statistics.layers, statistics.num_experts, config.initial_global_assignments
    faults = [*slot_faults(config.num_slots, experts, expert_ranks)]
    if rows is not None:
        if missing := [layer for layer in layers if layer not in rows]:
            faults.append(f"layers {missing} are in the statistics, but missing from initial_global_assignments")
        rows = {layer: rows[layer] for layer in layers if layer in rows}
        faults += row_faults(rows, config.num_slots, experts)
    raise_all(ConfigError, "load_balancer", faults)
    assert config.num_slots is not None
    if rows is None:
        return np.tile(auto_assignment(experts, config.num_slots, expert_ranks), (len(layers), 1))
    return np.array([rows[layer] for layer in layers], np.int32)


def unbalanced(statistics: ExpertStatistics, expert_ranks: int) -> Int[np.ndarray, "layers slots"]:
    """The placement without balancing: contiguous parts of the experts, each expert once.

    Where the experts do not divide among the ranks there is no such placement; then the automatic one with the fewest
    slots.
    """
    slots = -(-statistics.num_experts // expert_ranks) * expert_ranks
    return np.tile(auto_assignment(statistics.num_experts, slots, expert_ranks), (len(statistics.layers), 1))
