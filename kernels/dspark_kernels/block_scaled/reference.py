"""Block-scaled weights in plain jnp: DeepSeek-V4's fp8 and fp4 formats, widened in front of a product."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Shaped, UInt8

from dspark_kernels.formats import E2M1, FP4_BLOCK, FP8_BLOCK


class BlockScaled(NamedTuple):
    """A stack of (in, out) matrices as codes and scales; a scale byte s stands for 2^(s - 127).

    The dtype of the codes tells the format, `formats.block_shapes` the shapes. uint8: two e2m1 codes a byte, the even input
    channel in the low nibble. float8_e4m3fn: a code each.
    """

    codes: Shaped[Array, "..."]
    scale: UInt8[Array, "..."]


def widened(
    weight: BlockScaled | Float[Array, "... in out"], dtype: jax.typing.DTypeLike
) -> Float[Array, "... in out"]:
    """The weights as numbers of `dtype`; dense weights come back as they are.

    Exact in bfloat16 and float32, but that magnitudes below 2^-126 and blocks of scale byte 0 (2^-127) may become zero.
    """
    if not isinstance(weight, BlockScaled):
        return weight
    codes, scale = weight.codes, _power_of_two(weight.scale)
    if codes.dtype == jnp.uint8:
        pairs = jnp.stack([codes & 15, codes >> 4], axis=-2)  # [..., in / 2, 2, out]
        values = jnp.asarray(E2M1, jnp.float32)[pairs].reshape(*codes.shape[:-2], 2 * codes.shape[-2], codes.shape[-1])
        scale = jnp.repeat(scale, FP4_BLOCK, axis=-2)
    else:
        values = codes.astype(jnp.float32)
        scale = jnp.repeat(jnp.repeat(scale, FP8_BLOCK, axis=-2), FP8_BLOCK, axis=-1)
    rows, columns = values.shape[-2:]
    return (values * scale[..., :rows, :columns]).astype(dtype)


def _power_of_two(scale: UInt8[Array, "..."]) -> Float32[Array, "..."]:
    """2^(byte - 127): the byte is the exponent field of a float32. 0 gives 0: devices read subnormal numbers as that anyway."""
    return jax.lax.bitcast_convert_type(scale.astype(jnp.uint32) << 23, jnp.float32)
