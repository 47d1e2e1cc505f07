"""Optimisers. Matrices take Muon, everything else AdamW, both at one learning rate (consistent update size)."""

from dataclasses import dataclass
from typing import Any, cast

import jax
import optax
from flax import nnx
from optax import contrib

from dspark_jax.errors import ConfigError

_ADAM = ("embed", "head", "embed_tokens", "lm_head", "markov_w1", "markov_w2", "confidence_head", "gate", "fn", "ape")


@dataclass(frozen=True)
class OptimizerConfig:
    """Schedule: linear warm-up, then a cosine to `final` times the peak. Gradients are clipped to `clip` in global
    norm.
    """

    peak: float = 3e-3
    steps: int = 1000
    warmup: int = 100
    final: float = 0.05
    weight_decay: float = 0.1
    clip: float = 1.0
    kind: str = "muon"

    def __post_init__(self) -> None:
        if self.kind not in ("muon", "adamw"):
            raise ConfigError(f"optimizer.kind is {self.kind!r}; expected 'muon' or 'adamw'")
        if not 0 <= self.warmup < self.steps:
            raise ConfigError(f"optimizer.warmup is {self.warmup}; expected at least 0 and below steps = {self.steps}")


def matrix_axes(params: nnx.State):
    """(input axis, output axis) of every matrix that Muon takes; None elsewhere. A leading axis is a stack of
    matrices.
    """

    def axes(path: tuple, leaf: jax.Array) -> contrib.MuonDimensionNumbers | None:
        names = {str(getattr(k, "key", "")) for k in path}
        if leaf.ndim < 2 or names & set(_ADAM):
            return None
        return contrib.MuonDimensionNumbers(leaf.ndim - 2, leaf.ndim - 1)

    return jax.tree_util.tree_map_with_path(axes, params)


def decayed(params: nnx.State):
    """Weight decay applies to matrices only."""
    return jax.tree.map(lambda p: p.ndim >= 2, params)


def make_optimizer(config: OptimizerConfig) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """The gradient transformation and its learning-rate schedule."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, config.peak, max(config.warmup, 1), config.steps, config.final * config.peak
    )
    if config.kind == "adamw":
        body = optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=config.weight_decay, mask=decayed)
    else:
        body = contrib.muon(
            schedule,
            weight_decay=config.weight_decay,
            weight_decay_mask=decayed,
            adam_b1=0.9,
            adam_b2=0.95,
            adam_weight_decay=0.0,
            consistent_rms=0.2,
            muon_weight_dimension_numbers=cast(Any, matrix_axes),  # optax types name arrays, and take any tree
        )
    return optax.chain(optax.clip_by_global_norm(config.clip), body), schedule
