"""Configurations: frozen dataclasses, read from a checkpoint's config.json and validated whole."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeGuard, get_args

from dspark_jax.checkpoint.transformers import published_config
from dspark_jax.errors import CheckpointError, ConfigError, described, raise_all
from dspark_kernels.formats import FP8_BLOCK

HeadKind = Literal["markov", "gated", "rnn", "none"]
ExpertWeights = Literal["dense", "fp4", "fp8"]
LinearWeights = Literal["dense", "fp8"]
Numerics = Literal["default", "reference"]
MOST = 2**31 - 1  # positions, ids and sizes are 32-bit integers
DENSE_FAMILIES = ("qwen3", "llama")  # see `config_dense`


@dataclass(frozen=True)
class RopeConfig:
    """Rotary frequencies; YaRN applies to layers with a compressor only (reference: DeepSeek-V4 config.json).

    `yarn_original` 0 switches YaRN off.
    """

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

    `compress_ratios[l]` gives layer l's attention: 0 = window only, 4 = compressed sparse with indexer (overlapping
    groups of four), any other = heavily compressed. `csa_ratio` is the ratio that means "compressed sparse".
    `expert_weights`, which config.json does not hold, is how devices keep the routed experts, draft stages' included: as
    numbers of the model's dtype, or as codes with their scales (`dspark_kernels.block_scaled`); and `linear_weights` the
    linear maps that published files hold as fp8: attention's, the indexer's, shared experts', `main_proj`. Nor `numerics`:
    "reference" rounds activations as DeepSeek's inference code does (`models.numerics`), key-value entries and index keys
    to fp8 and fp4, and with `fp8_inputs` the inputs of linear maps, which that code rounds where the weights are quantised.

    Raises:
      ConfigError: listing every value of a wrong type or, with all types right, every contradiction.
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
    expert_weights: ExpertWeights = "dense"
    linear_weights: LinearWeights = "dense"
    numerics: Numerics = "default"
    fp8_inputs: bool = False

    csa_ratio: ClassVar[int] = 4

    def __post_init__(self) -> None:
        if isinstance(self.compress_ratios, list):  # keeps the configuration hashable
            object.__setattr__(self, "compress_ratios", tuple(self.compress_ratios))
        raise_all(ConfigError, "target config", _target_faults(vars(self)))

    @property
    def group_width(self) -> int:
        """Channels that one group of the output projection reads."""
        return self.num_attention_heads * self.head_dim // self.o_groups

    @property
    def wo_a_codes(self) -> bool:
        """Whether `wo_a` stays codes: its groups are cut out of one matrix, which must not cut a block of scales."""
        return self.linear_weights == "fp8" and (self.o_groups == 1 or self.o_lora_rank % FP8_BLOCK == 0)

    def main_proj_codes(self, taps: int) -> bool:
        """Whether the drafter's `main_proj` stays codes: ranks hold the columns of their taps, which must not cut a block."""
        return self.linear_weights == "fp8" and (taps == 1 or self.hidden_size % FP8_BLOCK == 0)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids that end an answer."""
        return (self.eos_token_id,)


@dataclass(frozen=True)
class DraftConfig:
    """The embedded DSpark stages of a V4-style target (paper section 3; config.json keys `dspark_*`).

    `block_size` is the draft length gamma; `target_layer_ids` are the tapped layers, ascending; `noise_token_id` fills
    the rows behind the anchor; `head` is the sequential head.
    """

    block_size: int
    noise_token_id: int
    target_layer_ids: tuple[int, ...]
    num_stages: int
    markov_rank: int = 256
    head: HeadKind = "markov"

    def __post_init__(self) -> None:
        if isinstance(self.target_layer_ids, list):
            object.__setattr__(self, "target_layer_ids", tuple(self.target_layer_ids))

    @property
    def summary(self) -> str:
        """What it is, in a line."""
        head = "no sequential head" if self.head == "none" else f"{self.head} head of rank {self.markov_rank}"
        taps = list(self.target_layer_ids)
        return f"embedded DSpark: {self.block_size} drafts, {head}, taps {taps}, {self.num_stages} stages"

    def faults(self, target: TargetConfig) -> list[str]:
        """What makes these stages impossible on `target`: wrong types, or with all types right the contradictions."""
        found = []
        for name in ("block_size", "noise_token_id", "markov_rank"):
            if not is_int(value := getattr(self, name)):
                found.append(f"dspark_{name} is {value!r}; expected an integer")
        if not is_int(self.num_stages):
            found.append(f"num_stages is {self.num_stages!r}; expected an integer")
        if not _is_ints(self.target_layer_ids):
            found.append(f"dspark_target_layer_ids is {self.target_layer_ids!r}; expected a list of integers")
        if self.head not in get_args(HeadKind):
            kinds = ", ".join(map(repr, get_args(HeadKind)))
            found.append(f"dspark_markov_head_type is {self.head!r}; expected one of {kinds}")
        return found or list(self._contradictions(target))

    def _contradictions(self, target: TargetConfig) -> Iterator[str]:
        if not 1 <= self.block_size < target.max_position_embeddings:
            yield (
                f"dspark_block_size is {self.block_size}; expected at least 1, and less than max_position_embeddings ="
                f" {target.max_position_embeddings}"
            )
        if self.num_stages < 1:
            yield f"the checkpoint has {self.num_stages} mtp.* stages; expected at least 1 beside dspark_block_size"
        if not 0 <= self.noise_token_id < target.vocab_size:
            yield (
                f"dspark_noise_token_id is {self.noise_token_id};"
                f" expected a token id below vocab_size = {target.vocab_size}"
            )
        ids, layers = self.target_layer_ids, target.num_hidden_layers
        if not ids or list(ids) != sorted(set(ids)) or ids[0] < 0 or ids[-1] >= layers:
            yield f"dspark_target_layer_ids is {list(ids)}; expected distinct ascending layer ids in [0, {layers})"
        if self.head != "none" and self.markov_rank < 1:
            yield f"dspark_markov_rank is {self.markov_rank}; expected at least 1, or the head type 'none'"


# Every field of TargetConfig that config.json holds under the same name and as a plain number. The types are types,
# not strings, as long as this module does not import annotations from __future__.
_PLAIN = [f.name for f in fields(TargetConfig) if f.type in (int, float)]
_NOT_NEGATIVE = ("num_hash_layers", "bos_token_id", "eos_token_id")
# RopeConfig field -> where config.json holds it.
_ROPE_KEYS = {
    "dim": "qk_rope_head_dim",
    "theta": "rope_theta",
    "compress_theta": "compress_rope_theta",
    "yarn_factor": "rope_scaling.factor",
    "yarn_original": "rope_scaling.original_max_position_embeddings",
    "yarn_beta_fast": "rope_scaling.beta_fast",
    "yarn_beta_slow": "rope_scaling.beta_slow",
}
# Switches of config.json that exist in one form only; absent means that form.
_FIXED = {
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "topk_method": "noaux_tc",
    "num_key_value_heads": 1,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
}


def is_int(value: Any) -> TypeGuard[int]:
    """Whether it is an integer; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def _is_ints(value: Any) -> TypeGuard[Sequence[int]]:
    return isinstance(value, tuple | list) and all(is_int(v) for v in value)


