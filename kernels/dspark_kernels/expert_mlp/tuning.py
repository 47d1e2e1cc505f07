"""Block sizes by rows an expert and by format of the weights."""

from typing import Literal, NamedTuple

import jax.numpy as jnp

from dspark_kernels.block_scaled import BlockScaled
from dspark_kernels.expert_mlp.few_rows import Lanes
from dspark_kernels.expert_mlp.triton import Blocks, Weight

WeightFormat = Literal["f32", "bf16", "fp8", "fp4"]

FEW = 3  # rows an expert up to which tiles of 8 are read by programs of one warp


class Plan(NamedTuple):
    """Rows of a tile, and the sizes of both products: both `Blocks` of `triton` or both `Lanes` of `few_rows`."""

    block_m: int
    gate_up: Blocks | Lanes
    down: Blocks | Lanes


def weight_format(weight: Weight) -> WeightFormat:
    """The name of the format, by dtype."""
    if isinstance(weight, BlockScaled):
        return "fp4" if weight.codes.dtype == jnp.uint8 else "fp8"
    return "f32" if weight.dtype == jnp.float32 else "bf16"


def plan(entries: int, experts: int, kind: WeightFormat) -> Plan:
    """For `entries` (rows times experts of a row) over `experts`."""
    rows = entries / experts
    if rows <= FEW and kind in ("fp8", "fp4"):
        if entries <= 8:  # few programs: inputs are split, so that all processors have loads in flight
            return Plan(8, Lanes(8, 64, 8), Lanes(8, 64, 8))
        return Plan(8, Lanes(16, 64, 2 if entries <= 96 else 1), Lanes(16, 64, 1))
    block_m = 16 if rows <= 12 else 64 if rows <= 48 else 128
    if kind == "f32":
        return Plan(16, Blocks(64, 32, 4, 2), Blocks(64, 32, 4, 2))
    if block_m == 128:
        return Plan(block_m, Blocks(128, 64 if kind != "fp4" else 32, 8, 3), Blocks(128, 64, 8, 3))
    if kind == "bf16":
        return Plan(block_m, Blocks(128, 64, 4, 4), Blocks(128, 64, 4, 4))
    if kind == "fp8":
        return Plan(block_m, Blocks(128, 32, 4, 6), Blocks(128, 128 if block_m == 16 else 64, 4, 4))
    return Plan(block_m, Blocks(128, 32, 4, 6), Blocks(128, 32, 4, 6))
