"""Linear maps whose fp8 weights stay codes."""

from dspark_kernels.block_linear.api import block_linear

__all__ = ["block_linear"]
