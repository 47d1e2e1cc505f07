"""DeepSeek's own rounding of activations, `TargetConfig.numerics` "reference".

Its inference code rounds key-value entries and the indexer's queries and keys to fp8 and fp4, and the inputs of quantised
linear maps to fp8. Nothing is stored as codes here: results are the numbers that the codes stand for, in the dtype of the
input. Programs are compiled with `compiler_options`. No function has a useful gradient. Source: DeepSeek-V4's published
inference code (scales are powers of two, `ue8m0`).
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, Int32

from dspark_kernels.block_scaled import BlockScaled, widened
from dspark_kernels.expert_mlp import swiglu
from dspark_kernels.precision import einsum

INPUT_GROUP = 128  # channels that share a scale: inputs of linear maps
CACHE_GROUP = 64  # key-value entries
INDEX_GROUP = 32  # the indexer's queries and keys


def compiler_options(config: object) -> dict[str, bool] | None:
    """What `jax.jit` needs for a model's programs: XLA may leave out a rounding to bfloat16 in front of a wider operation,
    which with "reference" it must not.
    """
    return {"xla_allow_excess_precision": False} if getattr(config, "numerics", "default") == "reference" else None


def fp8_rounded(x: Float[Array, "... c"], group: int) -> Float[Array, "... c"]:
    """The nearest e4m3 numbers under a scale for every `group` channels; the last group may be smaller."""
    return _rounded_by_group(x, group, largest=448.0, floor=1e-4, mantissa=3, least=-6)


def fp4_rounded(x: Float[Array, "... c"], group: int) -> Float[Array, "... c"]:
    """The nearest e2m1 numbers under a scale for every `group` channels; the last group may be smaller."""
    return _rounded_by_group(x, group, largest=6.0, floor=6 * 2.0**-126, mantissa=1, least=0)


def hadamard(x: Float[Array, "... c"]) -> Float[Array, "... c"]:
    """The orthonormal Walsh-Hadamard transform over c channels, a power of two, in Sylvester's order, in fp32."""
    size, y = x.shape[-1], x.astype(jnp.float32)
    half = 1
    while half < size:
        pairs = y.reshape(*x.shape[:-1], size // (2 * half), 2, half)
        even, odd = pairs[..., 0, :], pairs[..., 1, :]
        y = jnp.stack([even + odd, even - odd], axis=-2).reshape(x.shape)
        half *= 2
    return (y * np.float32(size**-0.5)).astype(x.dtype)


def cache_rounded(entry: Float[Array, "... c"], rotated: int) -> Float[Array, "... c"]:
    """A key-value entry as the cache keeps it: fp8, but for the `rotated` last channels."""
    split = entry.shape[-1] - rotated
    return jnp.concatenate([fp8_rounded(entry[..., :split], CACHE_GROUP), entry[..., split:]], axis=-1)


def index_rounded(x: Float[Array, "... c"]) -> Float[Array, "... c"]:
    """The indexer's queries or keys: fp4 behind a Hadamard transform, which spreads outliers over all channels."""
    return fp4_rounded(hadamard(x), INDEX_GROUP)


def index_scores(
    heads: Float[Array, "R w h c"], keys: Float[Array, "R N c"], weight: Float[Array, "R w h"]
) -> Float32[Array, "R w N"]:
    """`sum_h w_h relu(<q_h, k>)` with products and sum rounded to the dtype of `heads`."""
    products = jax.nn.relu(einsum("rwhc,rnc->rwhn", heads, keys).astype(heads.dtype))
    return jnp.sum(products * weight[..., None], axis=2).astype(jnp.float32)


def head_norm(x: Float[Array, "... c"], eps: float) -> Float[Array, "... c"]:
    """Root-mean-square norm without a weight, every step of it rounded to x's dtype."""
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + jnp.asarray(eps, x.dtype))


def expert_mlp(
    x: Float[Array, "B d"],
    ids: Int[Array, "B k"],
    weights: Float32[Array, "B k"],
    w1: Float[Array, "E d f"] | BlockScaled,
    w3: Float[Array, "E d f"] | BlockScaled,
    w2: Float[Array, "E f d"] | BlockScaled,
    *,
    limit: float,
    fp8_inputs: bool,
) -> Float32[Array, "B d"]:
    """`dspark_kernels.expert_mlp`, with each expert's output rounded to x's dtype, and with `fp8_inputs` the inputs of its
    three products to fp8. One expert after the other, in the order of ids, on every row: no kernel rounds like that.
    """
    experts = (w1.codes if isinstance(w1, BlockScaled) else w1).shape[0]
    chosen = jnp.sum(jax.nn.one_hot(ids, experts, dtype=jnp.float32) * weights[:, :, None], axis=1)
    rows = fp8_rounded(x, INPUT_GROUP) if fp8_inputs else x

    def add(total: Array, expert: tuple) -> tuple[Array, None]:
        first, third, second, weight = expert
        gate, up = (einsum("bd,df->bf", rows, widened(w, x.dtype)).astype(x.dtype) for w in (first, third))
        hidden = swiglu(gate.astype(jnp.float32), up.astype(jnp.float32), limit) * weight[:, None]
        hidden = hidden.astype(x.dtype)
        hidden = fp8_rounded(hidden, INPUT_GROUP) if fp8_inputs else hidden
        return total + einsum("bf,fd->bd", hidden, widened(second, x.dtype)).astype(x.dtype).astype(jnp.float32), None

    return jax.lax.scan(add, jnp.zeros(x.shape, jnp.float32), (w1, w3, w2, chosen.T))[0]


def _rounded_by_group(
    x: Float[Array, "... c"], group: int, *, largest: float, floor: float, mantissa: int, least: int
) -> Float[Array, "... c"]:
    """Scales groups by the least power of two that brings their largest magnitude to `largest` or below."""
    width = x.shape[-1]
    padding = [(0, 0)] * (x.ndim - 1) + [(0, -width % group)]
    y = jnp.pad(x.astype(jnp.float32), padding).reshape(*x.shape[:-1], -1, group)
    peak = jnp.maximum(jnp.max(jnp.abs(y), axis=-1, keepdims=True), np.float32(floor))
    scale = _power_of_two_above(peak * np.float32(1 / largest))
    codes = _nearest(jnp.clip(y / scale, -largest, largest), mantissa, least)
    return (codes * scale).reshape(*x.shape[:-1], -1)[..., :width].astype(x.dtype)


def _nearest(x: Float32[Array, "..."], mantissa: int, least: int) -> Float32[Array, "..."]:
    """The nearest number with `mantissa` bits behind the leading one; below 2^least they are spaced as at it. Ties to even.

    Arithmetic, not a conversion to an 8-bit dtype and back, which XLA may leave out.
    """
    exponent = (jax.lax.bitcast_convert_type(x, jnp.int32) >> 23 & 255) - 127
    step = _power_of_two(jnp.maximum(exponent, least) - mantissa)
    return jnp.round(x / step) * step


def _power_of_two_above(x: Float32[Array, "..."]) -> Float32[Array, "..."]:
    """The least power of two that is at least `x`, a positive normal number."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return _power_of_two((bits >> 23) - 127 + (bits & 0x7FFFFF != 0))


def _power_of_two(exponent: Int32[Array, "..."]) -> Float32[Array, "..."]:
    return jax.lax.bitcast_convert_type(exponent + 127 << 23, jnp.float32)
