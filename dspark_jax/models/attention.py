"""V4 attention: one shared key-value head over a sliding window, compressed entries and a sink.

The same module serves decoding (rows with position-addressed state) and training (whole sequences); they differ only
in where history comes from.
"""

import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx, struct
from jaxtyping import Array, Bool, Float, Float32, Int

from dspark_jax.config import TargetConfig
from dspark_jax.decode.rows import Rows
from dspark_jax.models.cache import entries_read, ring_history, ring_write, zero_where
from dspark_jax.models.compressor import Compressor, CompressorCache, Indexer
from dspark_jax.models.layers import Linear, RMSNorm, code_params, rms_norm, rope_frequencies, rotate, with_rows
from dspark_jax.models.numerics import cache_rounded, head_norm
from dspark_kernels.block_linear import block_linear
from dspark_kernels.block_scaled import BlockScaled
from dspark_kernels.precision import einsum


@struct.dataclass
class AttentionCache:
    """State of one layer: the window ring, and where the layer has them the compressor's and the indexer's state."""

    window: Float[Array, "R ring+1 c"]
    compressed: CompressorCache | None = None
    index: CompressorCache | None = None


# Entries a query may use: the indexer's best, all of them (its first training phase), or random ones (a baseline for
# it).
Select = Literal["indexer", "all", "random"]


class Entries(NamedTuple):
    """Compressed keys of a tick: shared by all rows [R, N, c], or selected for each row [R, width, k, c]."""

    kv: Float[Array, "R *N c"]
    visible: Bool[Array, "R width N"]


class AttentionAux(NamedTuple):
    """What training needs besides the output: the indexer's scores, and the head-averaged weights of the visible
    entries.
    """

    scores: Float32[Array, "R T N"]
    weights: Float32[Array, "R T N"]
    visible: Bool[Array, "R T N"]


class Projections(nnx.Module):
    """Query, key-value and output maps that target layers and draft stages share."""

    def __init__(self, config: TargetConfig, compressed: bool, *, rngs: nnx.Rngs):
        c, options = config, {"fp8_inputs": config.fp8_inputs, "codes": config.linear_weights == "fp8"}
        self.wq_a = Linear(c.hidden_size, c.q_lora_rank, rngs=rngs, **options)
        self.q_norm = RMSNorm(c.q_lora_rank, c.rms_norm_eps)
        self.wq_b = Linear(c.q_lora_rank, c.num_attention_heads * c.head_dim, rngs=rngs, **options)
        self.wkv = Linear(c.hidden_size, c.head_dim, rngs=rngs, **options)
        self.kv_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        if c.wo_a_codes:
            wo_a, scale = code_params(c.group_width, c.o_lora_rank, (c.o_groups,))
        else:
            shape = (c.o_groups, c.group_width, c.o_lora_rank)
            wo_a, scale = nnx.Param(jax.random.normal(rngs.params(), shape) / math.sqrt(c.group_width)), None
        self.wo_a, self.wo_a_scale = wo_a, scale
        self.wo_b = Linear(c.o_groups * c.o_lora_rank, c.hidden_size, rngs=rngs, **options)
        self.attn_sink = nnx.Param(jnp.zeros((c.num_attention_heads,)))
        self.config, self.compressed = c, compressed

    def query(
        self, x: Float[Array, "... d"], position: Int[Array, "..."]
    ) -> tuple[Float[Array, "... r"], Float[Array, "... h c"]]:
        """The query latent (the indexer reads it too) and the rotated heads, each normed without a weight."""
        c = self.config
        latent = self.q_norm(self.wq_a(x))
        heads = self.wq_b(latent).reshape(*x.shape[:-1], c.num_attention_heads, c.head_dim)
        reference = c.numerics == "reference"
        normed = head_norm(heads, c.rms_norm_eps) if reference else rms_norm(heads, None, c.rms_norm_eps)
        return latent, rotate(normed, position, self._freq())

    def key_value(self, x: Float[Array, "... d"], position: Int[Array, "..."]) -> Float[Array, "... c"]:
        """The one head that serves as key and value."""
        entry = rotate(self.kv_norm(self.wkv(x)), position, self._freq())
        return cache_rounded(entry, self.config.rope.dim) if self.config.numerics == "reference" else entry

    def output(self, heads: Float[Array, "... h c"], position: Int[Array, "..."]) -> Float[Array, "... d"]:
        """Undoes the rotation at the query's position (keys are values), then the grouped low-rank projection."""
        c = self.config
        heads = rotate(heads, position, self._freq(), inverse=True)
        groups = heads.reshape(*heads.shape[:-2], c.o_groups, c.group_width)
        if self.wo_a_scale is None:
            low = with_rows(lambda rows: einsum("...gw,gwr->...gr", rows, self.wo_a[...]), groups, inner=2)
        else:
            low = block_linear(groups, BlockScaled(self.wo_a[...], self.wo_a_scale[...]))
        return self.wo_b(low.astype(heads.dtype).reshape(*heads.shape[:-2], -1))

    def _freq(self):
        return rope_frequencies(self.config.rope, self.compressed)


