"""`Placement`: which expert every slot holds, as numpy tables that become constants of the compiled program."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Shaped

from dspark_jax.errors import ConfigError, raise_all


class LayerTables(NamedTuple):
    """Tables of one MoE layer.

    Attributes:
      slot_to_expert: expert id of every slot.
      expert_slots: slots of every expert, ascending, padded with -1 to the largest replica count of all layers.
      replica_count: slots of every expert, at least 1.
      slot_to_rank: expert rank of every slot, the same in all layers.
    """

    slot_to_expert: Int[np.ndarray, "slots"]
    expert_slots: Int[np.ndarray, "E R"]
    replica_count: Int[np.ndarray, "E"]
    slot_to_rank: Int[np.ndarray, "slots"]


@dataclass(frozen=True, eq=False)
class Placement:
    """Tables of all MoE layers, row i for layer i of the namespace (draft stages behind the target's layers).

    Arrays are int32 and read-only. Two placements are equal when their digests are.

    Attributes:
      slot_to_expert: [layers, slots], the only table that is given; the others follow from it.
      num_experts: routed experts E of each layer.
      expert_ranks: ranks that the slots are split over, in equal contiguous parts.
      expert_slots: [layers, E, R], slots of every expert in ascending order, padded with -1; R is the largest replica
        count of all layers, so that the tables of all layers have one shape.
      replica_count: [layers, E].
      slot_to_rank: [slots].

    Raises:
      ConfigError: listing what keeps the table from being a placement.
    """

    slot_to_expert: Int[np.ndarray, "L slots"]
    num_experts: int
    expert_ranks: int
    expert_slots: Int[np.ndarray, "L E R"] = field(init=False, repr=False)
    replica_count: Int[np.ndarray, "L E"] = field(init=False, repr=False)
    slot_to_rank: Int[np.ndarray, "slots"] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        table = np.array(self.slot_to_expert, np.int32)
        raise_all(ConfigError, "placement", _table_faults(table, self.num_experts, self.expert_ranks))
        count = np.stack([np.bincount(row, minlength=self.num_experts) for row in table]).astype(np.int32)
        tables = {
            "slot_to_expert": table,
            "replica_count": count,
            "expert_slots": _slots_by_expert(table, count),
            "slot_to_rank": (np.arange(table.shape[1]) // (table.shape[1] // self.expert_ranks)).astype(np.int32),
        }
        for name, array in tables.items():
            array.setflags(write=False)
            object.__setattr__(self, name, array)

    @classmethod
    def auto(cls, num_layers: int, num_experts: int, num_slots: int, expert_ranks: int) -> "Placement":
        """Placement without any knowledge of the load, the same in all layers; see `auto_assignment`."""
        row = auto_assignment(num_experts, num_slots, expert_ranks)
        return cls(np.tile(row, (num_layers, 1)), num_experts, expert_ranks)

    @property
    def num_layers(self) -> int:
        """Layers of the namespace: L + S."""
        return self.slot_to_expert.shape[0]

    @property
    def num_slots(self) -> int:
        """Slots of each layer, over all ranks."""
        return self.slot_to_expert.shape[1]

    @property
    def slots_per_rank(self) -> int:
        """Slots of each layer on one rank."""
        return self.num_slots // self.expert_ranks

    @property
    def digest(self) -> str:
        """64 hexadecimal digits that identify the placement, the same on every host."""
        head = f"dspark_jax placement {self.slot_to_expert.shape} {self.num_experts} {self.expert_ranks}"
        return hashlib.sha256(head.encode() + self.slot_to_expert.astype("<i4").tobytes()).hexdigest()

    def layer(self, index: int) -> LayerTables:
        """Tables of layer `index` of the namespace."""
        return LayerTables(self.slot_to_expert[index], self.expert_slots[index], self.replica_count[index], self.slot_to_rank)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Placement) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


@dataclass(frozen=True)
class PlacedLayer:
    """One layer of a placement as a hashable value: a module holds it, and its tables become constants of the program."""

    placement: Placement
    index: int

    @property
    def num_slots(self) -> int:
        """Slots of the layer, over all ranks."""
        return self.placement.num_slots

    @property
    def tables(self) -> LayerTables:
        """The layer's tables; `expert_slots` is as wide as this layer's largest replica count, not as all layers'."""
        tables = self.placement.layer(self.index)
        return tables._replace(expert_slots=tables.expert_slots[:, : tables.replica_count.max()])


def auto_assignment(num_experts: int, num_slots: int, expert_ranks: int) -> Int[np.ndarray, "slots"]:
    """Each rank gets its contiguous share of the experts, then goes on into the next rank's (TensorRT-LLM's default).

    Slot s of rank r holds expert `(floor(r E / ranks) + s) mod E`. With `num_slots` a multiple of the ranks and at
    least E, every expert has a slot; with `num_slots` = E a multiple of the ranks this is the identity.
    """
    first = np.arange(expert_ranks) * num_experts // expert_ranks
    slots = first[:, None] + np.arange(num_slots // expert_ranks)
    return (slots % num_experts).reshape(-1).astype(np.int32)


def expand_by_slot(
    weights: Shaped[np.ndarray, "E ..."], slot_to_expert: Int[np.ndarray, "slots"]
) -> Shaped[np.ndarray, "slots ..."]:
    """Host weights (or scales, or biases) laid out by slot: a replicated expert is there once for every slot."""
    return np.asarray(weights)[slot_to_expert]


def collapse_by_slot(
    by_slot: Shaped[np.ndarray, "slots ..."], expert_slots: Int[np.ndarray, "E R"]
) -> Shaped[np.ndarray, "E ..."]:
    """Host weights by expert again, from each expert's first slot; the inverse of `expand_by_slot`."""
    return np.asarray(by_slot)[expert_slots[:, 0]]


def _table_faults(table: np.ndarray, experts: int, ranks: int) -> Sequence[str]:
    if table.ndim != 2 or not table.size:
        return [f"slot_to_expert has shape {list(table.shape)}; expected [layers, slots]"]
    faults = []
    if ranks < 1 or table.shape[1] % ranks:
        faults.append(f"{table.shape[1]} slots on {ranks} expert ranks; expected equally many on each")
    if table.min() < 0 or table.max() >= experts:
        return [*faults, f"slot_to_expert holds ids from {table.min()} to {table.max()}; expected [0, {experts})"]
    for layer, row in enumerate(table):
        if missing := sorted(set(range(experts)) - set(row.tolist())):
            faults.append(f"layer {layer}: experts {missing} have no slot")
    return faults


def _slots_by_expert(table: np.ndarray, count: np.ndarray) -> np.ndarray:
    slots = np.full((*count.shape, count.max()), -1, np.int32)
    order = np.argsort(table, axis=1, kind="stable")  # by expert, then by slot
    first = np.cumsum(count, axis=1) - count
    for layer, row in enumerate(table):
        by_expert = row[order[layer]]
        slots[layer, by_expert, np.arange(row.size) - first[layer, by_expert]] = order[layer]
    return slots
