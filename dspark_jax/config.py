"""Configurations: frozen dataclasses, read from a checkpoint's config.json and validated whole."""

import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from dspark_jax.errors import CheckpointError, ConfigError, raise_all

HeadKind = Literal["markov", "gated", "rnn", "none"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary frequencies; YaRN applies to layers with a compressor only (reference: DeepSeek-V4 config.json)."""

    dim: int = 64
    theta: float = 1e4
    compress_theta: float = 1.6e5
    yarn_factor: float = 16.0
    yarn_original: int = 65536
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0


@dataclass(frozen=True)
class TargetConfig:
    """A DeepSeek-V4-style target. Field names follow the published config.json; sizes are in channels or counts.

    `compress_ratios[l]` gives layer l's attention: 0 = window only, 4 = compressed sparse with indexer (overlapping groups of
    four), any other = heavily compressed. `csa_ratio` is the ratio that means "compressed sparse".
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    compress_ratios: tuple[int, ...]
    num_hash_layers: int = 0
    n_shared_experts: int = 1
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = 10.0
    sliding_window: int = 128
    index_n_heads: int = 64
    index_head_dim: int = 128
    index_topk: int = 512
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 4096
    bos_token_id: int = 0
    eos_token_id: int = 1
    rope: RopeConfig = field(default_factory=RopeConfig)

    csa_ratio = 4

    def __post_init__(self) -> None:
        raise_all(ConfigError, "target config", list(self._faults()))

    def _faults(self):
        positive = [f.name for f in fields(self) if f.type is int and f.name not in ("num_hash_layers", "bos_token_id", "eos_token_id")]
        for name in positive:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                yield f"{name} is {value!r}; expected a positive integer"
        if len(self.compress_ratios) != self.num_hidden_layers:
            yield (
                f"compress_ratios has {len(self.compress_ratios)} entries; expected num_hidden_layers = {self.num_hidden_layers}"
                " (one a target layer; draft stages not counted)"
            )
        if bad := [r for r in self.compress_ratios if r < 0 or r == 1]:
            yield f"compress_ratios holds {bad}; expected 0 (window only), 4 (compressed sparse) or any ratio above 1"
        if self.o_groups > 0 and (self.num_attention_heads * self.head_dim) % self.o_groups:
            yield f"o_groups is {self.o_groups}; it must divide num_attention_heads * head_dim = {self.num_attention_heads * self.head_dim}"
        if self.rope.dim % 2 or self.rope.dim > self.head_dim:
            yield f"qk_rope_head_dim is {self.rope.dim}; expected an even number up to head_dim = {self.head_dim}"
        if 4 in self.compress_ratios and self.rope.dim > self.index_head_dim:
            yield f"index_head_dim is {self.index_head_dim}; expected at least qk_rope_head_dim = {self.rope.dim}"
        if self.num_experts_per_tok > self.n_routed_experts:
            yield f"num_experts_per_tok is {self.num_experts_per_tok}; expected at most n_routed_experts = {self.n_routed_experts}"
        if not 0 <= self.num_hash_layers <= self.num_hidden_layers:
            yield f"num_hash_layers is {self.num_hash_layers}; expected 0 … num_hidden_layers = {self.num_hidden_layers}"
        for name in ("bos_token_id", "eos_token_id"):
            if not 0 <= getattr(self, name) < self.vocab_size:
                yield f"{name} is {getattr(self, name)}; expected a token id below vocab_size = {self.vocab_size}"

    @property
    def group_width(self) -> int:
        """Channels that one group of the output projection reads."""
        return self.num_attention_heads * self.head_dim // self.o_groups


@dataclass(frozen=True)
class DraftConfig:
    """The embedded DSpark stages of a V4-style target (paper section 3; config.json keys `dspark_*`).

    `block_size` is the draft length gamma; `target_layer_ids` are the tapped layers, ascending; `noise_token_id` fills the
    rows behind the anchor; `head` is the sequential head.
    """

    block_size: int
    noise_token_id: int
    target_layer_ids: tuple[int, ...]
    num_stages: int
    markov_rank: int = 256
    head: HeadKind = "markov"

    def faults(self, target: TargetConfig) -> list[str]:
        """What makes these stages impossible on `target`."""
        found = []
        if self.block_size < 1:
            found.append(f"dspark_block_size is {self.block_size}; expected at least 1")
        if self.num_stages < 1:
            found.append(f"the checkpoint has {self.num_stages} mtp.* stages; expected at least 1")
        if not 0 <= self.noise_token_id < target.vocab_size:
            found.append(f"dspark_noise_token_id is {self.noise_token_id}; expected a token id below vocab_size = {target.vocab_size}")
        ids = self.target_layer_ids
        if not ids or list(ids) != sorted(set(ids)) or ids[0] < 0 or ids[-1] >= target.num_hidden_layers:
            found.append(
                f"dspark_target_layer_ids is {list(ids)}; expected distinct ascending layer ids in [0, {target.num_hidden_layers})"
            )
        if self.head not in ("markov", "gated", "rnn", "none"):
            found.append(f"dspark_markov_head_type is {self.head!r}; expected 'markov', 'gated', 'rnn' or 'none'")
        if self.head != "none" and self.markov_rank < 1:
            found.append(f"dspark_markov_rank is {self.markov_rank}; expected at least 1, or the head type 'none'")
        return found


