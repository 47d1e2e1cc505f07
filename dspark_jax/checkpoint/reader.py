"""Loading a published checkpoint: faults are found in the headers, then one parameter at a time is read and placed."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tokenizers import Tokenizer

from dspark_jax.checkpoint import layout
from dspark_jax.checkpoint.files import TensorFiles, open_files, stage_numbers
from dspark_jax.checkpoint.headers import expert_format, header_faults, linear_faults, quantised_maps, size_faults
from dspark_jax.checkpoint.quantised import config_faults
from dspark_jax.checkpoint.values import Values, deferred
from dspark_jax.config import (
    DENSE_FAMILIES,
    DraftConfig,
    Numerics,
    TargetConfig,
    draft_from_hf,
    is_int,
    read_config,
    read_json,
    target_from_hf,
)
from dspark_jax.config_dense import DenseConfig, ModelConfig, dense_from_hf
from dspark_jax.errors import CheckpointError, ConfigError, raise_all

Place = Callable[[layout.Path, np.ndarray], jax.Array]
Weights = Literal["dequantised", "quantised", "quantised-all"]


class CheckpointNotice(UserWarning):
    """A checkpoint is loaded in part; the message says which part is left out and why."""


class LoadedCheckpoint(NamedTuple):
    """A checkpoint's model: `nnx.merge(graph, params)` is its `SpeculativeLM`, of a dense model its `DenseLM`; `draft` is None
    for a target alone.
    """

    config: ModelConfig
    draft: DraftConfig | None
    graph: nnx.GraphDef
    params: nnx.State


def read_checkpoint(
    folder: Path,
    *,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    axis: str | None = "expert",
    place: Place | None = None,
    weights: Weights = "dequantised",
    numerics: Numerics = "default",
) -> LoadedCheckpoint:
    """Loads config.json and the safetensors files of `folder`, see docs/checkpoints.md.

    One parameter after the other is read and placed, so the host never holds more than one (of experts: one of the three
    matrices of one layer's experts) besides what `place` keeps.

    Args:
      folder: holds config.json and model.safetensors, or model.safetensors.index.json and the files it names.
      dtype: float32, bfloat16 or float16, for weights and activations. What the architecture keeps in fp32
        (hyper-connections, sinks, biases, position embeddings) stays fp32, hash tables become int32.
      axis: mesh axis that experts are split over, see `SpeculativeLM`.
      place: puts a host array on devices, given the parameter's path; by default on the default device.
      weights: what becomes of fp8 and fp4 weights. "dequantised": numbers of `dtype`, the same in float32 and bfloat16 as the
        codes stand for. "quantised": the routed experts stay codes with scales. "quantised-all": so do the linear maps that
        published files hold as fp8. The configuration's `expert_weights` and `linear_weights` then say which.
      numerics: "reference" rounds activations as DeepSeek's code does (`TargetConfig.numerics`), the inputs of linear maps too
        where the file's weights are quantised; "default" does not.

    The stages of the drafter are counted in the weights. `mtp.*` tensors without `dspark_block_size` in config.json are
    left out with one `CheckpointNotice`.

    Raises:
      ConfigError: config.json is impossible in itself, or `dtype`, `weights` or `numerics` is none of the above.
      CheckpointError: a file is missing or damaged, or the weights contradict config.json: all faults in one message.
    """
    opened = open_checkpoint(folder, dtype=dtype, axis=axis, weights=weights, numerics=numerics)
    put = place or _on_default_device
    flat = {path: variable.get_value() for path, variable in nnx.to_flat_state(opened.params)}
    placed: dict[layout.Path, jax.Array] = {}
    try:
        for path, value in flat.items():
            placed[path] = put(path, np.asarray(value))
    except CheckpointError:
        placed.clear()
        raise
    nnx.replace_by_pure_dict(opened.params, nnx.traversals.unflatten_mapping(placed))
    return opened


def open_checkpoint(
    folder: Path,
    *,
    dtype: jax.typing.DTypeLike,
    axis: str | None = "expert",
    weights: Weights = "dequantised",
    numerics: Numerics = "default",
) -> LoadedCheckpoint:
    """`read_checkpoint` up to the weights themselves: every parameter is a `Deferred`, read when `np.asarray` asks for it.

    Arguments and errors as for `read_checkpoint`; values are checked when they are read, and the first impossible one raises
    CheckpointError that names all there are.
    """
    try:
        dtype = jnp.dtype(dtype)
    except TypeError:
        raise ConfigError(f"dtype is {dtype!r}; expected float32, bfloat16 or float16") from None
    if dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ConfigError(f"dtype is {dtype.name}; expected float32, bfloat16 or float16")
    if weights not in get_args(Weights):
        raise ConfigError(f"weights is {weights!r}; expected {' or '.join(map(repr, get_args(Weights)))}")
    if numerics not in get_args(Numerics):
        raise ConfigError(f"numerics is {numerics!r}; expected {' or '.join(map(repr, get_args(Numerics)))}")
    if numerics == "reference" and dtype == jnp.float16:
        raise ConfigError("numerics is 'reference', whose scales float16 does not hold; expected dtype bfloat16 or float32")
    folder = Path(folder)
    hf = read_config(folder)
    if hf.get("model_type") in DENSE_FAMILIES:
        return _open_dense(folder, hf, dtype, weights, numerics)
    source = str(folder / "config.json")
    config = target_from_hf(hf, source)
    files = open_files(folder)
    faults = [*files.faults, *config_faults(hf)]
    draft, stage_faults = _draft(hf, config, files, source)
    faults += stage_faults
    if not files.names:
        raise_all(CheckpointError, str(folder), faults or ["the weight files hold no tensors"])
    if absurd := size_faults(config, files):
        raise_all(CheckpointError, str(folder), [*faults, *absurd])
    if numerics == "reference":
        fp8_inputs, mixed = quantised_maps(files)
        faults += mixed
        config = replace(config, numerics=numerics, fp8_inputs=fp8_inputs)
    graph, params = layout.skeleton(config, draft, dtype=dtype, axis=axis)
    if weights != "dequantised":
        kind, unlike = expert_format(files, layout.entries(params), weights)
        faults += unlike
        if kind is not None:
            linear = "fp8" if weights == "quantised-all" else "dense"
            config = replace(config, expert_weights=kind, linear_weights=linear)
            graph, params = layout.skeleton(config, draft, dtype=dtype, axis=axis)
            faults += linear_faults(files, layout.entries(params))
    faults += header_faults(layout.entries(params), files, check_stages=draft is not None)
    return _deferred(LoadedCheckpoint(config, draft, graph, params), files, dtype, faults)


def _open_dense(
    folder: Path, hf: Mapping[str, Any], dtype: np.dtype, weights: Weights, numerics: Numerics
) -> LoadedCheckpoint:
    config = _generation(folder, dense_from_hf(hf, str(folder / "config.json")))
    files = open_files(folder, published=False)
    faults = list(files.faults)
    if weights != "dequantised":
        faults.append(f"weights is {weights!r}, which keeps routed experts as codes; a dense model has none: use 'dequantised'")
    if numerics == "reference":
        faults.append("numerics is 'reference', DeepSeek-V4's own; this is a dense model of another family: use 'default'")
    if not files.names:
        raise_all(CheckpointError, str(folder), faults or ["the weight files hold no tensors"])
    # What transformers ignores too: a copy of the tied head, and frequencies that old files list.
    unused = [n for n in files.tensors if n.endswith("rotary_emb.inv_freq")]
    for name in [*unused, *(["lm_head.weight"] if config.tie_word_embeddings else [])]:
        files.tensors.pop(name, None)
    if absurd := size_faults(config, files):
        raise_all(CheckpointError, str(folder), [*faults, *absurd])
    graph, params = layout.skeleton(config, None, dtype=dtype, axis=None)
    faults += header_faults(layout.entries(params), files, check_stages=True)
    return _deferred(LoadedCheckpoint(config, None, graph, params), files, dtype, faults)


def _generation(folder: Path, config: DenseConfig) -> DenseConfig:
    """With what other files of the folder say: whether texts begin with a token, and more tokens that end an answer."""
    begins = False
    if config.bos_token_id is not None and (folder / "tokenizer.json").is_file():
        begins = read_tokenizer(folder).encode("").ids[:1] == [config.bos_token_id]
        said = _optional(folder / "tokenizer_config.json").get("add_bos_token")
        begins = said if isinstance(said, bool) else begins
    ends = _optional(folder / "generation_config.json").get("eos_token_id")
    more = [e for e in (ends if isinstance(ends, list) else [ends]) if is_int(e) and 0 <= e < config.vocab_size]
    return replace(
        config,
        bos_token_id=config.bos_token_id if begins else None,
        eos_token_ids=tuple(dict.fromkeys([*config.eos_token_ids, *more])),
    )


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _deferred(
    found: LoadedCheckpoint, files: TensorFiles, dtype: np.dtype, faults: list[str]
) -> LoadedCheckpoint:
    """With `Deferred` parameters in place of shapes; raises CheckpointError if there are faults, with those of the values."""
    values = Values(files, layout.entries(found.params), found.config, dtype)
    nnx.replace_by_pure_dict(found.params, nnx.traversals.unflatten_mapping(deferred(values, found.params, faults)))
    return found


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
    said = len(hf["compress_ratios"]) - config.num_hidden_layers  # published files have an entry for every stage
    if said and said != len(stages):
        faults.append(
            f"the weights have {len(stages)} mtp.* stages, and compress_ratios of config.json {said} entries behind its"
            f" {config.num_hidden_layers} layers; expected one a stage"
        )
    return (None, faults) if faults else (draft, [])


def _on_default_device(_: layout.Path, value: np.ndarray) -> jax.Array:
    return jnp.array(value)
