"""Published models by name, as configurations without weights; and the configurations that a model's name stands for.

Values: config.json of DeepSeek-V4-Flash and V4-Pro with DSpark stages. JAX is not imported.
"""

from collections.abc import Callable
from pathlib import Path

from dspark_jax.config import (
    DENSE_FAMILIES,
    DraftConfig,
    RopeConfig,
    TargetConfig,
    draft_from_hf,
    read_config,
    target_from_hf,
)
from dspark_jax.config_dense import ModelConfig, dense_from_hf
from dspark_jax.eplb.namespace import ExpertLayers
from dspark_jax.errors import CheckpointError, ConfigError, raise_all

Configs = tuple[TargetConfig, DraftConfig | None]

_ASSETS = Path(__file__).parent / "assets"
_CSA, _HCA = 4, 128  # compress ratios of the two compressed kinds of layer


def v4_flash() -> tuple[TargetConfig, DraftConfig]:
    """DeepSeek-V4-Flash (0731) and its three DSpark stages."""
    target = TargetConfig(
        vocab_size=129280,
        hidden_size=4096,
        num_hidden_layers=43,
        num_attention_heads=64,
        head_dim=512,
        q_lora_rank=1024,
        o_groups=8,
        o_lora_rank=1024,
        n_routed_experts=256,
        num_experts_per_tok=6,
        moe_intermediate_size=2048,
        compress_ratios=(0, 0, *(_CSA, _HCA) * 20, _CSA),
        num_hash_layers=3,
        routed_scaling_factor=1.5,
        index_topk=512,
        max_position_embeddings=1048576,
        rope=RopeConfig(),
    )
    return target, DraftConfig(
        block_size=5, noise_token_id=128799, target_layer_ids=(40, 41, 42), num_stages=3, markov_rank=256
    )


def v4_pro() -> tuple[TargetConfig, DraftConfig]:
    """DeepSeek-V4-Pro (0813) and its three DSpark stages."""
    target = TargetConfig(
        vocab_size=129280,
        hidden_size=7168,
        num_hidden_layers=61,
        num_attention_heads=128,
        head_dim=512,
        q_lora_rank=1536,
        o_groups=16,
        o_lora_rank=1024,
        n_routed_experts=384,
        num_experts_per_tok=6,
        moe_intermediate_size=3072,
        compress_ratios=(_HCA, _HCA, *(_CSA, _HCA) * 29, _CSA),
        num_hash_layers=3,
        routed_scaling_factor=2.5,
        index_topk=1024,
        max_position_embeddings=1048576,
        rope=RopeConfig(),
    )
    return target, DraftConfig(
        block_size=5, noise_token_id=128799, target_layer_ids=(58, 59, 60), num_stages=3, markov_rank=512
    )


PRESETS: dict[str, Callable[[], tuple[TargetConfig, DraftConfig]]] = {"v4-flash": v4_flash, "v4-pro": v4_pro}


def model_configs(model: str) -> Configs:
    """Target and drafter of a preset, a shipped model, or a folder; of a folder only config.json is read.

    Draft stages are counted in config.json (entries of `compress_ratios` behind the target's layers).

    Raises:
      CheckpointError: there is no such model, or its config.json cannot be read.
      ConfigError: naming everything that is wrong in config.json.
    """
    if model in PRESETS:
        return PRESETS[model]()
    folder = checkpoint_folder(model)
    found, source = read_config(folder), str(folder / "config.json")
    stages = len(ExpertLayers.from_hf(found, source=source).draft_layers)
    target, draft = target_from_hf(found, source), draft_from_hf(found, stages, source)
    if draft is not None:
        raise_all(ConfigError, source, draft.faults(target))
    return target, draft


def any_configs(model: str) -> tuple[ModelConfig, DraftConfig | None]:
    """`model_configs`, or of a dense model's folder its configuration; drafters of those have files of their own."""
    if model not in PRESETS:
        folder = checkpoint_folder(model)
        found = read_config(folder)
        if found.get("model_type") in DENSE_FAMILIES:
            return dense_from_hf(found, str(folder / "config.json")), None
    return model_configs(model)


def checkpoint_folder(model: str) -> Path:
    """The folder of a shipped model, or of a path. Raises CheckpointError that also lists the presets."""
    if Path(model).name == model and (_ASSETS / model / "config.json").is_file():
        return _ASSETS / model
    if model and Path(model).is_dir():
        return Path(model)
    from dspark_jax.api import model_folder

    try:
        return model_folder(model)  # knows what to say
    except CheckpointError as error:
        raise CheckpointError(f"{error}; or a preset without weights ({', '.join(PRESETS)})") from None
