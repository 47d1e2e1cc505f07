"""Writes a tiny random transformers DeepSeek-V4 (fp32, CPU): inputs, logits, and the weights under both sets of names.

Usage: transformers_v4.py FILE.npz
Keys: config (JSON in the published config.json's form), cfg (JSON, `v4_oracle.Cfg`), H/<transformers key>,
P/<checkpoint key>, ids [B, S], logits [B, S, V], margin (smallest gap of any top-k), oracle_error (largest difference
to the oracle on the renamed weights, whole and in chunks).
The file is only written when the oracle agrees with transformers, which proves the renaming; besides, transformers
reads a checkpoint with the published names back to the same model.
"""

import json
import re
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
from transformers.utils.logging import disable_progress_bar

import tiny_v4
import v4_oracle

TOLERANCE = 2e-5
MIN_MARGIN = 1e-4
KINDS = {0: "sliding_attention", 4: "compressed_sparse_attention"}

# The published config.json's fields; the oracle's configuration and transformers' are both made from it.
PUBLISHED = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 12,
    "o_groups": 2,
    "o_lora_rank": 6,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "num_hash_layers": 2,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 2.0,
    "sliding_window": 8,
    "compress_ratios": [0, 6, 4, 6, 4],
    "index_n_heads": 8,
    "index_head_dim": 12,
    "index_topk": 2,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 64,
    },
    "max_position_embeddings": 1024,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}

# transformers key -> checkpoint key, in this order; experts are split besides.
RENAMINGS = [
    (r"^lm_head\.", "head."),
    (r"^model\.embed_tokens\.", "embed."),
    (r"^model\.hc_head\.hc_", "hc_head_"),
    (r"^model\.", ""),
    (r"\.self_attn\.compressor\.indexer\.scorer\.weights_proj\.", ".attn.indexer.weights_proj."),
    (r"\.self_attn\.compressor\.indexer\.q_b_proj\.", ".attn.indexer.wq_b."),
    (r"\.self_attn\.compressor\.indexer\.", ".attn.indexer.compressor."),
    (r"\.self_attn\.", ".attn."),
    (r"compressor\.kv_norm\.", "compressor.norm."),
    (r"compressor\.gate_proj\.", "compressor.wgate."),
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
    (r"\.mlp\.", ".ffn."),
    (r"\.e_score_correction_bias$", ".bias"),
    (r"shared_experts\.gate_proj\.", "shared_experts.w1."),
    (r"shared_experts\.down_proj\.", "shared_experts.w2."),
    (r"shared_experts\.up_proj\.", "shared_experts.w3."),
]


def to_checkpoint_keys(state: tiny_v4.Weights) -> tiny_v4.Weights:
    """The same weights under the published names; fused experts [E, ...] become one matrix an expert."""
    renamed: tiny_v4.Weights = {}
    for key, value in state.items():
        name = key
        for pattern, replacement in RENAMINGS:
            name = re.sub(pattern, replacement, name)
        prefix = name.rpartition(".")[0]
        if name.endswith(".experts.gate_up_proj"):
            gate, up = value.chunk(2, dim=1)
            renamed |= {f"{prefix}.{i}.w1.weight": w for i, w in enumerate(gate)}
            renamed |= {f"{prefix}.{i}.w3.weight": w for i, w in enumerate(up)}
        elif name.endswith(".experts.down_proj"):
            renamed |= {f"{prefix}.{i}.w2.weight": w for i, w in enumerate(value)}
        else:
            renamed[name] = value
    return renamed


def oracle_config(config: dict) -> v4_oracle.Cfg:
    """The oracle's configuration of a published config.json without draft stages."""
    scaling = config["rope_scaling"]
    return v4_oracle.Cfg(
        vocab=config["vocab_size"],
        dim=config["hidden_size"],
        n_layers=config["num_hidden_layers"],
        n_hash=config["num_hash_layers"],
        heads=config["num_attention_heads"],
        head_dim=config["head_dim"],
        rope=config["qk_rope_head_dim"],
        q_rank=config["q_lora_rank"],
        o_groups=config["o_groups"],
        o_rank=config["o_lora_rank"],
        experts=config["n_routed_experts"],
        topk=config["num_experts_per_tok"],
        inter=config["moe_intermediate_size"],
        ratios=tuple(config["compress_ratios"]),
        route_scale=config["routed_scaling_factor"],
        limit=config["swiglu_limit"],
        window=config["sliding_window"],
        idx_heads=config["index_n_heads"],
        idx_dim=config["index_head_dim"],
        idx_topk=config["index_topk"],
        theta=config["rope_theta"],
        ctheta=config["compress_rope_theta"],
        yarn_orig=scaling["original_max_position_embeddings"],
        yarn_factor=scaling["factor"],
        beta_fast=scaling["beta_fast"],
        beta_slow=scaling["beta_slow"],
        hc=config["hc_mult"],
        iters=config["hc_sinkhorn_iters"],
        hc_eps=config["hc_eps"],
        eps=config["rms_norm_eps"],
        stages=0,
    )


