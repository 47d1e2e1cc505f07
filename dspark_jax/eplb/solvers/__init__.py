"""Solvers: from the load of each expert to the expert of each slot. Host arithmetic in numpy, deterministic."""

from dspark_jax.eplb.solvers.deepseek import rebalance_experts
from dspark_jax.eplb.solvers.local_search import search
from dspark_jax.eplb.solvers.tensorrt import place_replicas, replicate, solve

__all__ = ["place_replicas", "rebalance_experts", "replicate", "search", "solve"]
