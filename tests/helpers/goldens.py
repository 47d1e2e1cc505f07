"""Golden files written by the PyTorch oracle, as configurations and models of this package."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from dspark_jax.checkpoint.layout import entries, from_tensors
from dspark_jax.config import DraftConfig, RopeConfig, TargetConfig
from dspark_jax.models.speculative import SpeculativeLM


@dataclass(frozen=True)
class Golden:
    """One oracle file: configuration, checkpoint tensors by key, and arrays of inputs and expected outputs."""

    config: TargetConfig
    draft: DraftConfig
    weights: dict[str, np.ndarray]
    arrays: dict[str, np.ndarray]

    def model(self) -> SpeculativeLM:
        return build_model(self.config, self.draft, self.weights)


def configs(cfg: dict, max_len: int = 256) -> tuple[TargetConfig, DraftConfig]:
    """The oracle's `Cfg` fields as this package's configurations."""
    layers = cfg["n_layers"]
    target = TargetConfig(
        vocab_size=cfg["vocab"],
        hidden_size=cfg["dim"],
        num_hidden_layers=layers,
        num_attention_heads=cfg["heads"],
        head_dim=cfg["head_dim"],
        q_lora_rank=cfg["q_rank"],
        o_groups=cfg["o_groups"],
        o_lora_rank=cfg["o_rank"],
        n_routed_experts=cfg["experts"],
        num_experts_per_tok=cfg["topk"],
        moe_intermediate_size=cfg["inter"],
        compress_ratios=tuple(cfg["ratios"][:layers]),
        num_hash_layers=cfg["n_hash"],
        routed_scaling_factor=cfg["route_scale"],
        swiglu_limit=cfg["limit"],
        sliding_window=cfg["window"],
        index_n_heads=cfg["idx_heads"],
        index_head_dim=cfg["idx_dim"],
        index_topk=cfg["idx_topk"],
        hc_mult=cfg["hc"],
        hc_sinkhorn_iters=cfg["iters"],
        hc_eps=cfg["hc_eps"],
        rms_norm_eps=cfg["eps"],
        max_position_embeddings=max_len,
        rope=RopeConfig(
            dim=cfg["rope"],
            theta=cfg["theta"],
            compress_theta=cfg["ctheta"],
            yarn_factor=cfg["yarn_factor"],
            yarn_original=cfg["yarn_orig"],
            yarn_beta_fast=cfg["beta_fast"],
            yarn_beta_slow=cfg["beta_slow"],
        ),
    )
    draft = DraftConfig(
        block_size=cfg["block"],
        noise_token_id=cfg["noise"],
        target_layer_ids=tuple(cfg["targets"]),
        num_stages=cfg["stages"],
        markov_rank=cfg["rank"],
    )
    return target, draft


def build_model(
    config: TargetConfig, draft: DraftConfig | None, weights: dict[str, np.ndarray], dtype: Any = jnp.float32
) -> SpeculativeLM:
    """A model with the given checkpoint tensors; `dtype` is that of activations and of what a checkpoint may hold in it."""
    graph, params = nnx.split(nnx.eval_shape(lambda: SpeculativeLM(config, draft, dtype=dtype, rngs=nnx.Rngs(0))))
    kinds = {entry.path: dtype if entry.dtype == "weight" else None for entry in entries(params)}
    flat = {path: jnp.asarray(value, kinds[path]) for path, value in from_tensors(params, weights).items()}
    nnx.replace_by_pure_dict(params, nnx.traversals.unflatten_mapping(flat))
    return nnx.merge(graph, params)


def load_golden(path: Path) -> Golden:
    """Reads an oracle file."""
    data = np.load(path)
    config, draft = configs(json.loads(str(data["cfg"])))
    weights = {k[2:]: data[k] for k in data.files if k.startswith("P/")}
    return Golden(config, draft, weights, {k: data[k] for k in data.files if not k.startswith("P/") and k != "cfg"})
