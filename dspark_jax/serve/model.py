"""What an engine reads of a model before anything is placed on a device."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dspark_jax.api import LM, model_folder
from dspark_jax.checkpoint.reader import Weights, open_checkpoint, read_tokenizer
from dspark_jax.config import DraftConfig, Numerics, read_config
from dspark_jax.config_dense import v4_config
from dspark_jax.eplb.namespace import ExpertLayers
from dspark_jax.parallel.mesh import EXPERT


def expert_layers(model: str | Path | LM, speculate: bool) -> ExpertLayers:
    """The MoE layers that will run; of a folder, config.json alone is read."""
    if isinstance(model, LM):
        config, draft = v4_config(model.config, "engine: the LM"), model.draft_config
        layers = ExpertLayers.of(config, draft if isinstance(draft, DraftConfig) else None)
    else:
        folder = model_folder(model)
        layers = ExpertLayers.from_hf(read_config(folder), source=str(folder / "config.json"))
    return layers if speculate else replace(layers, draft=None)


def read_model(
    model: str | Path | LM, mesh: Mesh, dtype: Any, weights: Weights, numerics: Numerics = "default"
) -> tuple[Any, Any, Any, Any]:
    """Configurations, parameters and tokenizer. Parameters of an LM are on the host; those of a folder are read when they
    are placed, one after the other (`checkpoint.values.Deferred`).
    """
    if isinstance(model, LM):
        return v4_config(model.config, "engine: the LM"), model.draft_config, jax.device_get(model._params), model.tokenizer
    folder = model_folder(model)
    default = jnp.float32 if mesh.devices.flat[0].platform == "cpu" else jnp.bfloat16
    dtype = default if dtype is None else dtype
    read = open_checkpoint(folder, dtype=dtype, axis=EXPERT, weights=weights, numerics=numerics)
    return v4_config(read.config, f"engine: {folder}"), read.draft, read.params, read_tokenizer(folder)