_PLAIN = (
    "vocab_size hidden_size num_hidden_layers num_attention_heads head_dim q_lora_rank o_groups o_lora_rank n_routed_experts "
    "num_experts_per_tok moe_intermediate_size num_hash_layers n_shared_experts routed_scaling_factor swiglu_limit "
    "sliding_window index_n_heads index_head_dim index_topk hc_mult hc_sinkhorn_iters hc_eps rms_norm_eps "
    "max_position_embeddings bos_token_id eos_token_id"
).split()


def target_from_hf(config: dict[str, Any]) -> TargetConfig:
    """TargetConfig of a published DeepSeek-V4 config.json (trailing `compress_ratios` of draft stages are cut)."""
    kind = config.get("model_type", "deepseek_v4")
    if kind != "deepseek_v4":
        raise ConfigError(f"config.json: model_type is {kind!r}; expected 'deepseek_v4'; other families are not supported")
    for name, want in (("scoring_func", "sqrtsoftplus"), ("norm_topk_prob", True), ("topk_method", "noaux_tc"), ("num_key_value_heads", 1)):
        if config.get(name, want) != want:
            raise ConfigError(f"config.json: {name} is {config[name]!r}; only {want!r} is supported for deepseek_v4")
    missing = [f.name for f in fields(TargetConfig) if f.name in _PLAIN and f.default is f.default_factory and f.name not in config]
    missing += ["compress_ratios"] if "compress_ratios" not in config else []
    if missing:
        raise ConfigError(f"config.json: missing {', '.join(missing)}; use the config.json published with the weights")
    scaling = config.get("rope_scaling") or {}
    rope = RopeConfig(
        dim=config.get("qk_rope_head_dim", 64),
        theta=config.get("rope_theta", 1e4),
        compress_theta=config.get("compress_rope_theta", 1.6e5),
        yarn_factor=scaling.get("factor", 1.0),
        yarn_original=scaling.get("original_max_position_embeddings", 0),
        yarn_beta_fast=scaling.get("beta_fast", 32),
        yarn_beta_slow=scaling.get("beta_slow", 1),
    )
    ratios = tuple(config["compress_ratios"][: config["num_hidden_layers"]])
    return TargetConfig(**{k: config[k] for k in _PLAIN if k in config}, compress_ratios=ratios, rope=rope)


def draft_from_hf(config: dict[str, Any], num_stages: int) -> DraftConfig | None:
    """DraftConfig of config.json's `dspark_*` keys, None without `dspark_block_size`; the stage count comes from the weights."""
    if "dspark_block_size" not in config:
        return None
    need = ("dspark_noise_token_id", "dspark_target_layer_ids")
    if missing := [k for k in need if k not in config]:
        raise ConfigError(f"config.json: has dspark_block_size but lacks {', '.join(missing)}; use the published config.json")
    return DraftConfig(
        block_size=config["dspark_block_size"],
        noise_token_id=config["dspark_noise_token_id"],
        target_layer_ids=tuple(config["dspark_target_layer_ids"]),
        num_stages=num_stages,
        markov_rank=config.get("dspark_markov_rank", 256),
        head=config.get("dspark_markov_head_type", "markov"),
    )


def to_hf(target: TargetConfig, draft: DraftConfig | None) -> dict[str, Any]:
    """The config.json that `target_from_hf` and `draft_from_hf` read back to the same values."""
    stages = draft.num_stages if draft else 0
    config: dict[str, Any] = {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4"}
    config |= {name: getattr(target, name) for name in _PLAIN}
    config |= {
        "num_key_value_heads": 1,
        "compress_ratios": [*target.compress_ratios, *([0] * stages)],
        "scoring_func": "sqrtsoftplus",
        "norm_topk_prob": True,
        "topk_method": "noaux_tc",
        "tie_word_embeddings": False,
        "qk_rope_head_dim": target.rope.dim,
        "rope_theta": target.rope.theta,
        "compress_rope_theta": target.rope.compress_theta,
        "rope_scaling": {
            "type": "yarn",
            "factor": target.rope.yarn_factor,
            "original_max_position_embeddings": target.rope.yarn_original,
            "beta_fast": target.rope.yarn_beta_fast,
            "beta_slow": target.rope.yarn_beta_slow,
        },
    }
    if draft:
        config |= {
            "dspark_block_size": draft.block_size,
            "dspark_noise_token_id": draft.noise_token_id,
            "dspark_target_layer_ids": list(draft.target_layer_ids),
            "dspark_markov_rank": draft.markov_rank,
            "dspark_markov_head_type": draft.head,
        }
    return config


def read_config(folder: Path) -> dict[str, Any]:
    """The parsed config.json of a checkpoint folder."""
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{folder}: no config.json; expected the folder of a published model (config.json, *.safetensors, tokenizer.json)")
    try:
        config = json.loads(path.read_text())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error}); download it again") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: holds a {type(config).__name__}; expected a JSON object")
    return config
