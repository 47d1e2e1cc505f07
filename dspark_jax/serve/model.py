"""What an engine reads of a model before anything is placed on a device."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dspark_jax.api import LM, gguf_faults, is_gguf, model_folder, open_model
from dspark_jax.checkpoint.drafter import with_drafter
from dspark_jax.checkpoint.reader import Weights
from dspark_jax.config import DENSE_FAMILIES, DraftConfig, Numerics, read_config
from dspark_jax.config_dense import DenseConfig, ModelConfig
from dspark_jax.config_drafter import AnyDraftConfig
from dspark_jax.eplb.namespace import ExpertLayers
from dspark_jax.errors import ConfigError, raise_all
from dspark_jax.models.speculative import embedding_dtype

NO_EXPERTS = "is a dense model, which has no experts to place or to count; leave placement and count_experts out"


def expert_layers(model: str | Path | LM, speculate: bool) -> ExpertLayers:
    """The MoE layers that will run; of a folder, config.json alone is read. Raises ConfigError for a dense model."""
    if isinstance(model, LM):
        config, draft = model.config, model.draft_config
        if isinstance(config, DenseConfig):
            raise ConfigError(f"engine: the LM {NO_EXPERTS}")
        layers = ExpertLayers.of(config, draft if isinstance(draft, DraftConfig) else None)
    else:
        if is_gguf(model):
            raise ConfigError(f"engine: {model} {NO_EXPERTS}")
        folder = model_folder(model)
        found = read_config(folder)
        if found.get("model_type") in DENSE_FAMILIES:
            raise ConfigError(f"engine: {folder} {NO_EXPERTS}")
        layers = ExpertLayers.from_hf(found, source=str(folder / "config.json"))
    return layers if speculate else replace(layers, draft=None)


class ReadModel(NamedTuple):
    """A model that was opened. Parameters of an LM are on the host; those of files are read when they are placed, one after
    the other (`checkpoint.values.Deferred`).
    """

    config: ModelConfig
    draft: AnyDraftConfig | None
    params: Any
    tokenizer: Any
    chat: Any

    @property
    def dtype(self) -> np.dtype:
        """Of weights and activations: the embedding's."""
        return embedding_dtype(self.params)


def read_model(
    model: str | Path | LM,
    mesh: Mesh,
    dtype: Any,
    weights: Weights,
    numerics: Numerics = "default",
    drafter: str | Path | None = None,
    draft_tokens: int | None = None,
) -> ReadModel:
    """Opens a model, and for a dense one the drafter that has files of its own; arguments as of `Engine`.

    Raises CheckpointError or ConfigError, the latter also for a drafter that cannot go with the model.
    """
    if isinstance(model, LM):
        given = {"drafter": drafter, "draft_tokens": draft_tokens}
        extra = [f"{name} is {value!r}; give it to `load`, beside the model" for name, value in given.items() if value]
        raise_all(ConfigError, "engine: the model is an LM, which has its drafter or none", extra)
        return ReadModel(model.config, model.draft_config, jax.device_get(model._params), model.tokenizer, model.chat)
    path = Path(model) if is_gguf(model) else model_folder(model)
    faults = list(gguf_faults(path, weights, numerics))
    if draft_tokens is not None and drafter is None:
        faults.append(f"draft_tokens is {draft_tokens!r}, without a drafter whose drafts it could count; leave it out")
    raise_all(ConfigError, "engine", faults)
    default = jnp.float32 if mesh.devices.flat[0].platform == "cpu" else jnp.bfloat16
    dtype = default if dtype is None else dtype
    read, tokenizer, chat = open_model(path, dtype, weights, numerics)
    if drafter is not None:
        read = with_drafter(read, drafter, tokenizer, dtype=dtype, draft_tokens=draft_tokens)
    return ReadModel(read.config, read.draft, read.params, tokenizer, chat)
