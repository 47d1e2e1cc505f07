"""Embedding and output head split over the `expert` axis by vocabulary rows."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dspark_jax.models.layers import dot


class SplitEmbedding(nnx.Module):
    """Token vectors. Inside a mesh each rank of `axis` holds an equal range of the (padded) vocabulary."""

    def __init__(self, vocab: int, channels: int, axis: str):
        self.weight = nnx.Param(jnp.zeros((vocab, channels)))
        self.axis = axis

    def __call__(self, ids: Int[Array, "B"]) -> Float[Array, "B d"]:
        weight = self.weight[...]
        if jax.lax.axis_size(self.axis) == 1:
            return weight[ids]
        local = jax.lax.all_gather(ids, self.axis, tiled=True) - jax.lax.axis_index(self.axis) * weight.shape[0]
        own = (local >= 0) & (local < weight.shape[0])
        part = jnp.where(own[:, None], weight[jnp.clip(local, 0, weight.shape[0] - 1)], 0)
        return jax.lax.psum_scatter(part, self.axis, scatter_dimension=0, tiled=True)


class SplitHead(nnx.Module):
    """Logits of the rows of this rank over the whole vocabulary; `weight` is stored (channels, vocabulary)."""

    def __init__(self, channels: int, vocab: int, padded: int, axis: str):
        self.weight = nnx.Param(jnp.zeros((channels, padded)))
        self.vocab, self.axis = vocab, axis

    def __call__(
        self, x: Float[Array, "... d"], out_dtype: jax.typing.DTypeLike | None = None
    ) -> Float[Array, "... V"]:
        return split_logits(x, lambda rows: dot(rows, self.weight[...], out_dtype), self.vocab, self.axis)


def split_logits(
    x: Float[Array, "... d"], product: Callable[[Float[Array, "N d"]], Float[Array, "N v"]], vocab: int, axis: str
) -> Float[Array, "... V"]:
    """Logits of the rows of this rank, where `product` gives those of any rows over the rank's part of the vocabulary."""
    rows, size = x.reshape(-1, x.shape[-1]), jax.lax.axis_size(axis)
    if size > 1:
        rows = jax.lax.all_gather(rows, axis, tiled=True)
    logits = product(rows)
    if size > 1:
        logits = jax.lax.all_to_all(logits, axis, split_axis=0, concat_axis=1, tiled=True)
    return logits[:, :vocab].reshape(*x.shape[:-1], vocab)
