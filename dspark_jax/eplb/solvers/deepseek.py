"""DeepSeek's policies (deepseek-ai/EPLB): hierarchical over nodes and ranks, and global.

Loads are float32 as in the original. Its sort leaves the order of equal loads open; here it is the order of their ids.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, Num

from dspark_jax.errors import ConfigError, raise_all


class Rebalanced(NamedTuple):
    """Tables by layer.

    Attributes:
      slot_to_expert: expert of every slot; a row is one list of `initial_global_assignments`.
      expert_slots: slots of every expert in the order in which its replicas were made, padded with -1.
      replica_count: slots of every expert.
    """

    slot_to_expert: Int[np.ndarray, "L slots"]
    expert_slots: Int[np.ndarray, "L E R"]
    replica_count: Int[np.ndarray, "L E"]


def rebalance_experts(
    load: Num[np.ndarray, "L E"], num_slots: int, num_groups: int, num_nodes: int, num_ranks: int
) -> Rebalanced:
    """Hierarchical where the expert groups divide evenly among the nodes: groups go to nodes, and experts are
    replicated within their node. Else global, over all ranks alike.

    Raises:
      ConfigError: listing the numbers that do not divide, or too few slots.
    """
    load = np.asarray(load, np.float32)
    experts = load.shape[1]
    if num_groups < 1 or num_nodes < 1 or num_groups % num_nodes:
        num_groups = num_nodes = 1
    raise_all(ConfigError, "DeepSeek's policy", _faults(experts, num_slots, num_groups, num_nodes, num_ranks))
    order = _by_node(load, num_groups, num_nodes)
    per_node = np.take_along_axis(load, order, axis=1).reshape(-1, experts // num_nodes)
    local, rank_of_replica, count = _replicate(per_node, num_slots // num_nodes)
    slot_load = np.take_along_axis(per_node / count, local, axis=1)
    gpu, place = _pack(slot_load, num_ranks // num_nodes)
    slot = gpu * (num_slots // num_ranks) + place  # within the node
    back = np.argsort(slot, axis=1)
    local, rank_of_replica = (np.take_along_axis(a, back, axis=1) for a in (local, rank_of_replica))
    node_start = np.arange(num_nodes)[None, :, None] * (experts // num_nodes)
    ordered = (local.reshape(len(load), num_nodes, -1) + node_start).reshape(len(load), num_slots)
    slot_to_expert = np.take_along_axis(order, ordered, axis=1)
    replica_count = np.zeros(load.shape, np.int64)
    np.put_along_axis(replica_count, order, count.reshape(load.shape), axis=1)
    expert_slots = np.full((*load.shape, replica_count.max()), -1)
    layer = np.arange(len(load))[:, None]
    expert_slots[layer, slot_to_expert, rank_of_replica.reshape(len(load), -1)] = np.arange(num_slots)
    return Rebalanced(slot_to_expert, expert_slots, replica_count)


def _faults(experts: int, slots: int, groups: int, nodes: int, ranks: int) -> list[str]:
    faults = []
    if experts % groups:
        faults.append(f"{experts} experts in {groups} groups; expected a divisor of the number of experts")
    if ranks < 1 or ranks % nodes:
        faults.append(f"{ranks} expert ranks on {nodes} nodes; expected equally many on each node")
    if ranks < 1 or slots % ranks:
        faults.append(f"{slots} slots on {ranks} expert ranks; expected equally many on each rank")
    if slots < experts:
        faults.append(f"{slots} slots for {experts} experts; expected at least one for each")
    return faults


def _by_node(load: Float[np.ndarray, "L E"], groups: int, nodes: int) -> Int[np.ndarray, "L E"]:
    """Experts in the order node, group, expert, with the groups packed onto the nodes by their load."""
    layers, experts = load.shape
    size = experts // groups
    node, place = _pack(load.reshape(layers, groups, size).sum(axis=2), nodes)
    group = np.argsort(node * (groups // nodes) + place, axis=1)
    return (group[:, :, None] * size + np.arange(size)).reshape(layers, experts)


def _pack(load: Float[np.ndarray, "X n"], packs: int) -> tuple[Int[np.ndarray, "X n"], Int[np.ndarray, "X n"]]:
    """Pack of every item and its place there: equally many items a pack, the heaviest first into the lightest pack."""
    room = load.shape[1] // packs
    index = np.empty(load.shape, np.int64)
    place = np.zeros(load.shape, np.int64)
    if room == 1:
        index[:] = np.arange(packs)
        return index, place
    for row, order in enumerate(np.argsort(-load, axis=1, kind="stable")):
        weight, items = np.zeros(packs, np.float32), np.zeros(packs, np.int64)
        for item in order:
            pack = np.argmin(np.where(items < room, weight, np.inf))
            index[row, item], place[row, item] = pack, items[pack]
            items[pack] += 1
            weight[pack] += load[row, item]
    return index, place


def _replicate(
    load: Float[np.ndarray, "X n"], slots: int
) -> tuple[Int[np.ndarray, "X slots"], Int[np.ndarray, "X slots"], Int[np.ndarray, "X n"]]:
    """Expert of every slot, which replica of it the slot is, and replicas by expert: one each, then always another of
    the expert whose replicas carry most (ties: the lowest id).
    """
    rows, experts = load.shape
    expert = np.tile(np.arange(slots), (rows, 1))
    replica = np.zeros((rows, slots), np.int64)
    count = np.ones((rows, experts), np.int64)
    every = np.arange(rows)
    for slot in range(experts, slots):
        expert[:, slot] = heaviest = np.argmax(load / count, axis=1)
        replica[:, slot] = count[every, heaviest]
        count[every, heaviest] += 1
    return expert, replica, count
