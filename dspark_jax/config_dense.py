"""Configuration of dense targets: Qwen3, and Llama-type models, which lack its query and key norms (SmolLM2)."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar

from dspark_jax.config import DENSE_FAMILIES, MOST, TargetConfig, is_int
from dspark_jax.errors import ConfigError, raise_all


@dataclass(frozen=True)
class DenseConfig:
    """A decoder with grouped-query attention over its whole context, SwiGLU and rotary positions. Field names follow
    config.json; sizes are in channels or counts.

    `qk_norm`: queries and keys have an RMS norm per head (Qwen3). `bos_token_id` is put in front of texts, None where they
    begin without one. Any of `eos_token_ids` ends an answer.

    Raises:
      ConfigError: listing every value of a wrong type or, with all types right, every contradiction.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    qk_norm: bool
    rope_theta: float = 1e4
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    # What every dense model has: one residual stream, and no experts.
    hc_mult: ClassVar[int] = 1
    n_routed_experts: ClassVar[int] = 0

    def __post_init__(self) -> None:
        raise_all(ConfigError, "dense config", _faults(vars(self)))


ModelConfig = TargetConfig | DenseConfig

_NUMBERS = {f.name: f.type for f in fields(DenseConfig) if f.type in (int, float)}
_REQUIRED = [f.name for f in fields(DenseConfig) if f.default is MISSING]
# Switches of config.json that exist in one form only; absent means that form.
_FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "use_sliding_window": False}
# Of another value than None they mean something that is not computed here.
_REFUSED = {"quantization_config": "weights stored as BF16, F16 or F32"}


def dense_from_hf(config: Mapping[str, Any], source: str = "config.json") -> DenseConfig:
    """DenseConfig of a published config.json of model_type qwen3 or llama.

    Raises:
      ConfigError: naming `source` and every fault; for another model family that alone.
    """
    family = config.get("model_type")
    if family not in DENSE_FAMILIES:
        raise ConfigError(f"{source}: model_type is {family!r}; expected one of {', '.join(map(repr, DENSE_FAMILIES))}")
    faults = [
        f"{name} is {config[name]!r}; only {only!r} is supported for {family}"
        for name, only in _FIXED.items()
        if config.get(name) not in (None, only)
    ]
    faults += [f"{name} is {config[name]!r:.80}; expected none, {why}" for name, why in _REFUSED.items() if config.get(name)]
    # Qwen3 names a window that it does not use; elsewhere one would be used.
    if config.get("sliding_window") is not None and config.get("use_sliding_window") is None:
        faults.append(f"sliding_window is {config['sliding_window']!r}; only full attention is supported for {family}")
    kinds = config.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or {*map(str, kinds)} - {"full_attention"}):
        faults.append(f"layer_types is {kinds!r:.80}; only full_attention is supported for {family}")
    theta, rope_faults = _rope(config, str(family))
    values: dict[str, Any] = {name: config[name] for name in _NUMBERS if config.get(name) is not None}
    heads = values.get("num_attention_heads")
    if family == "llama" and is_int(heads) and heads > 0:  # in files of old these two are understood
        values.setdefault("num_key_value_heads", heads)
        if is_int(hidden := values.get("hidden_size")) and hidden % heads == 0:
            values.setdefault("head_dim", hidden // heads)
    if theta is not None:
        values["rope_theta"] = theta
    values["qk_norm"] = family == "qwen3"
    values["tie_word_embeddings"] = config.get("tie_word_embeddings") or False
    values["bos_token_id"] = config.get("bos_token_id")
    ends = config.get("eos_token_id")
    values["eos_token_ids"] = tuple(ends) if isinstance(ends, list) else () if ends is None else (ends,)
    if missing := [name for name in _REQUIRED if name not in values]:
        faults.append(f"lacks {', '.join(missing)}; use the config.json published with the weights")
    raise_all(ConfigError, source, [*faults, *rope_faults, *_faults(values)])
    return DenseConfig(**values)


def dense_to_hf(config: DenseConfig) -> dict[str, Any]:
    """The config.json that `dense_from_hf` and transformers read back to the same values."""
    found: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM" if config.qk_norm else "LlamaForCausalLM"],
        "model_type": "qwen3" if config.qk_norm else "llama",
        **{name: only for name, only in _FIXED.items() if name != "use_sliding_window"},
        **{name: getattr(config, name) for name in _NUMBERS},
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
    }
    ends = config.eos_token_ids
    return {**found, "eos_token_id": ends[0] if len(ends) == 1 else list(ends) or None}


