"""TensorRT-LLM's own solver: replicas by a heap, then always the heaviest replica to the lightest rank."""

import heapq

import numpy as np
from jaxtyping import Int, Num

from dspark_jax.errors import ConfigError, raise_all


def solve(load: Num[np.ndarray, "L E"], num_slots: int, num_ranks: int) -> Int[np.ndarray, "L slots"]:
    """Expert of every slot, layer by layer.

    Raises:
      ConfigError: the slots do not divide among the ranks, or are fewer than the experts.
    """
    load = np.asarray(load, np.float64)
    faults = []
    if num_ranks < 1 or num_slots % num_ranks:
        faults.append(f"{num_slots} slots on {num_ranks} expert ranks; expected equally many on each rank")
    if num_slots < load.shape[1]:
        faults.append(f"{num_slots} slots for {load.shape[1]} experts; expected at least one for each")
    raise_all(ConfigError, "TensorRT-LLM's solver", faults)
    return np.array([place_replicas(row, replicate(row, num_slots), num_ranks).reshape(-1) for row in load])


def replicate(load: Num[np.ndarray, "E"], num_slots: int) -> Int[np.ndarray, "E"]:
    """Replicas of every expert: one each, then always another of the expert whose replicas carry most (ties: the
    highest id). Without any load they are spread evenly, the first experts one more.
    """
    experts = len(load)
    if not np.sum(load):
        return num_slots // experts + (np.arange(experts) < num_slots % experts)
    count = np.ones(experts, np.int64)
    heap = [(-load[e], -e) for e in range(experts)]
    heapq.heapify(heap)
    for _ in range(num_slots - experts):
        expert = -heap[0][1]
        count[expert] += 1
        heapq.heapreplace(heap, (-load[expert] / count[expert], -expert))
    return count


def place_replicas(
    load: Num[np.ndarray, "E"], replicas: Int[np.ndarray, "E"], num_ranks: int
) -> Int[np.ndarray, "ranks slots_per_rank"]:
    """Expert of every slot, by rank: replicas by falling size (ties: rising id), each to the rank with the least load
    that has room (ties: the lowest rank), in order of arrival.
    """
    size = np.asarray(load, np.float64) / replicas
    items = np.repeat(np.arange(len(load)), replicas)
    room = len(items) // num_ranks
    slots = np.empty((num_ranks, room), np.int64)
    carried, held = np.zeros(num_ranks), np.zeros(num_ranks, np.int64)
    for expert in items[np.argsort(-size[items], kind="stable")]:
        rank = np.argmin(np.where(held < room, carried, np.inf))
        slots[rank, held[rank]] = expert
        held[rank] += 1
        carried[rank] += size[expert]
    return slots
