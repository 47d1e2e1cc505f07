"""Routing of rows to experts, and of experts to their slots."""

from dspark_kernels.routing.api import choose_slots, route, route_to_slots
from dspark_kernels.routing.reference import Routing, Score, SlotRouting, expert_load

__all__ = ["Routing", "Score", "SlotRouting", "choose_slots", "expert_load", "route", "route_to_slots"]
