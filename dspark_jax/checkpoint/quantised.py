"""DeepSeek-V4's quantised tensors on the host: how a file stores them, and the numbers that they stand for.

fp8: e4m3 codes with a scale for every block of 128 × 128. fp4: two e2m1 codes a byte, for experts alone, with a scale for
every 32 input channels. A scale is a byte s, the number 2^(s - 127); 255 is no number. Stored matrices are (out, in).
"""

from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32, Int8, Shaped, UInt8

from dspark_kernels.formats import E2M1, FP4_BLOCK, FP8_BLOCK, BlockFormat, block_shapes

FP8, FP4, SCALE = "F8_E4M3", "I8", "F8_E8M0"  # dtypes as safetensors names them
NAN_SCALE = 255
# Linear maps that are quantised in the published files, but for the compressors'.
_MATRICES = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "w1", "w2", "w3", "main_proj")
# Numbers by byte.
_E4M3 = np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float32)
_PAIRS = np.stack([np.array(E2M1, np.float32)[np.arange(256) % 16], np.array(E2M1, np.float32)[np.arange(256) // 16]], axis=1)
_POWERS = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan))
# What `quantization_config` of config.json must say, where it says anything.
_CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [FP8_BLOCK, FP8_BLOCK]}


def stored_as(key: str, dtype: str) -> BlockFormat | None:
    """The format of a weight with this dtype in its file; None if it is none of the two, or none for this weight."""
    if dtype == FP8 and key.endswith(".weight"):
        return "fp8"
    return "fp4" if dtype == FP4 and ".experts." in key else None


def scale_key(key: str) -> str:
    """Name of the scales of a weight."""
    return f"{key.removesuffix('.weight')}.scale"


def stored_shapes(kind: BlockFormat, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes in a file of the codes and scales of an (out, in) matrix."""
    codes, scale = block_shapes(kind, shape[1], shape[0])
    return codes[::-1], scale[::-1]


def dequantised(
    kind: BlockFormat, codes: UInt8[np.ndarray, "out _"] | Int8[np.ndarray, "out _"], scale: UInt8[np.ndarray, "_ _"]
) -> Float32[np.ndarray, "out in"]:
    """The numbers of a matrix; exact, infinite where float32 ends."""
    powers = _POWERS[scale]
    if kind == "fp4":
        values = _PAIRS[codes.view(np.uint8)].reshape(len(codes), -1)
        powers = np.repeat(powers, FP4_BLOCK, axis=1)
    else:
        values = _E4M3[codes]
        powers = np.repeat(np.repeat(powers, FP8_BLOCK, axis=0), FP8_BLOCK, axis=1)
    with np.errstate(over="ignore"):
        return np.multiply(values, powers[: values.shape[0], : values.shape[1]], out=values)


def published_format(key: str) -> BlockFormat | None:
    """The format in which the published files hold a tensor; None for what they hold as numbers."""
    name, _, last = key.rpartition(".")
    if last != "weight" or name.rpartition(".")[2] not in _MATRICES or ".compressor." in key:
        return None
    return "fp4" if ".experts." in key else "fp8"


def quantised(
    kind: BlockFormat, weight: Float32[np.ndarray, "out in"]
) -> tuple[Shaped[np.ndarray, "out _"], Shaped[np.ndarray, "_ _"]]:
    """Codes and scales of a matrix, as a file has them.

    A block's scale is the least power of two that brings its largest magnitude to the format's largest number or below; a
    number then becomes the nearest code, of two equally near ones the even one.
    """
    rows, columns = weight.shape
    height, width, largest = (1, FP4_BLOCK, 6) if kind == "fp4" else (FP8_BLOCK, FP8_BLOCK, 448)
    padded = np.pad(weight, ((0, -rows % height), (0, -columns % width)))
    blocks = padded.reshape(padded.shape[0] // height, height, -1, width)
    mantissa, exponent = np.frexp(np.abs(blocks).max(axis=(1, 3)) / np.float32(largest))
    exponent = np.clip(exponent - (mantissa == 0.5), -127, 127)
    scaled = np.ldexp(blocks, -exponent[:, None, :, None]).reshape(padded.shape)[:rows, :columns]
    scale = (exponent + 127).astype(np.uint8).view(jnp.float8_e8m0fnu)
    if kind == "fp8":
        return scaled.astype(jnp.float8_e4m3fn), scale
    codes = scaled.astype(jnp.float4_e2m1fn).view(np.uint8)
    return (codes[:, 0::2] | codes[:, 1::2] << 4).view(np.int8), scale


def nan_faults(key: str, dtype: str, values: UInt8[np.ndarray, "..."] | Int8[np.ndarray, "..."]) -> Iterator[str]:
    """What is no number in the bytes of a tensor with one of the three dtypes; every fp4 code is a number."""
    if dtype == SCALE:
        bad, what = values == NAN_SCALE, f"scales of byte {NAN_SCALE} (NaN)"
    elif dtype == FP8:
        bad, what = values & 0x7F == 0x7F, "NaN codes"
    else:
        return
    if bad.any():
        yield f"{key} holds {int(bad.sum())} {what}, the first at {[int(i) for i in np.argwhere(bad)[0]]}"


def config_faults(hf: Mapping[str, Any]) -> Iterator[str]:
    """What config.json says of its quantisation that this format is not."""
    found = hf.get("quantization_config") or {}
    if not isinstance(found, dict):
        yield f"quantization_config is {found!r}; expected an object, or null"
        return
    for name, only in _CONFIG.items():
        if found.get(name) not in (None, only):
            yield f"quantization_config.{name} is {found[name]!r}; only {only!r} is supported"
    kind = hf.get("expert_dtype", found.get("expert_dtype"))
    if kind not in (None, "fp4", "fp8"):
        yield f"expert_dtype is {kind!r}; only 'fp4' and 'fp8' are supported"


def config_of(kind: BlockFormat) -> dict[str, Any]:
    """The keys of a config.json whose experts are quantised."""
    return {"expert_dtype": kind, "quantization_config": {**_CONFIG, "activation_scheme": "dynamic"}}