def _number_fault(name: str, kind: Any, value: Any, least: int) -> str | None:
    if kind is int:
        wanted = "a positive integer" if least else "an integer of at least 0"
        if is_int(value) and value > MOST:
            wanted += f" of at most {MOST}"
        return None if is_int(value) and least <= value <= MOST else f"{name} is {value!r}; expected {wanted}"
    sound = isinstance(value, float) or is_int(value)
    if not sound or not 0 < value < math.inf:
        return f"{name} is {value!r}; expected a positive number"
    return None


def _type_faults(values: Mapping[str, Any]) -> Iterator[str]:
    for f in fields(TargetConfig):
        if f.name in _PLAIN and f.name in values:
            fault = _number_fault(f.name, f.type, values[f.name], f.name not in _NOT_NEGATIVE)
            if fault:
                yield fault
    if "compress_ratios" in values and not _is_ints(values["compress_ratios"]):
        yield f"compress_ratios is {values['compress_ratios']!r}; expected a list of integers"
    rope = values.get("rope", RopeConfig())
    if not isinstance(rope, RopeConfig):
        yield f"rope is {rope!r}; expected a RopeConfig"
        return
    for f in fields(RopeConfig):
        fault = _number_fault(_ROPE_KEYS[f.name], f.type, getattr(rope, f.name), f.name != "yarn_original")
        if fault:
            yield fault


def _target_faults(values: Mapping[str, Any]) -> list[str]:
    """Faults of a TargetConfig's values; contradictions are looked for only where every value has its type."""
    faults = list(_type_faults(values))
    complete = all(f.name in values for f in fields(TargetConfig))
    return faults if faults or not complete else list(_contradictions(values))


