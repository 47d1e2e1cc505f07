"""Sizes of a launch by rows and matrix: what was measured, and a rule for the rest."""

from dspark_kernels.block_linear.triton import Plan
from dspark_kernels.expert_mlp.few_rows import Lanes
from dspark_kernels.expert_mlp.triton import Blocks

MOST_ROWS = 512  # of the kernels on CUDA; with more rows widened weights, written and read once, cost less than slower products
PROCESSORS = 132  # of an H200
PROGRAMS = {"lanes": 2048, "blocks": 512}  # that keep them loading, of one warp and of four
FEWEST_PASSES = 2  # of the loop of a program

# By groups, inputs and outputs of a matrix, then by `bucket` of rows: the best of `bench --tune`, which prints such lines.
# Nothing was measured yet.
TUNED: dict[tuple[int, int, int], dict[int, Plan]] = {}


def bucket(rows: int) -> int:
    """The number that rows share their sizes with: 1, 8, or a power of two above."""
    return 1 if rows == 1 else max(8, 1 << (rows - 1).bit_length())


def plan(rows: int, groups: int, inputs: int, outputs: int) -> Plan:
    """For so many rows and matrices of these sizes, all multiples of 128."""
    return TUNED.get((groups, inputs, outputs), {}).get(bucket(rows)) or ruled(rows, groups, inputs, outputs)


def ruled(rows: int, groups: int, inputs: int, outputs: int) -> Plan:
    """`plan` without measurements: inputs are split until programs are enough, or sums of parts as many bytes as codes."""
    if rows <= 16:
        block_m, blocks, wanted = 8 if rows <= 8 else 16, Lanes(8, 64), PROGRAMS["lanes"]
    else:
        block_m, wanted = 32 if rows <= 32 else 64 if rows <= 192 else 128, PROGRAMS["blocks"]
        few = -(-rows // block_m) * groups * outputs // 128 < PROCESSORS
        blocks = Blocks(128, 64, 8, 3) if block_m == 128 else Blocks(64, 64, 4, 5) if few else Blocks(128, 64, 4, 4)
    n, k = Plan(block_m, blocks, 1).tile
    passes, programs, split = inputs // k, -(-rows // block_m) * groups * (outputs // n), 1
    while programs * split < wanted and passes % (2 * split) == 0 and passes // (2 * split) >= FEWEST_PASSES:
        # fp32 sums of every part are written and read.
        if 2 * split * 8 * min(rows, block_m) > inputs:
            break
        split *= 2
    return Plan(block_m, blocks, split)
