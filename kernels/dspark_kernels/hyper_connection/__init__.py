"""Hyper-connection mixing of residual streams."""

from dspark_kernels.hyper_connection.reference import coefficients, collapse, collapse_head, expand

__all__ = ["coefficients", "collapse", "collapse_head", "expand"]