def _contradictions(v: Mapping[str, Any]) -> Iterator[str]:
    ratios, layers, rope = v["compress_ratios"], v["num_hidden_layers"], v["rope"]
    if len(ratios) != layers:
        yield (
            f"compress_ratios has {len(ratios)} entries; expected num_hidden_layers = {layers}"
            " (one a target layer; draft stages not counted)"
        )
    if bad := [r for r in ratios if r < 0 or r == 1]:
        yield f"compress_ratios holds {bad}; expected 0 (window only), 4 (compressed sparse) or any ratio above 1"
    width = v["num_attention_heads"] * v["head_dim"]
    if width % v["o_groups"]:
        yield f"o_groups is {v['o_groups']}; it must divide num_attention_heads * head_dim = {width}"
    if rope.dim % 2 or rope.dim > v["head_dim"]:
        yield f"qk_rope_head_dim is {rope.dim}; expected an even number up to head_dim = {v['head_dim']}"
    if TargetConfig.csa_ratio in ratios and rope.dim > v["index_head_dim"]:
        yield f"index_head_dim is {v['index_head_dim']}; expected at least qk_rope_head_dim = {rope.dim}"
    if v["num_experts_per_tok"] > v["n_routed_experts"]:
        yield (
            f"num_experts_per_tok is {v['num_experts_per_tok']};"
            f" expected at most n_routed_experts = {v['n_routed_experts']}"
        )
    if v["num_hash_layers"] > layers:
        yield f"num_hash_layers is {v['num_hash_layers']}; expected 0 … num_hidden_layers = {layers}"
    if v["expert_weights"] not in get_args(ExpertWeights):
        yield f"expert_weights is {v['expert_weights']!r}; expected one of {', '.join(map(repr, get_args(ExpertWeights)))}"
    if v["linear_weights"] not in get_args(LinearWeights):
        yield f"linear_weights is {v['linear_weights']!r}; expected one of {', '.join(map(repr, get_args(LinearWeights)))}"
    yield from _numerics_faults(v)
    for name in ("hidden_size", "moe_intermediate_size"):
        if v["expert_weights"] == "fp4" and v[name] % 2:
            yield f"{name} is {v[name]}; expected an even number for fp4 experts, which are stored in pairs"
    for name in ("bos_token_id", "eos_token_id"):
        if v[name] >= v["vocab_size"]:
            yield f"{name} is {v[name]}; expected a token id below vocab_size = {v['vocab_size']}"


def _numerics_faults(v: Mapping[str, Any]) -> Iterator[str]:
    if v["numerics"] not in get_args(Numerics):
        yield f"numerics is {v['numerics']!r}; expected one of {', '.join(map(repr, get_args(Numerics)))}"
    if v["numerics"] != "reference":
        if v["fp8_inputs"]:
            yield f"fp8_inputs is {v['fp8_inputs']!r}, which needs numerics 'reference'; leave it out"
        return
    size = v["index_head_dim"]
    if TargetConfig.csa_ratio in v["compress_ratios"] and size & (size - 1):
        yield f"index_head_dim is {size}; numerics 'reference' needs a power of two, for the Hadamard transform of index keys"


def target_from_hf(config: Mapping[str, Any], source: str = "config.json") -> TargetConfig:
    """TargetConfig of a published DeepSeek-V4 config.json (trailing `compress_ratios` of draft stages are cut).

    Raises:
      ConfigError: naming `source` and every fault; for another model family that alone.
    """
    family = config.get("model_type")
    if family != "deepseek_v4":
        if family in DENSE_FAMILIES:
            raise ConfigError(
                f"{source}: model_type is {family!r}; expected 'deepseek_v4' here: dense models run by `load` and"
                " `Engine`, which generate, evaluate, profile and bench use"
            )
        other = " (V4.1 is another architecture under a similar name)" if family == "deepseek_v41" else ""
        raise ConfigError(
            f"{source}: model_type is {family!r}{other}; expected 'deepseek_v4', other families are not supported"
        )
    faults = [
        f"{name} is {config[name]!r}; only {only!r} is supported for deepseek_v4"
        for name, only in _FIXED.items()
        if config.get(name) not in (None, only)
    ]
    required = [f.name for f in fields(TargetConfig) if f.default is MISSING and f.default_factory is MISSING]
    if missing := [name for name in required if config.get(name) is None]:
        faults.append(f"lacks {', '.join(missing)}; use the config.json published with the weights")
    values = {name: config[name] for name in [*_PLAIN, "compress_ratios"] if config.get(name) is not None}
    ratios, layers = values.get("compress_ratios"), values.get("num_hidden_layers")
    if _is_ints(ratios) and is_int(layers) and layers > 0:
        values["compress_ratios"] = tuple(ratios[:layers])
        if any(ratios[layers:]):
            faults.append(
                f"compress_ratios ends in {list(ratios[layers:])} behind its {layers} layers;"
                " expected 0 for every draft stage"
            )
    values["rope"], rope_faults = _rope_from_hf(config)
    faults += rope_faults
    defaults = {f.name: f.default for f in fields(TargetConfig) if f.default is not MISSING}
    faults += _target_faults({**defaults, **values})
    raise_all(ConfigError, source, faults)
    return TargetConfig(**values)


