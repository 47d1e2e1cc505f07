"""Writing a model as a checkpoint that `read_checkpoint` and other readers of DeepSeek's layout take."""

import json
import math
import re
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from dspark_jax.checkpoint import layout
from dspark_jax.checkpoint.files import INDEX, SINGLE, listed
from dspark_jax.checkpoint.quantised import config_of, published_format, quantised, scale_key, stored_shapes
from dspark_jax.config import DraftConfig, to_hf
from dspark_jax.config_dense import DenseConfig, ModelConfig, dense_to_hf
from dspark_jax.config_drafter import StandaloneConfig, standalone_to_hf
from dspark_jax.errors import CheckpointError, raise_all
from dspark_kernels.formats import BlockFormat

_DTYPES = {"bfloat16": np.dtype(jnp.bfloat16), "float16": np.dtype(np.float16), "float32": np.dtype(np.float32)}
_CODES = {"fp4": np.dtype(np.int8), "fp8": np.dtype(jnp.float8_e4m3fn), "scale": np.dtype(jnp.float8_e8m0fnu)}
_STALE = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")

Shard = list[tuple[layout.Entry, list[str]]]


def write_checkpoint(
    folder: Path,
    config: ModelConfig,
    draft: DraftConfig | None,
    params: nnx.State,
    *,
    dtype: str = "bfloat16",
    max_shard_bytes: int = 5 * 10**9,
    quantise: bool = False,
) -> None:
    """Writes config.json and the weights under DeepSeek's key names; linear maps are stored (out, in).

    Args:
      folder: made if need be; weights of an earlier model in it are replaced, other files stay.
      config: the target's configuration.
      draft: the drafter's, None for a target alone.
      params: parameters of the `SpeculativeLM` of these configurations.
      dtype: "bfloat16", "float16" or "float32", for weights. Data that the architecture keeps in fp32 are stored as
        F32, hash tables as I64, quantised experts as they are.
      quantise: stores linear maps as fp8 and routed experts as fp4, with scales, as the published files do.
      max_shard_bytes: a larger model is split into files of at most this size (a larger tensor has a file of its own).

    Raises:
      CheckpointError: `dtype` or `max_shard_bytes` is impossible, `params` belong to another configuration, or a value
        is not finite in `dtype`; files of an earlier model then stay as they were.
      ConfigError: the drafter's configuration is impossible on this target, or experts with an odd width are to be fp4.
    """
    _check_options(dtype, max_shard_bytes)
    folder, to = Path(folder), _DTYPES[dtype]
    described = _described(config, draft, quantise)
    entries = layout.entries(params)
    _check(entries, layout.entries(layout.skeleton(config, draft, dtype=to, axis=None)[1]), str(folder))
    values = {path: variable.get_value() for path, variable in nnx.to_flat_state(params)}
    _write(folder, {**described, "torch_dtype": dtype}, entries, values, Stored(to, quantise), max_shard_bytes)


def write_drafter(
    folder: Path, draft: StandaloneConfig, params: nnx.State, *, dtype: str = "bfloat16", max_shard_bytes: int = 5 * 10**9
) -> None:
    """Writes a standalone drafter alone, config.json and weights, in the layout of DeepSpec, which vLLM reads too.

    Args:
      folder: made if need be; weights of an earlier model in it are replaced, other files stay.
      draft: its configuration.
      params: parameters of the `DenseLM` that holds it, or of them those below "draft".
      dtype, max_shard_bytes: as for `write_checkpoint`.

    Raises:
      CheckpointError: `dtype` or `max_shard_bytes` is impossible, or a value is not finite in `dtype`.
    """
    _check_options(dtype, max_shard_bytes)
    flat = nnx.to_flat_state(params)
    values = {path: variable.get_value() for path, variable in flat if path[0] == "draft"}
    entries = [entry for entry in layout.entries(params) if entry.path in values]
    config = {**standalone_to_hf(draft), "torch_dtype": dtype}
    _write(Path(folder), config, entries, values, Stored(_DTYPES[dtype], False), max_shard_bytes)


def _check_options(dtype: str, max_shard_bytes: int) -> None:
    if dtype not in _DTYPES or max_shard_bytes < 1:
        raise CheckpointError(
            f"dtype is {dtype!r}, max_shard_bytes is {max_shard_bytes};"
            f" expected one of {', '.join(_DTYPES)}, and at least 1"
        )


def _write(
    folder: Path,
    config: dict[str, Any],
    entries: list[layout.Entry],
    values: dict[layout.Path, Any],
    stored: "Stored",
    max_shard_bytes: int,
) -> None:
    """The weight files, their index if they are several, and config.json."""
    shards = list(_shards(entries, stored, max_shard_bytes))
    count = len(shards)
    names = [SINGLE] if count == 1 else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".writing-") as part:
        for name, shard in zip(names, shards, strict=True):
            save_file(_tensors(shard, values, stored, str(folder)), Path(part, name), metadata={"format": "pt"})
        for path in folder.iterdir():
            if _STALE.fullmatch(path.name):
                path.unlink()
        for name in names:
            Path(part, name).replace(folder / name)
    if count > 1:
        keys = [(name, e, key) for name, shard in zip(names, shards, strict=True) for e, keys in shard for key in keys]
        where = {tensor: name for name, entry, key in keys for tensor in stored.names(entry, key)}
        total = sum(stored.size(entry, key) for entry in entries for key in entry.keys)
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where})
    _write_json(folder / "config.json", config)


