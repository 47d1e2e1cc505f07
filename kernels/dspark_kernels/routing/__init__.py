"""Routing of rows to experts."""

from dspark_kernels.routing.reference import Routing, expert_load, route

__all__ = ["Routing", "expert_load", "route"]
