"""Block-scaled number formats of weights (DeepSeek-V4's checkpoints): sizes and values. JAX is not imported."""

from typing import Literal

BlockFormat = Literal["fp4", "fp8"]

FP4_BLOCK = 32  # input channels that share a scale
FP8_BLOCK = 128  # input channels, and output channels, that share a scale
# Value of every e2m1 code.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def block_shapes(kind: BlockFormat, inputs: int, outputs: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shapes of the codes and of the scales of an (in, out) matrix; a last block may be smaller.

    fp4: two codes a byte, `inputs` even, and a scale for every 32 input channels of an output. fp8: a code a byte, and a
    scale for every block of 128 × 128.
    """
    if kind == "fp4":
        return (inputs // 2, outputs), (-(-inputs // FP4_BLOCK), outputs)
    return (inputs, outputs), (-(-inputs // FP8_BLOCK), -(-outputs // FP8_BLOCK))