def _rope_from_hf(config: Mapping[str, Any]) -> tuple[RopeConfig, list[str]]:
    scaling = config.get("rope_scaling") or {"original_max_position_embeddings": 0}
    if not isinstance(scaling, dict):
        return RopeConfig(), [f"rope_scaling is {scaling!r}; expected an object of type 'yarn', or null"]
    faults = []
    kind = scaling.get("type", scaling.get("rope_type", "yarn"))
    if kind != "yarn":
        faults.append(f"rope_scaling.type is {kind!r}; only 'yarn' is supported for deepseek_v4")
    if scaling.get("attention_factor") not in (None, 1):
        faults.append(f"rope_scaling.attention_factor is {scaling['attention_factor']!r}; only 1 is supported for deepseek_v4")
    need = ("original_max_position_embeddings", "factor") if config.get("rope_scaling") else ()
    if missing := [key for key in need if key not in scaling]:
        faults.append(f"rope_scaling lacks {', '.join(missing)}; use the published config.json")
    nested = {f"rope_scaling.{key}": value for key, value in scaling.items()}
    found = {**config, **nested}
    return RopeConfig(**{name: found[key] for name, key in _ROPE_KEYS.items() if key in found}), faults


def draft_from_hf(config: Mapping[str, Any], num_stages: int, source: str = "config.json") -> DraftConfig | None:
    """DraftConfig of config.json's `dspark_*` keys, None without `dspark_block_size`.

    The stage count comes from the weights (`num_nextn_predict_layers` is stale in published files). Values are checked
    by `DraftConfig.faults`, which needs the target.

    Raises:
      ConfigError: naming `source` and what is missing or not supported.
    """
    if config.get("dspark_block_size") is None:
        return None
    faults = []
    need = ("dspark_noise_token_id", "dspark_target_layer_ids")
    if missing := [k for k in need if config.get(k) is None]:
        faults.append(f"has dspark_block_size but lacks {', '.join(missing)}; use the published config.json")
    for name in ("n_routed_experts", "num_experts_per_tok"):
        own = config.get(f"dspark_{name}")
        if own not in (None, config.get(name)):
            faults.append(f"dspark_{name} is {own!r}; only the target's {name} = {config.get(name)!r} is supported")
    raise_all(ConfigError, source, faults)
    head = config.get("dspark_markov_head_type") or "markov"
    return DraftConfig(
        block_size=config["dspark_block_size"],
        noise_token_id=config["dspark_noise_token_id"],
        target_layer_ids=config["dspark_target_layer_ids"],
        num_stages=num_stages,
        markov_rank=config.get("dspark_markov_rank", 256),
        head="markov" if head == "vanilla" else head,
    )


def to_hf(target: TargetConfig, draft: DraftConfig | None) -> dict[str, Any]:
    """The config.json that `target_from_hf` and `draft_from_hf` read back to the same values."""
    stages = draft.num_stages if draft else 0
    rope = {key: getattr(target.rope, name) for name, key in _ROPE_KEYS.items()}
    nested = {key.removeprefix("rope_scaling."): value for key, value in rope.items() if "." in key}
    config: dict[str, Any] = {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", **_FIXED}
    config |= {name: getattr(target, name) for name in _PLAIN}
    config |= {"compress_ratios": [*target.compress_ratios, *([0] * stages)]}
    config |= {key: value for key, value in rope.items() if "." not in key}
    config |= {"rope_scaling": {"type": "yarn", **nested}}
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
    """The parsed config.json of a checkpoint folder, in the published form if transformers wrote it."""
    return published_config(read_json(folder / "config.json"))


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a checkpoint's file.

    Raises:
      CheckpointError: the file is missing, cannot be read, or holds anything else.
    """
    if not path.parent.is_dir():
        raise CheckpointError(f"{path.parent}: no such folder; expected the folder of a published model")
    if not path.is_file():
        raise CheckpointError(
            f"{path.parent}: no {path.name}; expected the folder of a published model"
            " (config.json, *.safetensors, tokenizer.json)"
        )
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); check its permissions") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds {described(value)}; expected a JSON object")
    return value
