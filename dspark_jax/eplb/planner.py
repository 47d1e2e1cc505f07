"""Planning: from expert statistics to a load-balancer section."""

from collections.abc import Callable
from typing import Literal, get_args

import numpy as np
from jaxtyping import Int, Num

from dspark_jax.eplb import solvers
from dspark_jax.eplb.config import LoadBalancerConfig
from dspark_jax.eplb.statistics import ExpertStatistics, StatisticsError
from dspark_jax.eplb.validation import slot_faults
from dspark_jax.errors import ConfigError, raise_all

Policy = Literal["search", "deepseek", "tensorrt"]


def plan(
    statistics: ExpertStatistics,
    expert_ranks: int,
    num_slots: int | None = None,
    *,
    policy: Policy = "search",
    num_groups: int = 1,
    num_nodes: int = 1,
) -> LoadBalancerConfig:
    """The section that places the experts of every recorded layer by its load.

    Args:
      statistics: of the iterations to plan for; see `ExpertStatistics.window`.
      expert_ranks: ranks that the slots are split over.
      num_slots: slots of each layer, by default one for every expert.
      policy: see `assign`.
      num_groups, num_nodes: of DeepSeek's hierarchical policy.

    Raises:
      ConfigError: listing the numbers that do not fit.
    """
    slots = statistics.num_experts if num_slots is None else num_slots
    load = statistics.load()
    raise_all(ConfigError, "plan", _faults(load, num_slots, expert_ranks, policy, num_groups, num_nodes))
    table = assign(load, slots, expert_ranks, policy=policy, num_groups=num_groups, num_nodes=num_nodes)
    rows = {layer: row.tolist() for layer, row in zip(statistics.layers, table, strict=True)}
    return LoadBalancerConfig(num_slots=slots, initial_global_assignments=rows)


def assign(
    load: Num[np.ndarray, "L E"],
    num_slots: int,
    expert_ranks: int,
    *,
    policy: Policy = "search",
    num_groups: int = 1,
    num_nodes: int = 1,
) -> Int[np.ndarray, "L slots"]:
    """Expert of every slot, for each layer by itself. Equal loads give equal placements, everywhere and always.

    Policies:
      search: starts from the placements of all policies below and lowers the largest rank load; never worse than any of
        them (`solvers.local_search`).
      deepseek: DeepSeek's; hierarchical where `num_groups` divides evenly among more than one node, else global.
      tensorrt: TensorRT-LLM's.

    Raises:
      ConfigError: listing the numbers that do not fit, or a load that is negative or not finite.
    """
    load = np.asarray(load)
    raise_all(ConfigError, "plan", _faults(load, num_slots, expert_ranks, policy, num_groups, num_nodes))

    def deepseek(groups: int, nodes: int) -> np.ndarray:
        return solvers.rebalance_experts(load, num_slots, groups, nodes, expert_ranks).slot_to_expert

    def search() -> np.ndarray:
        starts = [tensorrt(), deepseek(1, 1)]
        if num_nodes > 1:
            starts.append(deepseek(num_groups, num_nodes))
        return solvers.search(load, starts, expert_ranks)

    def tensorrt() -> np.ndarray:
        return solvers.solve(load, num_slots, expert_ranks)

    by_name: dict[str, Callable[[], np.ndarray]] = {
        "search": search,
        "deepseek": lambda: deepseek(num_groups, num_nodes),
        "tensorrt": tensorrt,
    }
    return by_name[policy]()


def check_experts(statistics: ExpertStatistics, num_experts: int) -> None:
    """Raises StatisticsError where the statistics count other experts than the model has."""
    if statistics.num_experts != num_experts:
        raise StatisticsError(
            f"the statistics count {statistics.num_experts} experts a layer, the model has {num_experts}; expected"
            " logical experts of this model (TensorRT-LLM counts slots while balancing is on: collect with it off)"
        )


def _faults(load: np.ndarray, slots: int | None, ranks: int, policy: str, groups: int, nodes: int) -> list[str]:
    """What does not fit; `slots` None: one for every expert."""
    faults = []
    if policy not in get_args(Policy):
        faults.append(f"policy is {policy!r}; expected {', '.join(get_args(Policy))}")
    if load.ndim != 2 or not load.size or not np.isfinite(load).all() or load.min() < 0:
        faults.append(f"the load has shape {list(load.shape)}; expected finite numbers >= 0, [layers, experts]")
    if ranks < 1:
        faults.append(f"{ranks} expert ranks; expected at least 1")
    elif load.ndim == 2:
        experts = load.shape[1]
        if slots is not None:
            faults += slot_faults(slots, experts, ranks)
        elif experts % ranks:
            faults.append(
                f"num_slots is not given, and one slot for each of the {experts} experts makes no multiple of the {ranks}"
                f" expert ranks: give a number of slots, such as {-(-experts // ranks) * ranks}"
            )
    if groups < 1 or nodes < 1:
        faults.append(f"{groups} expert groups on {nodes} nodes; expected at least 1 of each")
    return faults
