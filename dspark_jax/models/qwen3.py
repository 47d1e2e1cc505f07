"""Dense targets: Qwen3, and without its query and key norms Llama-type models.

Keys and values lie at their positions in arrays as long as a request may be, so that a rejection needs no undoing.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, struct
from jaxtyping import Array, Bool, Float, Float32, Int

from dspark_jax.config import RopeConfig
from dspark_jax.config_dense import DenseConfig
from dspark_jax.decode.rows import Rows
from dspark_jax.models.cache import entries_read
from dspark_jax.models.layers import Embedding, Linear, RMSNorm, rope_frequencies, with_rows
from dspark_kernels.precision import einsum


@struct.dataclass
class KeyValueCache:
    """Rotated keys, and values, of one layer by head and position; the last position is the trash slot.

    Values are finite, so that weight 0 lets nothing through, and no tick needs a masked copy of them. A row whose value was
    not has NaN for a key, which spoils those rows alone that see it.
    """

    key: Float[Array, "S k n c"]
    value: Float[Array, "S k n c"]

    def write(
        self,
        key: Float[Array, "R w k c"],
        value: Float[Array, "R w k c"],
        rows: Rows,
        keep: Bool[Array, "R w"] | None = None,
    ) -> "KeyValueCache":
        """With the slots' valid rows at their positions, or of them those with `keep`."""
        keep = rows.lane_valid if keep is None else keep
        index = jnp.where(keep, rows.lane_position, self.key.shape[2] - 1)
        finite = jnp.all(jnp.isfinite(value), axis=-1, keepdims=True)
        at = rows.lanes[:, None], slice(None), index
        return KeyValueCache(
            self.key.at[at].set(jnp.where(finite, key, jnp.nan).astype(self.key.dtype)),
            self.value.at[at].set(jnp.where(finite, value, 0).astype(self.value.dtype)),
        )


def rotate_half(x: Float[Array, "... h c"], position: Int[Array, "..."], freq: np.ndarray) -> Float[Array, "... h c"]:
    """Rotates channel i with channel i + c/2 by `position * freq[i]`, in fp32."""
    angle = position.astype(jnp.float32)[..., None, None] * freq
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


class Keys(NamedTuple):
    """What queries attend to: values must be finite also where they are not visible, keys may hold anything there."""

    key: Float[Array, "R k n c"]
    value: Float[Array, "R k n c"]
    visible: Bool[Array, "R w n"]


def grouped_attention(query: Float[Array, "R w h c"], *parts: Keys) -> Float[Array, "R w h c"]:
    """Softmax attention over all `parts` together, in which h / k heads share a key head; a query that sees nothing gets
    zeros.
    """
    r, w, h, c = query.shape
    heads = parts[0].key.shape[1]
    grouped = query.reshape(r, w, heads, h // heads, c).swapaxes(1, 2).reshape(r, heads, -1, c)

    def scores(part: Keys) -> Float32[Array, "R k w g n"]:
        found = einsum("rkqc,rknc->rkqn", grouped, part.key).reshape(r, heads, w, -1, part.key.shape[2]) * c**-0.5
        return jnp.where(part.visible[:, None, :, None], found, -jnp.inf)

    logits = [scores(part) for part in parts]
    tops = [jnp.max(x, axis=-1, keepdims=True) for x in logits]
    top = jnp.maximum(functools.reduce(jnp.maximum, tops), jnp.finfo(jnp.float32).min)
    weights = [jnp.exp(x - top) for x in logits]
    total = jnp.maximum(sum(jnp.sum(x, axis=-1, keepdims=True) for x in weights), jnp.finfo(jnp.float32).tiny)
    out = jnp.zeros((), jnp.float32)
    for weight, part in zip(weights, parts, strict=True):
        flat = weight.astype(query.dtype).reshape(r, heads, -1, part.key.shape[2])
        out = out + einsum("rkqn,rknc->rkqc", flat, part.value)
    out = out.reshape(r, heads, w, -1, c) / total
    return out.astype(query.dtype).swapaxes(1, 2).reshape(r, w, h, c)


class GroupedAttention(nnx.Module):
    """One layer's attention over the whole context."""

    def __init__(self, config: DenseConfig, *, rngs: nnx.Rngs):
        c = config
        queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = Linear(c.hidden_size, queries, rngs=rngs)
        self.k_proj = Linear(c.hidden_size, keys, rngs=rngs)
        self.v_proj = Linear(c.hidden_size, keys, rngs=rngs)
        self.o_proj = Linear(queries, c.hidden_size, rngs=rngs)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps) if c.qk_norm else None
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps) if c.qk_norm else None
        self.config = c

    def init_cache(self, slots: int, max_len: int, dtype: jnp.dtype) -> KeyValueCache:
        """One layer's state for `slots` requests of up to `max_len` positions."""
        shape = (slots, self.config.num_key_value_heads, max_len + 1, self.config.head_dim)
        return KeyValueCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    def query(self, x: Float[Array, "B d"], position: Int[Array, "B"]) -> Float[Array, "B h c"]:
        """Normed (if the model does so) and rotated queries."""
        query = self._heads(self.q_proj(x))
        return self._rotated(query if self.q_norm is None else self.q_norm(query), position)

    def key_value(
        self, x: Float[Array, "B d"], position: Int[Array, "B"]
    ) -> tuple[Float[Array, "B k c"], Float[Array, "B k c"]]:
        """Normed (if the model does so) and rotated keys, and values."""
        key, value = self._heads(self.k_proj(x)), self._heads(self.v_proj(x))
        return self._rotated(key if self.k_norm is None else self.k_norm(key), position), value

    def output(self, heads: Float[Array, "B h c"]) -> Float[Array, "B d"]:
        """The output projection of the heads together."""
        return self.o_proj(heads.reshape(heads.shape[0], -1))

    def __call__(
        self, x: Float[Array, "B d"], rows: Rows, cache: KeyValueCache
    ) -> tuple[Float[Array, "B d"], KeyValueCache]:
        """Stores the rows at their positions, then every row attends up to its own."""
        query = self.query(x, rows.position)
        key, value = self.key_value(x, rows.position)
        cache = cache.write(rows.to_lanes(key), rows.to_lanes(value), rows)
        # What lies at later positions is of rejected rows or of the slot's last request.
        visible = (jnp.arange(cache.key.shape[2]) <= rows.lane_position[:, :, None]) & rows.lane_valid[:, :, None]
        keys, values = (entries_read(x, rows) for x in (cache.key, cache.value))
        heads = grouped_attention(rows.to_lanes(query), Keys(keys, values, visible))
        return self.output(rows.from_lanes(heads)), cache

    def _rotated(self, x: Float[Array, "B h c"], position: Int[Array, "B"]) -> Float[Array, "B h c"]:
        freq = rope_frequencies(RopeConfig(dim=self.config.head_dim, theta=self.config.rope_theta), compressed=False)
        return rotate_half(x, position, freq)

    def _heads(self, x: Float[Array, "B _"]) -> Float[Array, "B h c"]:
        return x.reshape(x.shape[0], -1, self.config.head_dim)


