"""Hyper-connection mixing of residual streams."""

from dspark_kernels.hyper_connection.api import collapse_head, expand, pre
from dspark_kernels.hyper_connection.reference import coefficients, collapse

__all__ = ["coefficients", "collapse", "collapse_head", "expand", "pre"]