def transformers_config(config: dict) -> DeepseekV4Config:
    """transformers' own configuration: it names layer kinds; of published ratios it reads 0, 4 and 128 only."""
    ratios = config["compress_ratios"]
    (heavy,) = {ratio for ratio in ratios if ratio not in KINDS}
    replaced = ("architectures", "model_type", "compress_ratios", "rope_scaling")
    kept = {k: v for k, v in config.items() if k not in replaced}
    scaling = {k: v for k, v in config["rope_scaling"].items() if k != "type"}
    return DeepseekV4Config(
        **kept,
        layer_types=[KINDS.get(ratio, "heavily_compressed_attention") for ratio in ratios],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": heavy},
        rope_parameters={"rope_type": "yarn", **scaling},
        pad_token_id=None,
        attn_implementation="eager",
    )


@torch.no_grad()
def random_model(config: DeepseekV4Config, seed: int) -> DeepseekV4ForCausalLM:
    """A model in which no parameter or buffer has its initial zero or one (sinks, biases, norms, hash tables)."""
    model = DeepseekV4ForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(seed)

    def noise(tensor: torch.Tensor) -> torch.Tensor:
        return torch.randn(tensor.shape, generator=generator)

    for name, tensor in model.named_parameters():
        if name.endswith("norm.weight"):
            tensor.copy_(1 + 0.2 * noise(tensor))
        elif name.endswith("scale"):
            tensor.copy_(0.5 + torch.rand(tensor.shape, generator=generator))
        elif tensor.ndim <= 1 or name.endswith("position_bias"):
            tensor.copy_(0.5 * noise(tensor))
        else:
            tensor.copy_(0.25 * noise(tensor))
    for name, tensor in model.named_buffers():
        if name.endswith("tid2eid"):
            experts = config.n_routed_experts
            rows = [torch.randperm(experts, generator=generator)[: tensor.shape[1]] for _ in range(len(tensor))]
            tensor.copy_(torch.stack(rows))
        elif name.endswith("e_score_correction_bias"):
            tensor.copy_(0.3 * noise(tensor))
    return model


def read_by_transformers(P: tiny_v4.Weights) -> DeepseekV4ForCausalLM:
    """The model that transformers makes of a checkpoint with the published names."""
    with tempfile.TemporaryDirectory() as folder:
        save_file({k: v.contiguous() for k, v in P.items()}, Path(folder) / "model.safetensors", {"format": "pt"})
        transformers_config(PUBLISHED).save_pretrained(folder)
        model = DeepseekV4ForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


@torch.no_grad()
def oracle_logits(c: v4_oracle.Cfg, P: tiny_v4.Weights, ids: torch.Tensor, chunk: int) -> torch.Tensor:
    """The oracle's logits [B, S, V], each sequence in chunks."""
    rows = []
    for row in ids:
        state: dict = {}
        rows.append(torch.cat([v4_oracle.target_forward(c, P, part, state)[0] for part in row.split(chunk)]))
    return torch.stack(rows)


def main(path: Path) -> None:
    disable_progress_bar()
    torch.set_num_threads(1)
    c = oracle_config(PUBLISHED)
    for seed in range(100):
        torch.manual_seed(seed)
        model = random_model(transformers_config(PUBLISHED), seed)
        ids = torch.randint(0, c.vocab, (2, 37), generator=torch.Generator().manual_seed(seed))
        P = to_checkpoint_keys(model.state_dict())
        v4_oracle.margins.clear()
        whole = oracle_logits(c, P, ids, 37)
        margin = min(v4_oracle.margins)
        if margin >= MIN_MARGIN:
            break
    else:
        raise SystemExit("no well-conditioned draw in 100 attempts; loosen MIN_MARGIN")

    read = read_by_transformers(P).state_dict()
    state = model.state_dict()
    wrong = read.keys() ^ state.keys() or {k for k in state if not torch.equal(read[k], state[k])}
    if wrong:
        raise SystemExit(f"transformers reads the renamed weights otherwise: {sorted(wrong)}")
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
    errors = [(logits - other).abs().max().item() for other in (whole, oracle_logits(c, P, ids, 5))]
    if max(errors) > TOLERANCE:
        raise SystemExit(f"oracle and transformers differ by {errors} (whole, chunked); allowed: {TOLERANCE}")
    np.savez_compressed(
        path,
        config=json.dumps(PUBLISHED),
        cfg=tiny_v4.config_json(c),
        ids=ids.numpy(),
        logits=logits.numpy(),
        margin=np.float64(margin),
        oracle_error=np.float64(max(errors)),
        **{"H/" + k: v.numpy() for k, v in state.items()},
        **{"P/" + k: v.numpy() for k, v in P.items()},
    )
    print(f"{path}: {len(P)} tensors, seed {seed}, margin {margin:.1e}, oracle against transformers {max(errors):.1e}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
