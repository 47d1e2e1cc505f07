"""Hyper-connections around a sublayer, and the collapse in front of a head."""

from collections.abc import Callable
from typing import TypeVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from dspark_jax.config import TargetConfig
from dspark_kernels import hyper_connection as kernels

Rest = TypeVar("Rest")


class HyperConnection(nnx.Module):
    """Residual streams [B, n, d] around one sublayer (kernels.hyper_connection has the formulas).

    Starts as an ordinary residual: every stream read equally, the sublayer's output added once, streams kept apart.
    """

    def __init__(self, config: TargetConfig):
        n = config.hc_mult
        self.fn = nnx.Param(jnp.zeros((n * config.hidden_size, (2 + n) * n)))
        keep = 4.0 * jnp.eye(n) - 2.0
        read = jnp.full((n,), -jnp.log(n - 1.0) if n > 1 else 4.0)  # sigmoid(read) = 1 / n
        self.base = nnx.Param(jnp.concatenate([read, jnp.zeros((n,)), keep.reshape(-1)]))
        self.scale = nnx.Param(jnp.full((3,), 0.1))
        self.config = config

    def __call__(
        self,
        streams: Float[Array, "B n d"],
        sublayer: Callable[[Float[Array, "B d"]], tuple[Float[Array, "B d"], Rest]],
    ) -> tuple[Float[Array, "B n d"], Rest]:
        """Applies `sublayer` (input -> output, rest) and returns the new streams and `rest`."""
        c = self.config
        x, post, comb = kernels.pre(
            streams,
            self.fn[...],
            self.base[...],
            self.scale[...],
            iters=c.hc_sinkhorn_iters,
            eps=c.hc_eps,
            norm_eps=c.rms_norm_eps,
        )
        output, rest = sublayer(x)
        return kernels.expand(streams, output, post, comb), rest


class HyperHead(nnx.Module):
    """The weighted sum of the streams that an output head reads."""

    def __init__(self, config: TargetConfig):
        n = config.hc_mult
        self.fn = nnx.Param(jnp.zeros((n * config.hidden_size, n)))
        self.base = nnx.Param(jnp.full((n,), -jnp.log(n - 1.0) if n > 1 else 4.0))
        self.scale = nnx.Param(jnp.full((1,), 0.1))
        self.config = config

    def __call__(self, streams: Float[Array, "B n d"]) -> Float[Array, "B d"]:
        c = self.config
        return kernels.collapse_head(
            streams, self.fn[...], self.base[...], self.scale[...], eps=c.hc_eps, norm_eps=c.rms_norm_eps
        )
