"""Loading a drafter that has files of its own, beside a target that is already open."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from dspark_jax.checkpoint import layout
from dspark_jax.checkpoint.files import TensorFiles, listed, open_files
from dspark_jax.checkpoint.headers import header_faults, size_faults
from dspark_jax.checkpoint.reader import LoadedCheckpoint, open_checkpoint, read_tokenizer
from dspark_jax.checkpoint.values import Values, deferred
from dspark_jax.config import read_json
from dspark_jax.config_dense import DenseConfig
from dspark_jax.config_drafter import DRAFT_TOKENS, DraftModelConfig, SeparateConfig, StandaloneConfig, drafter_from_hf
from dspark_jax.errors import CheckpointError, ConfigError, described, raise_all

SHIPPED = Path(__file__).parents[1] / "assets" / "drafters"


class LoadedPair(NamedTuple):
    """A dense target and a drafter with files of its own: `nnx.merge(graph, params)` is their `DenseLM`."""

    config: DenseConfig
    draft: SeparateConfig
    graph: nnx.GraphDef
    params: nnx.State


# Of the target, or of training alone.
_UNUSED = re.compile(r"t2d|mask_embedding|verifier_(lm_head|norm)\.weight|.*rotary_emb\.inv_freq")


def shipped_drafters() -> list[str]:
    """Names of the drafters that the package brings along."""
    return sorted(file.parent.name for file in SHIPPED.glob("*/config.json"))


def drafter_path(drafter: str | Path) -> Path:
    """The folder or GGUF file that `drafter` names: a shipped drafter, else a path (`./name` if a folder has such a name).

    Raises CheckpointError that lists the shipped drafters.
    """
    if not isinstance(drafter, str | Path):
        raise CheckpointError(f"drafter is {described(drafter)}; expected the name of a shipped drafter or a path")
    path = Path(drafter)
    if str(drafter) in (names := shipped_drafters()):
        return SHIPPED / path
    if not path.exists():
        raise CheckpointError(
            f"drafter {str(drafter)!r} not found; expected the name of a shipped drafter ({', '.join(names)}), or the path of a"
            " folder with config.json and *.safetensors or of a GGUF file"
        )
    return path


def with_drafter(
    target: LoadedCheckpoint,
    drafter: str | Path,
    tokenizer: Any,
    *,
    dtype: jax.typing.DTypeLike,
    draft_tokens: int | None = None,
) -> LoadedPair:
    """`open_drafter`, or of a GGUF file that model as drafter; `drafter` as of `drafter_path`.

    `tokenizer` is the target's; raises ConfigError where the drafter's, if it has one, has other ids for its tokens.
    """
    path = drafter_path(drafter)
    if not (path.suffix == ".gguf" and path.is_file()):
        found = open_drafter(target, path, dtype=dtype, draft_tokens=draft_tokens)
        own = read_tokenizer(path) if (path / "tokenizer.json").is_file() else None
    else:
        from dspark_jax.checkpoint.gguf_file import open_gguf  # its package is an extra

        model, own, _ = open_gguf(path, dtype=dtype)
        config = _dense(target, path)
        assert isinstance(model.config, DenseConfig)
        draft = DraftModelConfig(model.config, DRAFT_TOKENS if draft_tokens is None else draft_tokens)
        raise_all(ConfigError, str(path), draft.faults(config))
        found = _attached(target, draft, model.params)
    if own is not None:
        ids, theirs = (t.get_vocab(with_added_tokens=True) for t in (own, tokenizer))
        other = sorted(f"{t!r} is {ids[t]}, and {i} in the target's" for t, i in theirs.items() if ids.get(t, i) != i)
        raise_all(ConfigError, f"{path}: its tokenizer is not the target's", listed(other))
    return found


def open_drafter(
    target: LoadedCheckpoint, folder: Path, *, dtype: jax.typing.DTypeLike, draft_tokens: int | None = None
) -> LoadedPair:
    """`target`, opened and without a drafter, together with the drafter in `folder`; which kind it is says its config.json.

    Args:
      target: a dense model.
      folder: config.json and safetensors files, see `config_drafter.drafter_from_hf`.
      dtype: of the drafter's weights.
      draft_tokens: drafts a round, of draft models.

    Raises:
      ConfigError: config.json is impossible in itself or on this target, all faults in one message.
      CheckpointError: a file is missing or damaged, or the weights contradict config.json: all faults in one message.
    """
    folder = Path(folder)
    config = _dense(target, folder)
    draft, files = _read_config(config, folder, draft_tokens)
    if isinstance(draft, DraftModelConfig):
        return _attached(target, draft, open_checkpoint(folder, dtype=dtype).params)
    faults = list(files.faults)
    for name in [name for name in files.tensors if _UNUSED.fullmatch(name)]:
        del files.tensors[name]
    if not files.names:
        raise_all(CheckpointError, str(folder), faults or ["the weight files hold no tensors"])
    if absurd := size_faults(draft.layers, files):
        raise_all(CheckpointError, str(folder), [*faults, *absurd])
    graph, params = layout.skeleton(config, draft, dtype=dtype, axis=None)
    entries = [entry for entry in layout.entries(params) if entry.path[0] == "draft"]
    faults += header_faults(entries, files, check_stages=True)
    if not faults and draft.mapped:
        faults += listed(_map_faults(draft, files, config.vocab_size))
    values = Values(files, entries, config, np.dtype(dtype))
    found = deferred(values, params, faults)
    return LoadedPair(config, draft, graph, _together(params, _flat(target.params), found))


def read_drafter_config(config: DenseConfig, folder: Path, draft_tokens: int | None = None) -> SeparateConfig:
    """The drafter in `folder`, by its config.json and the weights' headers; arguments and errors as of `open_drafter`."""
    return _read_config(config, drafter_path(folder), draft_tokens)[0]


