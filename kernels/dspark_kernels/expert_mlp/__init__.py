"""Gated expert feed-forward networks of a mixture of experts."""

from dspark_kernels.expert_mlp.reference import expert_mlp, swiglu

__all__ = ["expert_mlp", "swiglu"]
