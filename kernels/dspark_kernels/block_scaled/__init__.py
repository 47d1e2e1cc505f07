"""Weights as fp8 or fp4 codes with a power of two for every block."""

from dspark_kernels.block_scaled.reference import BlockScaled, widened

__all__ = ["BlockScaled", "widened"]
