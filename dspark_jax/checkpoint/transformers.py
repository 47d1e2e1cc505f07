"""DeepSeek-V4 as transformers saves it: its tensor names and its config.json, read as the published ones.

`save_pretrained` writes transformers' own names with `save_original_format=False`, else a mixture of both: all of them are
taken. JAX is not imported.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

Part = tuple[int | slice, ...]

# Applied in this order.
_RENAMES = [
    (r"^lm_head\.", "head."),
    (r"^model\.", ""),
    (r"^embed_tokens\.", "embed."),
    (r"^hc_head\.hc_", "hc_head_"),
    (r"\.self_attn\.", ".attn."),
    (r"\.mlp\.", ".ffn."),
    (r"\.compressor\.indexer\.(scorer\.)?weights_proj\.", ".indexer.weights_proj."),
    (r"\.compressor\.indexer\.(q_b_proj|wq_b)\.", ".indexer.wq_b."),
    (r"\.compressor\.indexer\.", ".indexer.compressor."),
    (r"\.attn\.norm\.", ".attn.kv_norm."),
    (r"\.compressor\.kv_norm\.", ".compressor.norm."),
    (r"\.compressor\.gate_proj\.", ".compressor.wgate."),
    (r"\.position_bias$", ".ape"),
    (r"\.sinks$", ".attn_sink"),
    (r"\.q_a_proj\.", ".wq_a."),
    (r"\.q_b_proj\.", ".wq_b."),
    (r"\.q_a_norm\.", ".q_norm."),
    (r"\.kv_proj\.", ".wkv."),
    (r"\.o_a_proj\.", ".wo_a."),
    (r"\.o_b_proj\.", ".wo_b."),
    (r"\.(attn|ffn)_hc\.", r".hc_\1_"),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.e_score_correction_bias$", ".bias"),
    (r"\.shared_experts\.gate_proj\.", ".shared_experts.w1."),
    (r"\.shared_experts\.down_proj\.", ".shared_experts.w2."),
    (r"\.shared_experts\.up_proj\.", ".shared_experts.w3."),
]
_KINDS = {"sliding_attention": 0, "compressed_sparse_attention": 4}
_HEAVY = "heavily_compressed_attention"


def is_transformers(names: set[str]) -> bool:
    """Whether a checkpoint has transformers' prefix."""
    return any(name.startswith("model.") for name in names)


def published_name(name: str) -> str:
    """The published name of a tensor; of the fused experts, what they would be called there."""
    for pattern, replacement in _RENAMES:
        name = re.sub(pattern, replacement, name)
    return name


def published_parts(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...], Part]]:
    """Name and shape of the published tensors that a tensor holds, and where it does.

    Fused experts are [E, 2f, d], w1 above w3, and [E, d, f]; every other tensor is one as a whole.
    """
    name = published_name(name)
    prefix, _, leaf = name.rpartition(".")
    if leaf not in ("gate_up_proj", "down_proj") or len(shape) != 3:
        yield name, shape, ()
        return
    experts, rows, columns = shape
    for e in range(experts):
        if leaf == "down_proj":
            yield f"{prefix}.{e}.w2.weight", (rows, columns), (e,)
        else:
            yield f"{prefix}.{e}.w1.weight", (rows // 2, columns), (e, slice(0, rows // 2))
            yield f"{prefix}.{e}.w3.weight", (rows - rows // 2, columns), (e, slice(rows // 2, rows))


def fused_name(name: str) -> str:
    """The fused tensor, by its name in `published_name`'s form, that holds an expert's matrix; other names as they are."""
    name = re.sub(r"(\.experts)\.\d+\.w[13]\.weight$", r"\1.gate_up_proj", name)
    return re.sub(r"(\.experts)\.\d+\.w2\.weight$", r"\1.down_proj", name)


def published_config(config: dict[str, Any]) -> dict[str, Any]:
    """config.json in its published form; one that is no transformers config, or not a sound one, comes back as it is.

    Kinds of layers become `compress_ratios` and `num_hash_layers`, rotary parameters `rope_theta`, `compress_rope_theta` and
    `rope_scaling`.
    """
    kinds, rates = config.get("layer_types"), config.get("compress_rates")
    if config.get("model_type") != "deepseek_v4" or "compress_ratios" in config or not isinstance(kinds, list):
        return config
    found = dict(config)
    ratios = _KINDS | {_HEAVY: 128} | (rates if isinstance(rates, dict) else {})
    if all(isinstance(kind, str) and kind in ratios for kind in kinds):
        found["compress_ratios"] = [ratios[kind] for kind in kinds]
    hashed = config.get("mlp_layer_types")
    if isinstance(hashed, list) and "num_hash_layers" not in config:
        count = hashed.count("hash_moe")
        if hashed[:count] == ["hash_moe"] * count:
            found["num_hash_layers"] = count
    return found | _rope(config)


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    parameters = config.get("rope_parameters")
    if not isinstance(parameters, dict):
        return {}
    main, compress = parameters.get("main"), parameters.get("compress")
    if not isinstance(main, dict) or not isinstance(compress, dict):
        return {}
    found = {"rope_theta": main.get("rope_theta"), "compress_rope_theta": compress.get("rope_theta")}
    if compress.get("rope_type") != "default":
        found["rope_scaling"] = {k: v for k, v in compress.items() if k not in ("rope_theta", "partial_rotary_factor")}
    factor, width = main.get("partial_rotary_factor"), config.get("head_dim")
    if isinstance(factor, float) and isinstance(width, int):
        found["qk_rope_head_dim"] = int(width * factor)
    return {key: value for key, value in found.items() if value is not None}
