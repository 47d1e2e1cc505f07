"""Loads of expert ranks under a placement, and how uneven they are."""

import numpy as np
from jaxtyping import Float, Int, Num


def rank_shares(slot_to_expert: Int[np.ndarray, "slots"], num_experts: int, ranks: int) -> Float[np.ndarray, "E ranks"]:
    """The part of each expert's rows that each rank gets: an expert's rows are spread evenly over its replicas."""
    shares = np.zeros((num_experts, ranks))
    slot_rank = np.arange(len(slot_to_expert)) // (len(slot_to_expert) // ranks)
    np.add.at(shares, (slot_to_expert, slot_rank), 1)
    return shares / np.bincount(slot_to_expert, minlength=num_experts)[:, None]


def rank_loads(
    load: Num[np.ndarray, "... E"], slot_to_expert: Int[np.ndarray, "slots"], ranks: int
) -> Float[np.ndarray, "... ranks"]:
    """Rows of each rank, from rows of each expert of a layer (any leading axes, such as iterations)."""
    return np.asarray(load, np.float64) @ rank_shares(slot_to_expert, np.shape(load)[-1], ranks)


def imbalance(loads: Num[np.ndarray, "... ranks"]) -> Float[np.ndarray, "..."]:
    """max / mean - 1 over the ranks: 0 when balanced, and where there is no load at all."""
    mean = np.mean(loads, axis=-1)
    return np.max(loads, axis=-1) / np.where(mean > 0, mean, 1) - (mean > 0)
