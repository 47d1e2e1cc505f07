"""Codes of block-scaled weights to bf16 numbers inside a kernel, a power of two too small.

The bits of a code go to their place in a bf16 without a correction of the exponent: e4m3 numbers come out 2^-120 times
and e2m1 numbers 2^-126 times what they stand for, subnormal codes included. The rows are multiplied by `SHIFT`, and the
blocks' scales by the rest, so the correction costs nothing for a weight. Rows must stay below 2^28.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Float32, UInt8

SHIFT = 2.0**100

# Two codes in the high bytes of the halves of a register become two bf16: sign | magnitude moved right. Four codes of a
# register at a time; the low nibble of fp4 is moved to the high one first.
_ASM = """{{
.reg .b32 t, u;
prmt.b32 t, $2, 0, 0x1404;
{move}
shr.b32 u, t, {right};
and.b32 t, t, 0x80008000;
lop3.b32 $0, u, {mask}, t, 0xEA;
prmt.b32 t, $2, 0, 0x3424;
{move}
shr.b32 u, t, {right};
and.b32 t, t, 0x80008000;
lop3.b32 $1, u, {mask}, t, 0xEA;
}}"""
_FP8 = _ASM.format(move="", right=4, mask="0x07F007F0")
_FP4_HIGH = _ASM.format(move="", right=6, mask="0x01C001C0")
_FP4_LOW = _ASM.format(move="shl.b32 t, t, 4;", right=6, mask="0x01C001C0")

# The hardware's conversion of four e4m3 codes to fp16. An e2m1 code becomes the e4m3 code of 2^-6 times its number.
FP4_HALF = 2.0**6
_HALF = """{{
.reg .b32 t, u;
.reg .b16 a, b;
{move}
mov.b32 {{a, b}}, t;
cvt.rn.f16x2.e4m3x2 $0, a;
cvt.rn.f16x2.e4m3x2 $1, b;
}}"""
_E2M1_TO_E4M3 = "and.b32 t, t, 0x80808080;\nlop3.b32 t, u, 0x1C1C1C1C, t, 0xEA;"
_FP8_HALF = _HALF.format(move="mov.b32 t, $2;")
_FP4_LOW_HALF = _HALF.format(move="shl.b32 t, $2, 4;\nshl.b32 u, $2, 2;\n" + _E2M1_TO_E4M3)
_FP4_HIGH_HALF = _HALF.format(move="mov.b32 t, $2;\nshr.b32 u, $2, 2;\n" + _E2M1_TO_E4M3)


def fp8(codes: Array, interpret: bool) -> Float[Array, "..."]:
    """e4m3 numbers times 2^-120, in bf16; interpreted, times 1 / SHIFT, in fp32."""
    if interpret:  # XLA's CPU backend reads subnormal numbers as 0
        return codes.astype(jnp.float32) / SHIFT
    return _decoded(_FP8, jax.lax.bitcast_convert_type(codes, jnp.uint8))


def fp4(codes: UInt8[Array, "..."], interpret: bool) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """e2m1 numbers of the low and of the high nibbles times 2^-126, in bf16; interpreted, times 1 / SHIFT, in fp32."""
    if interpret:
        return _e2m1(codes & 15) / SHIFT, _e2m1(codes >> 4) / SHIFT
    return _decoded(_FP4_LOW, codes), _decoded(_FP4_HIGH, codes)


def fp8_half(codes: Array, interpret: bool) -> Float[Array, "..."]:
    """e4m3 numbers in fp16; interpreted, in fp32."""
    if interpret:
        return codes.astype(jnp.float32)
    return _decoded(_FP8_HALF, jax.lax.bitcast_convert_type(codes, jnp.uint8), jnp.float16)


def fp4_half(codes: UInt8[Array, "..."], interpret: bool) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """e2m1 numbers of the low and of the high nibbles over `FP4_HALF`, in fp16; interpreted, times 1, in fp32."""
    if interpret:
        return _e2m1(codes & 15), _e2m1(codes >> 4)
    return _decoded(_FP4_LOW_HALF, codes, jnp.float16), _decoded(_FP4_HIGH_HALF, codes, jnp.float16)


def rest(codes: jax.typing.DTypeLike, interpret: bool) -> float:
    """What a product of rows times `SHIFT` with decoded weights lacks."""
    return 1.0 if interpret else 2.0**26 if codes == jnp.uint8 else 2.0**20


def _e2m1(code: UInt8[Array, "..."]) -> Float32[Array, "..."]:
    wide = code.astype(jnp.int32)
    exponent, half = (wide >> 1) & 3, wide & 1
    normal = jax.lax.bitcast_convert_type((exponent + 126) << 23 | half << 22, jnp.float32)
    return jnp.where(exponent == 0, 0.5 * half, normal) * (1 - 2 * (wide >> 3))


def _decoded(asm: str, codes: UInt8[Array, "..."], dtype: jax.typing.DTypeLike = jnp.bfloat16) -> Float[Array, "..."]:
    shape = jax.ShapeDtypeStruct(codes.shape, dtype)
    return plt.elementwise_inline_asm(asm, args=[codes], constraints="=&r,=&r,r", pack=4, result_shape_dtypes=[shape])[0]


def power_of_two(scale: UInt8[Array, "..."]) -> Float32[Array, "..."]:
    """2^(byte - 127) in fp32."""
    return jax.lax.bitcast_convert_type(scale.astype(jnp.int32) << 23, jnp.float32)