class SwiGLU(nnx.Module):
    """`down(silu(gate(x)) * up(x))`, the product in fp32."""

    def __init__(self, channels: int, width: int, *, rngs: nnx.Rngs):
        self.gate_proj = Linear(channels, width, rngs=rngs)
        self.up_proj = Linear(channels, width, rngs=rngs)
        self.down_proj = Linear(width, channels, rngs=rngs)

    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        inner = jax.nn.silu(self.gate_proj(x, jnp.float32)) * self.up_proj(x, jnp.float32)
        return self.down_proj(inner.astype(x.dtype))


class DenseLayer(nnx.Module):
    """Attention and a feed-forward network, each behind a norm and added to what came in."""

    def __init__(self, config: DenseConfig, *, rngs: nnx.Rngs):
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = GroupedAttention(config, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size, rngs=rngs)

    def __call__(
        self, x: Float[Array, "B d"], rows: Rows, cache: KeyValueCache
    ) -> tuple[Float[Array, "B d"], KeyValueCache]:
        out, cache = self.self_attn(self.input_layernorm(x), rows, cache)
        return self.feed_forward(x + out), cache

    def feed_forward(self, x: Float[Array, "B d"]) -> Float[Array, "B d"]:
        """The layer behind its attention."""
        return x + self.mlp(self.post_attention_layernorm(x))


class DenseLayers(nnx.Module):
    """Embedding, layers and final norm: what `model.` holds in a checkpoint."""

    def __init__(self, config: DenseConfig, *, rngs: nnx.Rngs):
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, rngs=rngs)
        self.layers = nnx.List([DenseLayer(config, rngs=rngs) for _ in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Qwen3(nnx.Module):
    """The target. Module paths are the published checkpoint's key names (`model.layers.N.self_attn.q_proj.weight` …).

    Attributes:
      taps: ids of the layers whose output a drafter reads, ascending; -1 is the embedding.
      dtype: activation dtype.
    """

    def __init__(
        self, config: DenseConfig, *, taps: tuple[int, ...] = (), dtype: jax.typing.DTypeLike = jnp.float32, rngs: nnx.Rngs
    ):
        self.model = DenseLayers(config, rngs=rngs)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else Linear(config.hidden_size, config.vocab_size, rngs=rngs)
        self.config, self.taps, self.dtype = config, tuple(taps), jnp.dtype(dtype)

    @property
    def vocab_size(self) -> int:
        """Channels of `logits`."""
        return self.config.vocab_size

    def init_cache(self, slots: int, max_len: int, block: int) -> tuple[KeyValueCache, ...]:
        """State of every layer; see `decode.protocols.Target`. Rows that may be rejected need no more room than others."""
        return tuple(layer.self_attn.init_cache(slots, max_len, self.dtype) for layer in self.model.layers)

    def forward(
        self, rows: Rows, cache: tuple[KeyValueCache, ...]
    ) -> tuple[Float[Array, "B d"], Float[Array, "B m*d"], tuple[KeyValueCache, ...]]:
        """One tick over `rows`: hidden rows for `logits`, concatenated taps, new state."""
        x = self.embed(rows.token)
        taps, caches = [x] if -1 in self.taps else [], []
        for i, layer in enumerate(self.model.layers):
            with jax.named_scope(f"layer_{i}"):
                x, state = layer(x, rows, cache[i])
            caches.append(state)
            if i in self.taps:
                taps.append(x)
        context = jnp.concatenate(taps, axis=-1) if taps else x[:, :0]
        return x, context, tuple(caches)

    def embed(self, token: Int[Array, "..."]) -> Float[Array, "... d"]:
        """Embeddings in the model's dtype."""
        return self.model.embed_tokens(token).astype(self.dtype)

    def logits(self, hidden: Float[Array, "... d"]) -> Float32[Array, "... V"]:
        """fp32 logits of hidden rows."""
        return self.head(self.model.norm(hidden))

    def head(self, hidden: Float[Array, "... d"]) -> Float32[Array, "... V"]:
        """fp32 logits of rows behind a norm: the output head, which a drafter may borrow."""
        if self.lm_head is not None:
            return self.lm_head(hidden, jnp.float32)
        table = self.model.embed_tokens.weight[...]
        return with_rows(lambda rows: einsum("...d,vd->...v", rows, table), hidden)
