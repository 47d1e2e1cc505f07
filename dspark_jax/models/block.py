"""A transformer block: attention and mixture of experts, each inside a hyper-connection."""

from collections.abc import Callable
from typing import Any

from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.config import TargetConfig
from dspark_jax.eplb.placement import PlacedLayer
from dspark_jax.models.attention import Projections
from dspark_jax.models.hyper_connection import HyperConnection
from dspark_jax.models.layers import RMSNorm
from dspark_jax.models.moe import MoE, Routed


class Block[A: Projections](nnx.Module):
    """One layer of the target or one draft stage; `attn` is its attention module, called by the given function.

    `placed` says in which slots its experts are; None has each expert once, in order.
    """

    def __init__(
        self, config: TargetConfig, attn: A, hashed: bool, placed: PlacedLayer | None = None, *, rngs: nnx.Rngs
    ):
        self.attn = attn
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hc_attn = HyperConnection(config)
        self.hc_ffn = HyperConnection(config)
        self.ffn = MoE(config, hashed, placed, rngs=rngs)

    def __call__(
        self,
        streams: Float[Array, "B n d"],
        token: Int[Array, "B"],
        valid: Bool[Array, "B"],
        attend: Callable[[Float[Array, "B d"]], tuple[Float[Array, "B d"], Any]],
        axis: str | None,
    ) -> tuple[Float[Array, "B n d"], Any, Routed]:
        """New streams, whatever `attend` returns beside its output, and the router's choice."""
        streams, rest = self.hc_attn(streams, lambda x: attend(self.attn_norm(x)))
        streams, routed = self.hc_ffn(streams, lambda x: self.ffn(self.ffn_norm(x), token, valid, axis))
        return streams, rest, routed