def v4_config(config: ModelConfig, source: str) -> TargetConfig:
    """`config`, where only DeepSeek-V4-style targets will do; raises ConfigError that names `source` for a dense one."""
    if isinstance(config, DenseConfig):
        raise ConfigError(
            f"{source}: is a dense model, which runs by `load` and `Engine` and the commands that use these; expected a"
            " DeepSeek-V4-style model here"
        )
    return config


def _rope(config: Mapping[str, Any], family: str) -> tuple[Any, list[str]]:
    """Theta, where config.json has one, and what is not supported; transformers 5 keeps both in `rope_parameters`."""
    theta, faults = config.get("rope_theta"), []
    for name in ("rope_scaling", "rope_parameters"):
        found = config.get(name)
        if found is None:
            continue
        if not isinstance(found, Mapping):
            faults.append(f"{name} is {found!r:.80}; expected an object, or null")
            continue
        kind = found.get("rope_type", found.get("type", "default"))
        if kind not in ("default", "none"):
            faults.append(f"{name} is of type {kind!r}; only unscaled rotary positions are supported for {family}")
        theta = found.get("rope_theta", theta)
    if config.get("partial_rotary_factor") not in (None, 1):
        faults.append(f"partial_rotary_factor is {config['partial_rotary_factor']!r}; only 1 is supported for {family}")
    return theta, faults


def _faults(values: Mapping[str, Any]) -> list[str]:
    """Faults of a DenseConfig's values; contradictions are looked for only where every value has its type."""
    faults = list(_type_faults(values))
    complete = values.keys() >= set(_REQUIRED)
    return faults if faults or not complete else list(_contradictions(values))


def _type_faults(values: Mapping[str, Any]) -> Iterator[str]:
    for name, kind in _NUMBERS.items():
        value = values.get(name, 1)
        if kind is int and not (is_int(value) and 0 < value <= MOST):
            yield f"{name} is {value!r}; expected a positive integer" + (f" of at most {MOST}" if is_int(value) else "")
        if kind is float and not ((isinstance(value, float) or is_int(value)) and 0 < value < math.inf):
            yield f"{name} is {value!r}; expected a positive number"
    for name in ("qk_norm", "tie_word_embeddings"):
        if not isinstance(values.get(name, False), bool):
            yield f"{name} is {values[name]!r}; expected true or false"
    bos, ends = values.get("bos_token_id"), values.get("eos_token_ids", ())
    if bos is not None and not is_int(bos):
        yield f"bos_token_id is {bos!r}; expected a token id, or null"
    if not isinstance(ends, tuple) or not all(is_int(e) for e in ends):
        yield f"eos_token_id is {ends!r}; expected a token id, or a list of them"


def _contradictions(v: Mapping[str, Any]) -> Iterator[str]:
    if v["num_attention_heads"] % v["num_key_value_heads"]:
        yield (
            f"num_key_value_heads is {v['num_key_value_heads']}; expected a divisor of"
            f" num_attention_heads = {v['num_attention_heads']}"
        )
    if v["head_dim"] % 2:
        yield f"head_dim is {v['head_dim']}; expected an even number, whose halves are rotated"
    for name in ("bos_token_id", "eos_token_ids"):
        ids = v.get(name)
        if bad := [i for i in (ids if isinstance(ids, tuple) else (ids,)) if i is not None and not 0 <= i < v["vocab_size"]]:
            yield f"{name} holds {bad}; expected token ids below vocab_size = {v['vocab_size']}"
