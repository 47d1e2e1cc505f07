"""Loading a published checkpoint: faults are found in the headers, then one parameter at a time is placed."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tokenizers import Tokenizer

from dspark_jax.checkpoint import layout
from dspark_jax.checkpoint.files import TensorFiles, TensorInfo, listed, natural, open_files, stage_numbers
from dspark_jax.config import DraftConfig, TargetConfig, draft_from_hf, read_config, target_from_hf
from dspark_jax.errors import CheckpointError, ConfigError, raise_all

_ACCEPTED = {"weight": ("BF16", "F16", "F32"), "fp32": ("BF16", "F16", "F32"), "int": ("I64", "I32")}
# With a fault in the headers, values are still checked where that takes a second, so that one run shows everything.
_SCAN_BYTES = 2**31

Place = Callable[[layout.Path, np.ndarray], jax.Array]


class CheckpointNotice(UserWarning):
    """A checkpoint is loaded in part; the message says which part is left out and why."""


class LoadedCheckpoint(NamedTuple):
    """A checkpoint's model: `nnx.merge(graph, params)` is its `SpeculativeLM`; `draft` is None for a target alone."""

    config: TargetConfig
    draft: DraftConfig | None
    graph: nnx.GraphDef
    params: nnx.State


def read_checkpoint(
    folder: Path, *, dtype: jax.typing.DTypeLike = jnp.bfloat16, axis: str | None = "expert", place: Place | None = None
) -> LoadedCheckpoint:
    """Loads config.json and the safetensors files of `folder` (DeepSeek-V4's key names, unquantised).

    Args:
      folder: holds config.json and model.safetensors, or model.safetensors.index.json and the files it names.
      dtype: float32, bfloat16 or float16, for weights and activations. What the architecture keeps in fp32
        (hyper-connections, sinks, biases, position embeddings) stays fp32, hash tables become int32.
      axis: mesh axis that experts are split over, see `SpeculativeLM`.
      place: puts a host array on devices, given the parameter's path; by default on the default device.

    The stages of the drafter are counted in the weights. `mtp.*` tensors without `dspark_block_size` in config.json are
    left out with one `CheckpointNotice`.

    Raises:
      ConfigError: config.json is impossible in itself, or `dtype` is none of the three.
      CheckpointError: a file is missing or damaged, or the weights contradict config.json: all faults in one message.
    """
    dtype = jnp.dtype(dtype)
    if dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ConfigError(f"dtype is {dtype.name}; expected float32, bfloat16 or float16")
    folder = Path(folder)
    hf = read_config(folder)
    source = str(folder / "config.json")
    config = target_from_hf(hf, source)
    with open_files(folder) as files:
        faults = list(files.faults)
        draft, stage_faults = _draft(hf, config, files, source)
        faults += stage_faults
        if not files.names:
            raise_all(CheckpointError, str(folder), faults or ["the weight files hold no tensors"])
        graph, params = layout.skeleton(config, draft, dtype=dtype, axis=axis)
        entries = layout.entries(params)
        faults += _header_faults(entries, files, check_stages=draft is not None)
        if faults and sum(_bytes(info) for info in files.tensors.values()) > _SCAN_BYTES:
            raise_all(CheckpointError, str(folder), faults)
        arrays = _stream(entries, files, config, dtype, place or _on_default_device, faults)
        raise_all(CheckpointError, str(folder), faults)
    nnx.replace_by_pure_dict(params, nnx.traversals.unflatten_mapping(arrays))
    return LoadedCheckpoint(config, draft, graph, params)


def read_tokenizer(folder: Path) -> Tokenizer:
    """Reads a checkpoint folder's tokenizer.json; padding and truncation that it may ask for are switched off.

    The tokenizer may have fewer tokens than config.json's `vocab_size` (embeddings are often padded), never more.

    Raises:
      CheckpointError: the file is missing or damaged, or makes ids that the model has no embedding for.
    """
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"{folder}: no tokenizer.json; copy it from the published model")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{path}: not a tokenizer ({error}); download it again") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    if not vocab:
        raise CheckpointError(f"{path}: has no tokens; download it again")
    size = read_config(Path(folder)).get("vocab_size")
    token = max(vocab, key=vocab.__getitem__)
    if not isinstance(size, int) or vocab[token] >= size:
        raise CheckpointError(
            f"{path}: token {token!r} has id {vocab[token]}, but config.json's vocab_size is {size!r};"
            " use the tokenizer published with these weights"
        )
    return tokenizer


def _draft(
    hf: Mapping[str, Any], config: TargetConfig, files: TensorFiles, source: str
) -> tuple[DraftConfig | None, list[str]]:
    """The drafter that config.json and the weights agree on, and where they do not."""
    stages = stage_numbers(files.names)
    draft = draft_from_hf(hf, len(stages), source)
    if draft is None:
        if stages:
            warnings.warn(
                f"{files.folder}: has mtp.* tensors but config.json has no dspark_block_size,"
                " so they are no DSpark stages; loading the target alone",
                CheckpointNotice,
                stacklevel=3,
            )
        return None, []
    if not files.names:  # no file could be read: nothing to count
        return None, []
    faults = draft.faults(config)
    if stages != list(range(len(stages))):
        faults.append(f"the stages mtp.* are numbered {stages}; expected 0 … {len(stages) - 1} without gaps")
    return (None, faults) if faults else (draft, [])