def _read_config(config: DenseConfig, folder: Path, draft_tokens: int | None) -> tuple[SeparateConfig, TensorFiles]:
    hf, source = read_json(folder / "config.json"), str(folder / "config.json")
    files = open_files(folder, published=False)
    shapes = {name: info.shape for name, info in files.tensors.items()}
    draft = drafter_from_hf(hf, shapes, source, draft_tokens)
    raise_all(ConfigError, source, draft.faults(config))
    return draft, files


def _attached(target: LoadedCheckpoint, draft: DraftModelConfig, params: nnx.State) -> LoadedPair:
    """`target` with the dense model that `params` are the target's parameters of, as drafter."""
    assert isinstance(target.config, DenseConfig)
    graph, skeleton = layout.skeleton(target.config, draft, dtype=_dtype(target.params), axis=None)
    own = {("draft", *path[1:]): value for path, value in _flat(params).items()}
    return LoadedPair(target.config, draft, graph, _together(skeleton, _flat(target.params), own))


def _dense(target: LoadedCheckpoint, drafter: Path) -> DenseConfig:
    if not isinstance(target.config, DenseConfig):
        raise ConfigError(
            f"drafter {str(drafter)!r}: the target is a DeepSeek-V4-style model, whose drafter is embedded in its checkpoint"
            " (mtp.* stages); drafters with files of their own are for dense targets"
        )
    return target.config


def _map_faults(draft: StandaloneConfig, files: TensorFiles, vocab: int) -> Iterator[str]:
    """Draft ids that no token, or another draft id's token, belongs to."""
    token = np.arange(draft.draft_vocab_size) + np.asarray(files.read("d2t")).astype(np.int64)
    for i in np.flatnonzero((token < 0) | (token >= vocab)):
        yield f"d2t makes draft id {i} token {token[i]}; expected a token id below the target's vocab_size = {vocab}"
    tokens, counts = np.unique(token, return_counts=True)
    yield from (f"d2t makes {n} draft ids token {i}; expected one" for i, n in zip(tokens, counts, strict=True) if n > 1)


def _flat(params: nnx.State) -> dict[layout.Path, Any]:
    return {path: variable.get_value() for path, variable in nnx.to_flat_state(params)}


def _together(params: nnx.State, *parts: dict[layout.Path, Any]) -> nnx.State:
    flat = {path: value for part in parts for path, value in part.items()}
    nnx.replace_by_pure_dict(params, nnx.traversals.unflatten_mapping(flat))
    return params


def _dtype(params: nnx.State) -> np.dtype:
    return next(iter(_flat(params).values())).dtype
