"""The DeepSeek-V4-style target: embedding, hyper-connected blocks, head, and the taps that a drafter reads."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int

from dspark_jax.config import TargetConfig
from dspark_jax.decode.rows import Rows
from dspark_jax.models.attention import Attention, AttentionAux, AttentionCache, Select
from dspark_jax.models.block import Block
from dspark_jax.models.hyper_connection import HyperHead
from dspark_jax.models.layers import Embedding, Linear, RMSNorm
from dspark_jax.models.moe import MoEAux


class SequenceOutput(NamedTuple):
    """What training reads from a forward pass over whole sequences."""

    hidden: Float[Array, "R T d"]
    taps: Float[Array, "R T m*d"]
    attention: tuple[AttentionAux | None, ...]
    moe: tuple[MoEAux, ...]


class DeepseekV4(nnx.Module):
    """The target. Module paths follow the published checkpoint's key names (`layers.N.attn.wq_a.weight` …).

    Attributes:
      taps: ids of the layers whose output (mean over the streams) a drafter reads, ascending.
      dtype: activation dtype.
      axis: mesh axis that experts are split over, or None outside a mesh.
    """

    def __init__(
        self,
        config: TargetConfig,
        *,
        taps: tuple[int, ...] = (),
        dtype: jax.typing.DTypeLike = jnp.float32,
        axis: str | None = None,
        rngs: nnx.Rngs,
    ):
        self.embed = Embedding(config.vocab_size, config.hidden_size, rngs=rngs)
        self.layers = nnx.List(
            [
                Block(config, Attention(config, ratio, rngs=rngs), layer < config.num_hash_layers, rngs=rngs)
                for layer, ratio in enumerate(config.compress_ratios)
            ]
        )
        self.hc_head = HyperHead(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = Linear(config.hidden_size, config.vocab_size, rngs=rngs, std=1 / math.sqrt(config.hidden_size))
        self.config, self.taps, self.dtype, self.axis = config, tuple(taps), jnp.dtype(dtype), axis

    @property
    def vocab_size(self) -> int:
        """Channels of `logits`."""
        return self.config.vocab_size

    def init_cache(self, slots: int, max_len: int, block: int) -> tuple[AttentionCache, ...]:
        """State of every layer; see `decode.protocols.Target`."""
        return tuple(layer.attn.init_cache(slots, max_len, block, self.dtype) for layer in self.layers)

    def embed_streams(self, token: Int[Array, "..."]) -> Float[Array, "... n d"]:
        """Token vectors, copied to every residual stream."""
        x = self.embed(token).astype(self.dtype)
        return jnp.broadcast_to(x[..., None, :], (*x.shape[:-1], self.config.hc_mult, x.shape[-1]))

    def forward(
        self, rows: Rows, cache: tuple[AttentionCache, ...]
    ) -> tuple[Float[Array, "B d"], Float[Array, "B m*d"], tuple[AttentionCache, ...]]:
        """One tick over `rows`: hidden rows for `logits`, concatenated taps, new state."""
        streams = self.embed_streams(rows.token)
        taps, caches = [], []
        for i, layer in enumerate(self.layers):
            with jax.named_scope(f"layer_{i}"):
                streams, state, _ = layer(
                    streams,
                    rows.token,
                    rows.valid,
                    lambda x, layer=layer, i=i: layer.attn(x, rows, cache[i]),
                    self.axis,
                )
            caches.append(state)
            if i in self.taps:
                taps.append(tap(streams))
        context = jnp.concatenate(taps, axis=-1) if taps else streams[:, 0, :0]
        return self.hc_head(streams), context, tuple(caches)

    def logits(self, hidden: Float[Array, "... d"]) -> Float32[Array, "... V"]:
        """fp32 logits of hidden rows."""
        return self.head(self.norm(hidden), jnp.float32)

    def sequence(
        self,
        token: Int[Array, "R T"],
        valid: Bool[Array, "R T"] | None = None,
        *,
        select: Select = "indexer",
        remat: bool = False,
    ) -> SequenceOutput:
        """Whole sequences from position 0, for training and evaluation; hidden rows are those that `logits` takes."""
        r, t = token.shape
        flat = token.reshape(-1)
        keep = jnp.ones(flat.shape, bool) if valid is None else valid.reshape(-1)
        streams = self.embed_streams(flat)
        taps, attention, moe = [], [], []
        for i, layer in enumerate(self.layers):

            def run(layer, streams):
                def attend(x):
                    out, aux = layer.attn.sequence(x.reshape(r, t, -1), select)
                    return out.reshape(r * t, -1), aux

                streams, attention_aux, routed = layer(streams, flat, keep, attend, self.axis)
                return streams, attention_aux, routed.aux()

            graph, params = nnx.split(layer)

            def pure(params, streams, graph=graph, run=run):
                return run(nnx.merge(graph, params), streams)

            streams, attention_aux, moe_aux = (jax.checkpoint(pure) if remat else pure)(params, streams)
            attention.append(attention_aux)
            moe.append(moe_aux)
            if i in self.taps:
                taps.append(tap(streams))
        context = jnp.concatenate(taps, axis=-1) if taps else streams[:, 0, :0]
        return SequenceOutput(
            self.hc_head(streams).reshape(r, t, -1), context.reshape(r, t, -1), tuple(attention), tuple(moe)
        )


def tap(streams: Float[Array, "B n d"]) -> Float[Array, "B d"]:
    """The mean of the residual streams: what a tapped layer hands to the drafter."""
    return jnp.mean(streams.astype(jnp.float32), axis=1).astype(streams.dtype)