def _header_faults(entries: list[layout.Entry], files: TensorFiles, *, check_stages: bool) -> list[str]:
    """What the headers contradict: missing, unexpected and quantised tensors, dtypes and shapes."""
    expected = {key: entry for entry in entries for key in entry.keys}
    missing: list[str] = []
    shapes: list[str] = []
    dtypes: list[str] = []
    quantised: dict[str, str] = {}  # name -> dtype
    for name in natural(expected):
        info, entry = files.tensors.get(name), expected[name]
        if info is None:
            if name not in files.lost:
                missing.append(name)
        elif _quantised(info.dtype, entry.dtype):
            quantised[name] = info.dtype
        else:
            accepted = _ACCEPTED[entry.dtype]
            if info.dtype not in accepted:
                dtypes.append(f"{name} has dtype {info.dtype}; expected {', '.join(accepted[:-1])} or {accepted[-1]}")
            if info.shape != entry.shape:
                shapes.append(
                    f"{name} has shape {list(info.shape)}; expected {list(entry.shape)} by config.json,"
                    " which belongs to other weights"
                )
    extra = [
        n
        for n in natural(files.tensors.keys() - expected.keys())
        if (check_stages or not n.startswith("mtp.")) and f"{n.removesuffix('.scale')}.weight" not in quantised
    ]
    hint = ""
    if any(n.startswith("model.") for n in extra):
        hint = "; names as in transformers ('model.…') are not supported, use the published file"
    return [
        *listed(f"{name} is missing" for name in missing),
        *listed(f"{name} is unexpected: config.json has no place for it{hint}" for name in extra),
        *listed(shapes),
        *listed(dtypes),
        *listed(
            f"{name} has dtype {dtype}: quantised weights are not supported yet; convert the checkpoint to bfloat16"
            for name, dtype in quantised.items()
        ),
    ]


def _quantised(dtype: str, kind: str) -> bool:
    return kind != "int" and (dtype in ("I8", "U8", "F4") or dtype.startswith(("F8_", "F6_")))


def _bytes(info: TensorInfo) -> int:
    digits = "".join(filter(str.isdecimal, info.dtype.split("_")[0]))
    return int(np.prod(info.shape, dtype=np.float64)) * int(digits or 8) // 8


def _stream(
    entries: list[layout.Entry],
    files: TensorFiles,
    config: TargetConfig,
    dtype: np.dtype,
    place: Place,
    faults: list[str],
) -> dict[layout.Path, jax.Array]:
    """Reads, checks, converts and places one parameter after another; from the first fault on it only checks.

    Faults of values are appended to `faults`.
    """
    placed: dict[layout.Path, jax.Array] = {}
    tables: list[str] = []
    values: list[str] = []
    for entry in entries:
        readable = [key for key in entry.keys if _sound(key, entry, files)]
        tensors = [files.read(key) for key in readable]
        for key, tensor in zip(readable, tensors, strict=True):
            if entry.dtype == "int":
                tables += _table_faults(key, tensor, config)
            else:
                values += _finite_faults(key, tensor)
        if faults or tables or values:
            placed.clear()
            continue
        value = _cast(entry.load(tensors), entry.dtype, dtype)
        if entry.dtype == "weight" and not np.isfinite(value).all():
            values.append(f"{entry.keys[0]} exceeds the range of {dtype.name}; load it as float32")
            continue
        placed[entry.path] = place(entry.path, value)
    faults += [*listed(tables), *listed(values)]
    return placed


def _sound(key: str, entry: layout.Entry, files: TensorFiles) -> bool:
    info = files.tensors.get(key)
    return info is not None and info.shape == entry.shape and info.dtype in _ACCEPTED[entry.dtype]


def _cast(value: np.ndarray, kind: str, dtype: np.dtype) -> np.ndarray:
    with np.errstate(over="ignore"):  # found afterwards, with the tensor's name
        return value.astype(
            {"fp32": np.dtype(np.float32), "int": np.dtype(np.int32), "weight": dtype}[kind], copy=False
        )


def _on_default_device(_: layout.Path, value: np.ndarray) -> jax.Array:
    return jnp.array(value)


def _finite_faults(key: str, tensor: np.ndarray) -> Iterator[str]:
    finite = np.isfinite(tensor)
    if not finite.all():
        where = [int(i) for i in np.argwhere(~finite)[0]]
        yield f"{key} holds {tensor.size - int(finite.sum())} NaN or infinite values, the first at {where}"


def _table_faults(key: str, table: np.ndarray, config: TargetConfig) -> Iterator[str]:
    """A hash table's row lists the experts of one token: ids of experts, each once."""
    outside = (table < 0) | (table >= config.n_routed_experts)
    if outside.any():
        row, column = np.argwhere(outside)[0]
        yield (
            f"{key} holds expert {table[row, column]} at {[int(row), int(column)]};"
            f" expected ids in [0, n_routed_experts = {config.n_routed_experts}) ({int(outside.sum())} such entries)"
        )
    ordered = np.sort(table, axis=1)
    repeated = (ordered[:, 1:] == ordered[:, :-1]).any(axis=1)
    if repeated.any():
        row = int(np.argmax(repeated))
        yield (
            f"{key} names an expert twice in row {row} ({table[row].tolist()});"
            f" expected distinct experts for a token ({int(repeated.sum())} such rows)"
        )
