"""A drafter's block of rows through dense layers: the rows see the stored context and each other, and nothing is stored."""

from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.models.qwen3 import DenseLayer, Keys, KeyValueCache, grouped_attention


def visible_context(cache: KeyValueCache, position: Int[Array, "R"], width: int) -> Keys:
    """What `width` rows of every slot see of the stored context: all of it in front of `position`."""
    visible = jnp.arange(cache.key.shape[2]) < position[:, None]
    return Keys(cache.key, cache.value, jnp.broadcast_to(visible[:, None], (position.shape[0], width, visible.shape[1])))


def through_layers(
    layers: Iterable[DenseLayer],
    x: Float[Array, "R w d"],
    position: Int[Array, "R w"],
    seen: Sequence[Sequence[Keys]],
    own: Bool[Array, "*R w w"],
) -> tuple[Float[Array, "R w d"], list[Keys]]:
    """Rows behind the last layer, and what later rows of the block may see of these, by layer.

    Args:
      x: embedded rows, which stand at `position`.
      seen: by layer, what all rows see as the keys in it say.
      own: which of these rows a row sees.
    """
    r, w, d = x.shape
    at = position.reshape(-1)
    visible = jnp.broadcast_to(own, (r, w, w))
    flat, kept = x.reshape(r * w, d), []

    def by_head(y: Float[Array, "B k c"]) -> Float[Array, "R k w c"]:
        return y.reshape(r, w, *y.shape[1:]).swapaxes(1, 2)

    for i, (layer, context) in enumerate(zip(layers, seen, strict=True)):
        with jax.named_scope(f"layer_{i}"):
            rows = layer.input_layernorm(flat)
            query = layer.self_attn.query(rows, at)
            key, value = layer.self_attn.key_value(rows, at)
            kept.append(Keys(by_head(key), by_head(value), visible))
            heads = grouped_attention(query.reshape(r, w, *query.shape[1:]), *context, kept[-1])
            flat = layer.feed_forward(flat + layer.self_attn.output(heads.reshape(r * w, *heads.shape[2:])))
    return flat.reshape(r, w, d), kept
