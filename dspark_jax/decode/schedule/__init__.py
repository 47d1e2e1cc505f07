"""How many drafts of each request the target verifies in the next round (paper section "Confidence-scheduled verification").

docs/scheduling.md compares the schedulers and says why each of them leaves the output's law alone.
"""

from dspark_jax.decode.schedule.algorithm1 import EarlyStop
from dspark_jax.decode.schedule.buckets import bucket_index, bucket_sizes, packed_rows
from dspark_jax.decode.schedule.cost import StepCost, expected_rate
from dspark_jax.decode.schedule.interface import Block, Plan, Schedule, Scheduler, survival
from dspark_jax.decode.schedule.ordered import Ordered
from dspark_jax.decode.schedule.production import StaleRate, StaleSize
from dspark_jax.decode.schedule.threshold import FixedLength, Threshold

__all__ = [
    "Block",
    "EarlyStop",
    "FixedLength",
    "Ordered",
    "Plan",
    "Schedule",
    "Scheduler",
    "StaleRate",
    "StaleSize",
    "StepCost",
    "Threshold",
    "bucket_index",
    "bucket_sizes",
    "expected_rate",
    "packed_rows",
    "survival",
]
