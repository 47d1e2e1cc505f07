"""What the headers of the weight files contradict, found before any tensor is read."""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple, get_args

from dspark_jax.checkpoint.files import TensorFiles, listed, natural
from dspark_jax.checkpoint.layout import Entry
from dspark_jax.checkpoint.quantised import FP4, FP8, SCALE, published_format, scale_key, stored_as, stored_shapes
from dspark_jax.config_dense import DenseConfig, ModelConfig
from dspark_kernels.formats import BlockFormat

_SPARE = 64  # more than in the weights, when the headers are compared all the same
_FLOATS = ("BF16", "F16", "F32")
_PACKED = ("I8", "U8", "F4")  # where one is not expected, its shape says nothing
_ACCEPTED = {
    "weight": _FLOATS,
    "fp32": _FLOATS,
    "int": ("I64", "I32"),
    "fp4": (FP4,),
    "fp8": (FP8,),
    "scale": (SCALE,),
}


class Wanted(NamedTuple):
    """A tensor that must be there. `why` says more about one that is missing."""

    shape: tuple[int, ...]
    dtypes: Sequence[str]
    why: str = ""


def wanted(entry: Entry, key: str, files: TensorFiles) -> Iterator[tuple[str, Wanted]]:
    """The tensor `key` of a parameter; of a quantised weight that will be dequantised, its codes and its scales."""
    info = files.tensors.get(key)
    kind = stored_format(entry, key, files)
    if info is None or kind is None:
        yield key, Wanted(entry.shape, _ACCEPTED[entry.dtype])
        return
    codes, scale = stored_shapes(kind, entry.shape)
    yield key, Wanted(codes, (info.dtype,))
    yield scale_key(key), Wanted(scale, (SCALE,), f": {key} has dtype {info.dtype}, which needs scales")


def stored_format(entry: Entry, key: str, files: TensorFiles) -> BlockFormat | None:
    """The quantised format in which the file has a tensor that the module has as numbers."""
    info = files.tensors.get(key)
    matrix = entry.dtype == "weight" and len(entry.shape) == 2
    return stored_as(key, info.dtype) if matrix and info is not None else None


def header_faults(entries: list[Entry], files: TensorFiles, *, check_stages: bool) -> list[str]:
    """Missing and unexpected tensors, dtypes and shapes; of draft stages only with `check_stages`."""
    expected = dict(pair for entry in entries for key in entry.keys for pair in wanted(entry, key, files))
    missing: list[str] = []
    shapes: list[str] = []
    dtypes: list[str] = []
    for name in natural(expected):
        info, want = files.tensors.get(name), expected[name]
        if info is None:
            if not files.is_lost(name):
                missing.append(f"{name} is missing{want.why}")
            continue
        if info.dtype not in want.dtypes:
            dtypes.append(f"{name} has dtype {info.dtype}; expected {_either(want.dtypes)}{_quantised(name, want)}")
        if info.shape != want.shape and (info.dtype in want.dtypes or info.dtype not in _PACKED):
            shapes.append(
                f"{name} has shape {list(info.shape)}; expected {list(want.shape)} by config.json,"
                " which belongs to other weights"
            )
    extra = [n for n in natural(files.tensors.keys() - expected.keys()) if check_stages or not n.startswith("mtp.")]
    return [
        *listed(missing),
        *listed(f"{name} is unexpected: config.json has no place for it" for name in extra),
        *listed(shapes),
        *listed(dtypes),
    ]


def size_faults(config: ModelConfig, files: TensorFiles) -> list[str]:
    """Numbers of layers and of experts far beyond those that the tensors' names have, for which no skeleton could be made."""
    faults = []
    sizes = [("num_hidden_layers", config.num_hidden_layers, r"(?:model\.)?layers\.(\d+)\.")]
    if not isinstance(config, DenseConfig):
        sizes.append(("n_routed_experts", config.n_routed_experts, r".*\.experts\.(\d+)\."))
    for name, said, pattern in sizes:
        found = len({match[1] for tensor in files.names if (match := re.match(pattern, tensor))})
        if said > 4 * found + _SPARE:
            faults.append(f"{name} is {said} in config.json, and the weights have {found} of them: it belongs to other weights")
    return faults


def expert_format(files: TensorFiles, entries: list[Entry], weights: str) -> tuple[BlockFormat | None, list[str]]:
    """The one quantised format of all routed experts, or why there is none."""
    keys = [key for entry in entries if "experts" in entry.path for key in entry.keys if key in files.tensors]
    found = {key: stored_as(key, files.tensors[key].dtype) for key in keys}
    for kind in get_args(BlockFormat):
        if set(found.values()) == {kind}:
            return kind, []
    examples = {kind: key for key, kind in reversed(found.items())}
    seen = ", ".join(f"{key} has dtype {files.tensors[key].dtype}" for key in examples.values())
    return None, [
        f"weights is {weights!r}, for which all routed experts must be stored alike, as packed fp4 (I8) or as fp8 (F8_E4M3);"
        f" {seen or 'there are none'}: use 'dequantised'"
    ]


def linear_faults(files: TensorFiles, entries: list[Entry]) -> list[str]:
    """The linear maps that `entries` have as fp8 codes and the files do not."""
    keys = [key for e in entries if e.dtype == "fp8" and "experts" not in e.path for key in e.keys if key in files.tensors]
    unlike = [key for key in keys if files.tensors[key].dtype != FP8]
    if not unlike:
        return []
    return [
        "weights is 'quantised-all', for which all linear maps that published files hold as fp8 (F8_E4M3) must be so;"
        f" {len(unlike)} are not, such as {unlike[0]}: use 'quantised' or 'dequantised'"
    ]


def quantised_maps(files: TensorFiles) -> tuple[bool, list[str]]:
    """Whether the linear maps that are quantised in the published files are so here, or why there is no one answer."""
    maps = {key: info.dtype for key, info in files.tensors.items() if published_format(key)}
    found = {stored_as(key, dtype) is not None: key for key, dtype in maps.items()}
    if len(found) < 2:
        return True in found, []
    seen = " and ".join(f"{key} has dtype {maps[key]}" for key in found.values())
    return False, [
        "numerics is 'reference', which rounds the inputs of quantised linear maps: all of them must be fp8 or fp4, or none;"
        f" {seen}: use 'default'"
    ]


def _either(dtypes: Sequence[str]) -> str:
    return " or ".join([", ".join(dtypes[:-1]), dtypes[-1]] if len(dtypes) > 1 else dtypes)


def _quantised(name: str, want: Wanted) -> str:
    """What else a matrix may be stored as."""
    if want.dtypes is not _FLOATS or len(want.shape) != 2 or not name.endswith(".weight"):
        return ""
    return f", or {FP8}{f' or packed {FP4}' if '.experts.' in name else ''} with scales"
