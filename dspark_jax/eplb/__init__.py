"""Static expert load balancing: configuration, placement, validation, statistics and planning. Host only, in numpy."""

from dspark_jax.eplb.collect import ExpertCounter
from dspark_jax.eplb.config import LoadBalancerConfig, load_config, save_config
from dspark_jax.eplb.namespace import DraftExperts, ExpertLayers
from dspark_jax.eplb.placement import LayerTables, Placement, auto_assignment, collapse_by_slot, expand_by_slot
from dspark_jax.eplb.planner import assign, plan
from dspark_jax.eplb.report import LoadReport, load_report
from dspark_jax.eplb.statistics import ExpertStatistics, StatisticsError, StatisticsRecorder, read_statistics
from dspark_jax.eplb.validation import PlacementNotice, PlacementSource, placement_faults, resolve_placement

__all__ = [
    "DraftExperts",
    "ExpertCounter",
    "ExpertLayers",
    "ExpertStatistics",
    "LayerTables",
    "LoadBalancerConfig",
    "LoadReport",
    "Placement",
    "PlacementNotice",
    "PlacementSource",
    "StatisticsError",
    "StatisticsRecorder",
    "assign",
    "auto_assignment",
    "collapse_by_slot",
    "expand_by_slot",
    "load_config",
    "load_report",
    "placement_faults",
    "plan",
    "read_statistics",
    "resolve_placement",
    "save_config",
]