def sink_attention(
    query: Float[Array, "R w h c"],
    window_kv: Float[Array, "R n m c"],
    window_visible: Bool[Array, "R w m"],
    entries: Entries | None,
    sink: Float32[Array, "h"],
) -> tuple[Float[Array, "R w h c"], Float32[Array, "R w h N"] | None]:
    """Softmax attention over window keys, compressed entries and a sink without a value.

    The `w` queries of a slot form `n` equal tiles; tile i sees the `m` keys `window_kv[:, i]`. Returns the heads'
    outputs and their weights over the entries. Keys must be finite also where they are not visible.
    """
    r, w, h, c = query.shape
    tiles = window_kv.shape[1]
    tiled = query.reshape(r, tiles, w // tiles, h, c)
    logits = einsum("rnthc,rnmc->rnthm", tiled, window_kv).reshape(r, w, h, -1)
    logits = jnp.where(window_visible[:, :, None], logits * c**-0.5, -jnp.inf)
    split = logits.shape[-1]
    if entries is not None:
        shared = entries.kv.ndim == 3
        more = einsum("rwhc,rnc->rwhn" if shared else "rwhc,rwnc->rwhn", query, entries.kv)
        logits = jnp.concatenate([logits, jnp.where(entries.visible[:, :, None], more * c**-0.5, -jnp.inf)], axis=-1)
    # The sink keeps the maximum finite for rows that see nothing.
    top = jnp.maximum(jnp.max(logits, axis=-1, keepdims=True), sink.astype(jnp.float32)[:, None])
    weight = jnp.exp(logits - top)
    total = jnp.sum(weight, axis=-1, keepdims=True) + jnp.exp(sink.astype(jnp.float32)[:, None] - top)
    rounded = weight.astype(query.dtype)
    out = einsum("rnthm,rnmc->rnthc", rounded[..., :split].reshape(r, tiles, w // tiles, h, split), window_kv)
    out = out.reshape(r, w, h, c)
    if entries is None:
        return (out / total).astype(query.dtype), None
    out += einsum("rwhn,rnc->rwhc" if shared else "rwhn,rwnc->rwhc", rounded[..., split:], entries.kv)
    return (out / total).astype(query.dtype), weight[..., split:] / total


class Attention(Projections):
    """One target layer's attention: window only, compressed sparse (with indexer) or heavily compressed."""

    def __init__(self, config: TargetConfig, ratio: int, *, rngs: nnx.Rngs):
        super().__init__(config, ratio > 0, rngs=rngs)
        self.ratio = ratio
        self.compressor = Compressor(config, ratio, config.head_dim, rngs=rngs) if ratio else None
        self.indexer = Indexer(config, rngs=rngs) if ratio == config.csa_ratio else None

    def init_cache(self, slots: int, max_len: int, block: int, dtype: jnp.dtype) -> AttentionCache:
        c = self.config
        return AttentionCache(
            window=jnp.zeros((slots, c.sliding_window + block, c.head_dim), dtype),  # ring of W + block - 1, and trash
            compressed=None if self.compressor is None else self.compressor.init_cache(slots, max_len, block, dtype),
            index=None if self.indexer is None else self.indexer.compressor.init_cache(slots, max_len, block, dtype),
        )

    def __call__(
        self, x: Float[Array, "B d"], rows: Rows, cache: AttentionCache
    ) -> tuple[Float[Array, "B d"], AttentionCache]:
        """Attends over the state as it was and the tick's own rows, then stores those rows."""
        position = rows.lane_position
        latent, query = self.query(x, rows.position)
        latent, query, own, lanes = (rows.to_lanes(v) for v in (latent, query, self.key_value(x, rows.position), x))
        own = zero_where(own, ~rows.lane_valid)
        lanes = zero_where(lanes, ~rows.lane_valid)
        history = ring_history(cache.window, rows.start, self.config.sliding_window, rows.lane)
        compressed = index = entries = None
        if self.compressor is not None and cache.compressed is not None:
            compressed = self.compressor.update(lanes, rows, cache.compressed)
            # Entries that no valid row sees may hold anything; padding lanes reach groups that are still open.
            visible = self._visible(position, compressed.entries.shape[1]) & rows.lane_valid[:, :, None]
            kv = zero_where(entries_read(compressed.entries, rows), ~jnp.any(visible, axis=1))
            entries = Entries(kv, visible)
            if self.indexer is not None and cache.index is not None:
                index = self.indexer.compressor.update(lanes, rows, cache.index)
                keys = zero_where(entries_read(index.entries, rows), ~jnp.any(visible, axis=1))
                chosen = self.indexer.select(self.indexer.scores(lanes, latent, position, keys), visible)
                slot = jnp.arange(kv.shape[0])[:, None, None]
                entries = Entries(kv[slot, chosen.index], chosen.valid)
        heads, _ = sink_attention(query, *self._window(history, own, position), entries, self.attn_sink[...])
        window = ring_write(cache.window, own, rows)
        return self.output(rows.from_lanes(heads), rows.position), AttentionCache(window, compressed, index)

    def sequence(
        self, x: Float[Array, "R T d"], select: Select = "indexer"
    ) -> tuple[Float[Array, "R T d"], AttentionAux | None]:
        """Whole sequences from position 0; `select` says which finished entries a query of a compressed sparse layer
        sees.
        """
        position = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
        latent, query = self.query(x, position)
        own = self.key_value(x, position)
        entries, scores, visible = None, None, None
        if self.compressor is not None:
            kv = self.compressor.sequence(x)
            visible = self._visible(position, kv.shape[1])
            if self.indexer is not None and kv.shape[1]:
                still_x, still_latent = jax.lax.stop_gradient((x, latent))
                scores = self.indexer.scores(still_x, still_latent, position, self.indexer.compressor.sequence(still_x))
                if select != "all":
                    ranking = scores if select == "indexer" else jax.random.uniform(jax.random.key(0), scores.shape)
                    chosen = self.indexer.select(ranking, visible)
                    r, t = jnp.arange(x.shape[0])[:, None, None], jnp.arange(x.shape[1])[:, None]
                    visible = jnp.zeros_like(visible).at[r, t, chosen.index].set(chosen.valid)
            entries = Entries(kv, visible)
        history = jnp.zeros((x.shape[0], self.config.sliding_window, own.shape[-1]), own.dtype)
        heads, weights = sink_attention(query, *self._window(history, own, position), entries, self.attn_sink[...])
        out = self.output(heads, position)
        if scores is None or weights is None or visible is None:
            return out, None
        return out, AttentionAux(scores, jax.lax.stop_gradient(jnp.mean(weights, axis=2)), visible)

    def _visible(self, position: Int[Array, "R w"], count: int) -> Bool[Array, "R w N"]:
        """Entry g is visible from the last token of its group on (the trash slot never is)."""
        return jnp.arange(count) < ((position + 1) // self.ratio)[:, :, None]

    def _window(
        self, history: Float[Array, "R W c"], own: Float[Array, "R w c"], position: Int[Array, "R w"]
    ) -> tuple[Float[Array, "R n m c"], Bool[Array, "R w m"]]:
        """Keys by tile of queries, [history | own rows] cut so that a tile's keys cover the windows of its queries."""
        window, width = self.config.sliding_window, own.shape[1]
        keys = jnp.concatenate([history, own], axis=1)
        tile = window if width > window and width % window == 0 else width
        tiles = width // tile
        if tiles == 1:
            kv = keys[:, None]
        else:
            blocks = keys.reshape(keys.shape[0], tiles + 1, window, keys.shape[2])
            kv = jnp.concatenate([blocks[:, :-1], blocks[:, 1:]], axis=2)
        query_index = jnp.arange(width)[:, None] % tile
        age = query_index + window - jnp.arange(window + tile)  # query position minus key position
        return kv, (age >= 0) & (age < window) & (position[:, :, None] - age >= 0)
