"""Gated expert feed-forward networks of a mixture of experts."""

from dspark_kernels.expert_mlp.api import expert_mlp
from dspark_kernels.expert_mlp.reference import swiglu

__all__ = ["expert_mlp", "swiglu"]
