"""Compression of past tokens into entries, and the indexer that selects among them (DeepSeek-V4 reference, compressor
and indexer).
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx, struct
from jaxtyping import Array, Bool, Float, Float32, Int

from dspark_jax.config import TargetConfig
from dspark_jax.decode.rows import Rows
from dspark_jax.models.cache import entries_write, ring_history, ring_write
from dspark_jax.models.layers import Linear, RMSNorm, rope_frequencies, rotate
from dspark_jax.models.numerics import cache_rounded, index_rounded, index_scores
from dspark_kernels.precision import einsum


@struct.dataclass
class CompressorCache:
    """`raw`: ring of uncompressed rows, fp32 values beside scores; `entries`: append-only compressed entries."""

    raw: Float32[Array, "R ring+1 2kc"]
    entries: Float[Array, "R N+1 c"]


class Compressor(nnx.Module):
    """Pools `ratio` consecutive tokens into one entry of `width` channels by a softmax per channel.

    With overlap (compressed sparse attention) an entry also pools the tokens of the group before it through a second
    set of channels; entry 0 has no such group. An entry stands at the position of its group's first token and is
    visible to queries from the group's last token on. With `keys` the entries are the indexer's keys.
    """

    def __init__(self, config: TargetConfig, ratio: int, width: int, *, keys: bool = False, rngs: nnx.Rngs):
        self.overlap = ratio == config.csa_ratio
        self.ratio, self.width = ratio, width
        channels = width * (2 if self.overlap else 1)
        self.wkv = Linear(config.hidden_size, channels, rngs=rngs)
        self.wgate = Linear(config.hidden_size, channels, rngs=rngs)
        self.ape = nnx.Param(jnp.zeros((ratio, channels)))
        self.norm = RMSNorm(width, config.rms_norm_eps)
        self.config, self.keys = config, keys

    def init_cache(self, slots: int, max_len: int, block: int, dtype: jnp.dtype) -> CompressorCache:
        """State for ticks of at most `block` rows that may be rejected; entries are stored in `dtype`."""
        reach = self.ratio * (2 if self.overlap else 1)
        channels = 2 * self.width * (2 if self.overlap else 1)
        return CompressorCache(
            raw=jnp.zeros((slots, reach + block + 1, channels), jnp.float32),
            entries=jnp.zeros((slots, max_len // self.ratio + 1, self.width), dtype),
        )

    def raw(self, x: Float[Array, "... d"], position: Int[Array, "..."]) -> Float32[Array, "... 2kc"]:
        """Uncompressed fp32 rows: values, then scores with the position embedding of the place in the group."""
        value = self.wkv(x, jnp.float32)
        score = self.wgate(x, jnp.float32) + self.ape[...].astype(jnp.float32)[position % self.ratio]
        return jnp.concatenate([value, score], axis=-1)

    def update(self, x: Float[Array, "R width d"], rows: Rows, cache: CompressorCache) -> CompressorCache:
        """Stores the rows and the entries of every group that they close."""
        raw = self.raw(x, rows.lane_position)
        reach = (2 if self.overlap else 1) * self.ratio - 1
        history = jnp.concatenate([ring_history(cache.raw, rows.start, reach, rows.lane), raw], axis=1)
        first = rows.start // self.ratio
        groups = first[:, None] + jnp.arange(-(-rows.width // self.ratio))
        closed = ((groups + 1) * self.ratio <= (rows.start + rows.count)[:, None]) & (rows.count > 0)[:, None]
        offset = groups * self.ratio - rows.start[:, None] + reach
        own = self._group(history, offset)
        before = self._group(history, offset - self.ratio) if self.overlap else None
        entries = self._pool(own, before, groups, x.dtype)
        return CompressorCache(
            raw=ring_write(cache.raw, raw, rows), entries=entries_write(cache.entries, entries, first, closed, rows)
        )

    def sequence(self, x: Float[Array, "R T d"]) -> Float[Array, "R T/ratio c"]:
        """All entries of whole sequences that begin at position 0 (training); a last incomplete group makes none."""
        groups = x.shape[1] // self.ratio
        x = x[:, : groups * self.ratio]
        raw = self.raw(x, jnp.arange(x.shape[1]))
        own = raw.reshape(x.shape[0], groups, self.ratio, raw.shape[-1])
        before = jnp.pad(own, ((0, 0), (1, 0), (0, 0), (0, 0)))[:, :-1] if self.overlap else None
        return self._pool(own, before, jnp.broadcast_to(jnp.arange(groups), own.shape[:2]), x.dtype)

    def _group(self, history: Float32[Array, "R L 2kc"], offset: Int[Array, "R G"]) -> Float32[Array, "R G ratio 2kc"]:
        index = jnp.clip(offset[:, :, None] + jnp.arange(self.ratio), 0, history.shape[1] - 1)
        return history[jnp.arange(history.shape[0])[:, None, None], index]

    def _pool(
        self,
        own: Float32[Array, "R G ratio 2kc"],
        before: Float32[Array, "R G ratio 2kc"] | None,
        groups: Int[Array, "R G"],
        dtype: jnp.dtype,
    ) -> Float[Array, "R G c"]:
        value, score = jnp.split(own, 2, axis=-1)
        if before is not None:
            old_value, old_score = jnp.split(before, 2, axis=-1)
            old_score = jnp.where((groups > 0)[:, :, None, None], old_score, -jnp.inf)
            value = jnp.concatenate([old_value[..., : self.width], value[..., self.width :]], axis=2)
            score = jnp.concatenate([old_score[..., : self.width], score[..., self.width :]], axis=2)
        entry = jnp.sum(value * jax.nn.softmax(score, axis=2), axis=2).astype(dtype)
        entry = rotate(self.norm(entry), groups * self.ratio, rope_frequencies(self.config.rope, True))
        if self.config.numerics == "default":
            return entry
        return index_rounded(entry) if self.keys else cache_rounded(entry, self.config.rope.dim)


class Selection(NamedTuple):
    """Entries chosen for each row: indices into the entries, and whether each choice is a visible entry."""

    index: Int[Array, "R width k"]
    valid: Bool[Array, "R width k"]


class Indexer(nnx.Module):
    """Scores compressed entries by a small multi-head product and keeps the best `index_topk` a query."""

    def __init__(self, config: TargetConfig, *, rngs: nnx.Rngs):
        heads, codes = config.index_n_heads * config.index_head_dim, config.linear_weights == "fp8"
        self.wq_b = Linear(config.q_lora_rank, heads, rngs=rngs, fp8_inputs=config.fp8_inputs, codes=codes)
        self.weights_proj = Linear(config.hidden_size, config.index_n_heads, rngs=rngs)
        self.compressor = Compressor(config, config.csa_ratio, config.index_head_dim, keys=True, rngs=rngs)
        self.config = config

    def scores(
        self,
        x: Float[Array, "R width d"],
        query_latent: Float[Array, "R width r"],
        position: Int[Array, "R width"],
        keys: Float[Array, "R N c"],
    ) -> Float32[Array, "R width N"]:
        """`sum_h w_h relu(<q_h, k>)` for every entry, visible or not."""
        c = self.config
        heads = self.wq_b(query_latent).reshape(*x.shape[:2], c.index_n_heads, c.index_head_dim)
        heads = rotate(heads, position, rope_frequencies(c.rope, True))
        if c.numerics == "reference":
            weight = self.weights_proj(x) * jnp.asarray((c.index_head_dim * c.index_n_heads) ** -0.5, x.dtype)
            return index_scores(index_rounded(heads), keys, weight)
        weight = self.weights_proj(x, jnp.float32) / math.sqrt(c.index_head_dim * c.index_n_heads)
        return einsum("rwhn,rwh->rwn", jax.nn.relu(einsum("rwhc,rnc->rwhn", heads, keys)), weight)

    def select(self, scores: Float32[Array, "R width N"], visible: Bool[Array, "R width N"]) -> Selection:
        """The best visible entries of each row; ties go to the earlier entry."""
        best, index = jax.lax.top_k(jnp.where(visible, scores, -jnp.inf), min(self.config.index_topk, scores.shape[-1]))
        return Selection(index, best > -jnp.inf)
