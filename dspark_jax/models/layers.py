"""Linear maps, norms and rotary positions, with one rule of precision each."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float32, Int

from dspark_jax.config import RopeConfig
from dspark_jax.models.numerics import INPUT_GROUP, fp8_rounded
from dspark_kernels.block_linear import block_linear
from dspark_kernels.block_scaled import BlockScaled
from dspark_kernels.formats import block_shapes
from dspark_kernels.precision import einsum

# On a GPU XLA makes a reduction of a product with one row, which reads the weights slower than a product with eight rows does.
FEWEST_ROWS = 8


def with_rows(product: Callable[[jax.Array], jax.Array], x: Float[Array, "..."], inner: int = 1) -> Float[Array, "..."]:
    """`product(x)` of rows with `inner` axes; on a GPU a single row is computed beside seven rows of zeros."""
    leading, row = x.shape[:-inner], x.shape[-inner:]
    if math.prod(leading) != 1 or FEWEST_ROWS == 1 or jax.default_backend() != "gpu":
        return product(x)
    y = product(jnp.pad(x.reshape(1, *row), ((0, FEWEST_ROWS - 1), *[(0, 0)] * inner)))[:1]
    return y.reshape(*leading, *y.shape[1:])


def dot(
    x: Float[Array, "... i"], weight: Float[Array, "i o"], out_dtype: jax.typing.DTypeLike | None = None
) -> Float[Array, "... o"]:
    """`x @ weight` in x's dtype with fp32 accumulation; fp32 inputs use full fp32 products on every device."""
    y = with_rows(lambda rows: einsum("...i,io->...o", rows, weight), x)
    return y.astype(x.dtype if out_dtype is None else out_dtype)


def rms_norm(x: Float[Array, "... d"], weight: Float[Array, "d"] | None, eps: float) -> Float[Array, "... d"]:
    """Root-mean-square norm in fp32, multiplied by the weight in fp32, rounded once."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + eps)
    return (y if weight is None else y * weight.astype(jnp.float32)).astype(x.dtype)


class Linear(nnx.Module):
    """A linear map without bias; `weight` is stored (in, out). With `fp8_inputs` x is rounded to fp8 first.

    With `codes` the weight is fp8 codes and `scale` their scales (`BlockScaled`), zeros until a checkpoint fills them;
    otherwise `scale` is None. wide: inputs may be beyond fp16, see `block_linear`.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        rngs: nnx.Rngs,
        std: float | None = None,
        fp8_inputs: bool = False,
        codes: bool = False,
        wide: bool = False,
    ):
        std = 1 / math.sqrt(inputs) if std is None else std
        if codes:
            weight, scale = code_params(inputs, outputs)
        else:
            weight, scale = nnx.Param(std * jax.random.normal(rngs.params(), (inputs, outputs))), None
        self.weight, self.scale = weight, scale
        self.fp8_inputs, self.wide = fp8_inputs, wide

    def __call__(
        self, x: Float[Array, "... i"], out_dtype: jax.typing.DTypeLike | None = None
    ) -> Float[Array, "... o"]:
        x = fp8_rounded(x, INPUT_GROUP) if self.fp8_inputs else x
        if self.scale is None:
            return dot(x, self.weight[...], out_dtype)
        y = block_linear(x, BlockScaled(self.weight[...], self.scale[...]), wide=self.wide)
        return y.astype(x.dtype if out_dtype is None else out_dtype)


def code_params(inputs: int, outputs: int, groups: tuple[int, ...] = ()) -> tuple[nnx.Param, nnx.Param]:
    """fp8 codes of an (in, out) matrix, or of one for each of the groups, and their scales; zeros."""
    codes, scale = block_shapes("fp8", inputs, outputs)
    return nnx.Param(jnp.zeros((*groups, *codes), jnp.float8_e4m3fn)), nnx.Param(jnp.zeros((*groups, *scale), jnp.uint8))


class RMSNorm(nnx.Module):
    """`rms_norm` with a learned weight."""

    def __init__(self, channels: int, eps: float):
        self.weight = nnx.Param(jnp.ones((channels,)))
        self.eps = eps

    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        return rms_norm(x, self.weight[...], self.eps)


class Embedding(nnx.Module):
    """A table of token vectors [vocabulary, channels]."""

    def __init__(self, vocab: int, channels: int, *, rngs: nnx.Rngs, std: float = 0.02):
        self.weight = nnx.Param(std * jax.random.normal(rngs.params(), (vocab, channels)))

    def __call__(self, ids: Int[Array, "..."]) -> Float[Array, "... d"]:
        return self.weight[...][ids]


def rope_frequencies(rope: RopeConfig, compressed: bool) -> np.ndarray:
    """Angular frequencies, fp32 [dim / 2]. Layers with a compressor use their own theta and YaRN, without mscale."""
    exponent = np.arange(0, rope.dim, 2, dtype=np.float32) / np.float32(rope.dim)
    theta = rope.compress_theta if compressed else rope.theta
    freq = (1.0 / np.float32(theta) ** exponent).astype(np.float32)
    if compressed and rope.yarn_original > 0:

        def turns_at(turns: float) -> float:
            return rope.dim * math.log(rope.yarn_original / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low = max(math.floor(turns_at(rope.yarn_beta_fast)), 0)
        high = min(math.ceil(turns_at(rope.yarn_beta_slow)), rope.dim - 1)
        ramp = np.clip((np.arange(rope.dim // 2, dtype=np.float32) - low) / ((high - low) or 1e-3), 0, 1)
        freq = freq / rope.yarn_factor * ramp + freq * (1 - ramp)
    return freq.astype(np.float32)


def rotate(
    x: Float[Array, "... c"], position: Int[Array, "..."], freq: np.ndarray, *, inverse: bool = False
) -> Float[Array, "... c"]:
    """Rotates adjacent pairs of the trailing `2 * len(freq)` channels by `position * freq`, in fp32.

    `position` has x's leading axes, or the first ones of them (it is then broadcast over the others, such as heads).
    """
    angle = position.astype(jnp.float32)[..., None] * freq
    angle = angle.reshape(*position.shape, *([1] * (x.ndim - 1 - position.ndim)), freq.shape[0])
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if inverse:
        sin = -sin
    turned: Float32[Array, "..."] = x[..., -2 * freq.shape[0] :].astype(jnp.float32)
    even, odd = turned[..., 0::2], turned[..., 1::2]
    turned = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(turned.shape)
    return jnp.concatenate([x[..., : -2 * freq.shape[0]], turned.astype(x.dtype)], axis=-1)
