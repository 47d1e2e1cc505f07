"""A tiny checkpoint for tests of reading and writing: configurations, random parameters, edits of its folder."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file, save_file

from dspark_jax.checkpoint import layout
from dspark_jax.checkpoint.writer import write_checkpoint
from dspark_jax.config import DraftConfig, RopeConfig, TargetConfig

# Every kind of layer: window only with a hash table, heavily compressed, compressed sparse with indexer.
TARGET = TargetConfig(
    vocab_size=13,
    hidden_size=8,
    num_hidden_layers=3,
    num_attention_heads=2,
    head_dim=8,
    q_lora_rank=6,
    o_groups=2,
    o_lora_rank=3,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=5,
    compress_ratios=(0, 8, 4),
    num_hash_layers=1,
    sliding_window=4,
    index_n_heads=2,
    index_head_dim=4,
    index_topk=2,
    hc_mult=2,
    max_position_embeddings=32,
    rope=RopeConfig(dim=4),
)
DRAFT = DraftConfig(block_size=3, noise_token_id=12, target_layer_ids=(1, 2), num_stages=2, markov_rank=3)


def random_params(config: TargetConfig, draft: DraftConfig | None, seed: int = 0) -> nnx.State:
    """Random parameters, weights in values that bfloat16 holds exactly; hash tables of distinct experts."""
    rng = np.random.default_rng(seed)
    _, params = layout.skeleton(config, draft, dtype=jnp.float32, axis=None)
    flat = {}
    for entry, (path, variable) in zip(layout.entries(params), nnx.to_flat_state(params), strict=True):
        shape = variable.get_value().shape
        value = rng.normal(size=shape).astype(np.float32)
        if entry.dtype == "int":
            value = rng.permuted(np.tile(np.arange(config.n_routed_experts), (shape[0], 1)), axis=1)[:, : shape[1]]
        elif entry.dtype == "weight":
            value = value.astype(jnp.bfloat16).astype(np.float32)
        flat[path] = jnp.asarray(value, jnp.int32 if entry.dtype == "int" else jnp.float32)
    nnx.replace_by_pure_dict(params, nnx.traversals.unflatten_mapping(flat))
    return params


def write_tiny(folder: Path, draft: DraftConfig | None = DRAFT, **options) -> nnx.State:
    """Writes the tiny checkpoint and returns its parameters."""
    params = random_params(TARGET, draft)
    write_checkpoint(folder, TARGET, draft, params, **options)
    return params


def edit_config(folder: Path, **changes) -> None:
    """Sets keys of config.json; None removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def edit_tensors(folder: Path, edit: Callable[[dict[str, np.ndarray]], None], file: str = "model.safetensors") -> None:
    """Rewrites a weight file after `edit` has changed its dict of arrays."""
    tensors = load_file(folder / file)
    edit(tensors)
    save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, folder / file, metadata={"format": "pt"})


def with_head(kind: str) -> DraftConfig:
    """The tiny drafter with another sequential head."""
    return replace(DRAFT, head=kind)