def _described(config: ModelConfig, draft: DraftConfig | None, quantise: bool) -> dict[str, Any]:
    """config.json but for its dtype."""
    if isinstance(config, DenseConfig):
        if quantise:
            raise CheckpointError("quantise is for DeepSeek-V4-style models, and this is a dense model; leave it out")
        return dense_to_hf(config)
    published = replace(config, expert_weights="fp4") if quantise and config.expert_weights == "dense" else config
    quantisation = {} if published.expert_weights == "dense" else config_of(published.expert_weights)
    return {**to_hf(config, draft), **quantisation}


class Stored(NamedTuple):
    """How parameters are stored: numbers in `dtype`, but linear maps as codes with scales if `quantise`."""

    dtype: np.dtype
    quantise: bool

    def kind(self, entry: layout.Entry, key: str) -> BlockFormat | None:
        """The format that the writer quantises a tensor to."""
        return published_format(key) if self.quantise and entry.dtype == "weight" else None

    def names(self, entry: layout.Entry, key: str) -> list[str]:
        """The tensors of the file that hold `key`."""
        return [key] if self.kind(entry, key) is None else [key, scale_key(key)]

    def size(self, entry: layout.Entry, key: str) -> int:
        """Their bytes."""
        kind = self.kind(entry, key)
        if kind is None:
            return math.prod(entry.shape) * _file_dtype(entry, self.dtype).itemsize
        return sum(math.prod(shape) for shape in stored_shapes(kind, entry.shape))

    def tensors(self, entry: layout.Entry, key: str, value: np.ndarray) -> dict[str, np.ndarray]:
        """Their contents; a value that is not finite stays as it is."""
        kind = self.kind(entry, key)
        if kind is not None and np.isfinite(value).all():
            return dict(zip(self.names(entry, key), quantised(kind, value.astype(np.float32, copy=False)), strict=True))
        if entry.dtype in _CODES:
            return {key: value.view(_CODES[entry.dtype])}
        with np.errstate(over="ignore"):  # found afterwards, with the tensor's name
            return {key: value.astype(_file_dtype(entry, self.dtype), copy=False)}


def _tensors(shard: Shard, values: dict[layout.Path, Any], stored: Stored, subject: str) -> dict[str, np.ndarray]:
    """The arrays of one file; raises CheckpointError where a value is not finite."""
    tensors: dict[str, np.ndarray] = {}
    for entry, keys in shard:
        arrays = dict(zip(entry.keys, entry.save(np.asarray(values[entry.path])), strict=True))
        for key in keys:
            tensors |= stored.tensors(entry, key, arrays[key])
    bad = [key for key, value in tensors.items() if not np.isfinite(value).all()]
    raise_all(CheckpointError, subject, listed(f"{key} is not finite as {tensors[key].dtype.name}" for key in bad))
    # The file is written from raw memory, which for a transposed view is in the wrong order.
    return {key: np.ascontiguousarray(value) for key, value in tensors.items()}


def _check(entries: list[layout.Entry], wanted: list[layout.Entry], subject: str) -> None:
    found, expected = ({e.path: e for e in group} for group in (entries, wanted))
    names = {path: ".".join(map(str, path)) for path in [*found, *expected]}
    faults = [f"{names[p]} is missing in params" for p in expected if p not in found]
    faults += [f"{names[p]} in params has no place in this configuration" for p in found if p not in expected]
    for path in (p for p in found if p in expected):
        have, want = (f"{len(g[path].keys)} tensors of shape {list(g[path].shape)}" for g in (found, expected))
        if have != want:
            faults.append(f"{names[path]} makes {have}; this configuration wants {want}")
    raise_all(CheckpointError, subject, listed(faults))


def _shards(entries: list[layout.Entry], stored: Stored, limit: int) -> Iterator[Shard]:
    """Runs of (entry, some of its keys) that fit into a file; the stacked experts of an entry may be split."""
    shard: Shard = []
    used = 0
    for entry in entries:
        keys: list[str] = []
        for key in entry.keys:
            size = stored.size(entry, key)
            if used and used + size > limit:
                if keys:
                    shard.append((entry, keys))
                yield shard
                shard, keys, used = [], [], 0
            keys.append(key)
            used += size
        shard.append((entry, keys))
    yield shard


def _file_dtype(entry: layout.Entry, dtype: np.dtype) -> np.dtype:
    fixed = {"fp32": np.dtype(np.float32), "int": np.dtype(np.int64), **_CODES}
    return fixed.get(entry.dtype, dtype)


def _write_json(path: Path, value: dict) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    part.replace(path)
