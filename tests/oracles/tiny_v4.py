"""Tiny random V4 models with DSpark stages for the oracle, and the npz files of their inputs and expected outputs."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import torch

import v4_oracle

Weights = dict[str, torch.Tensor]


def random_weights(c: v4_oracle.Cfg, generator: torch.Generator) -> Weights:
    """Weights under the published key names. Everything is noise, also what training starts at zero or one (sinks,
    biases, norms): a constant would hide a missing term."""
    P: Weights = {}

    def put(name: str, *shape: int, kind: str = "matrix") -> None:
        # Both draws for every kind: the committed goldens depend on this sequence.
        r, u = torch.randn(shape, generator=generator), torch.rand(shape, generator=generator)
        P[name] = {
            "matrix": r * 0.15,
            "expert": r * 0.3,
            "norm": 1 + 0.2 * r,
            "bias": r * 0.5,
            "scale": 0.5 + u,
        }[kind]

    def put_mixing(prefix: str, rows: int) -> None:
        put(prefix + "_fn", rows, c.hc * c.dim)
        put(prefix + "_base", rows, kind="bias")
        put(prefix + "_scale", 3 if rows > c.hc else 1, kind="scale")

    def put_compressor(prefix: str, ratio: int, width: int) -> None:
        channels = 2 * width if ratio == 4 else width
        put(prefix + "wkv.weight", channels, c.dim)
        put(prefix + "wgate.weight", channels, c.dim)
        put(prefix + "ape", ratio, channels, kind="bias")
        put(prefix + "norm.weight", width, kind="norm")

    def put_attention(prefix: str, ratio: int) -> None:
        put(prefix + "wq_a.weight", c.q_rank, c.dim)
        put(prefix + "q_norm.weight", c.q_rank, kind="norm")
        put(prefix + "wq_b.weight", c.heads * c.head_dim, c.q_rank)
        put(prefix + "wkv.weight", c.head_dim, c.dim)
        put(prefix + "kv_norm.weight", c.head_dim, kind="norm")
        put(prefix + "attn_sink", c.heads, kind="bias")
        put(prefix + "wo_a.weight", c.o_groups * c.o_rank, c.heads * c.head_dim // c.o_groups)
        put(prefix + "wo_b.weight", c.dim, c.o_groups * c.o_rank)
        if ratio:
            put_compressor(prefix + "compressor.", ratio, c.head_dim)
        if ratio == 4:
            put_compressor(prefix + "indexer.compressor.", ratio, c.idx_dim)
            put(prefix + "indexer.wq_b.weight", c.idx_heads * c.idx_dim, c.q_rank)
            put(prefix + "indexer.weights_proj.weight", c.idx_heads, c.dim)

    def put_experts(prefix: str, hashed: bool) -> None:
        put(prefix + "gate.weight", c.experts, c.dim)
        if hashed:
            rows = [torch.randperm(c.experts, generator=generator)[: c.topk] for _ in range(c.vocab)]
            P[prefix + "gate.tid2eid"] = torch.stack(rows)
        else:
            put(prefix + "gate.bias", c.experts, kind="bias")
        for expert in [*(f"experts.{i}." for i in range(c.experts)), "shared_experts."]:
            put(prefix + expert + "w1.weight", c.inter, c.dim, kind="expert")
            put(prefix + expert + "w2.weight", c.dim, c.inter, kind="expert")
            put(prefix + expert + "w3.weight", c.inter, c.dim, kind="expert")

    def put_block(prefix: str, ratio: int, hashed: bool) -> None:
        put_attention(prefix + "attn.", ratio)
        put_experts(prefix + "ffn.", hashed)
        put(prefix + "attn_norm.weight", c.dim, kind="norm")
        put(prefix + "ffn_norm.weight", c.dim, kind="norm")
        put_mixing(prefix + "hc_attn", (2 + c.hc) * c.hc)
        put_mixing(prefix + "hc_ffn", (2 + c.hc) * c.hc)

    put("embed.weight", c.vocab, c.dim, kind="bias")
    put("head.weight", c.vocab, c.dim)
    put("norm.weight", c.dim, kind="norm")
    put_mixing("hc_head", c.hc)
    for i in range(c.n_layers):
        put_block(f"layers.{i}.", c.ratios[i], i < c.n_hash)
    for stage in range(c.stages):
        put_block(f"mtp.{stage}.", 0, False)
    put("mtp.0.main_proj.weight", c.dim, len(c.targets) * c.dim)
    put("mtp.0.main_norm.weight", c.dim, kind="norm")
    last = f"mtp.{c.stages - 1}."
    put(last + "norm.weight", c.dim, kind="norm")
    put_mixing(last + "hc_head", c.hc)
    put(last + "markov_head.markov_w1.weight", c.vocab, c.rank, kind="expert")
    put(last + "markov_head.markov_w2.weight", c.vocab, c.rank, kind="expert")
    put(last + "confidence_head.proj.weight", 1, c.dim + c.rank)
    return P


@torch.no_grad()
def expected(c: v4_oracle.Cfg, P: Weights, ids: torch.Tensor, steps: list[int]) -> dict[str, np.ndarray]:
    """Expected outputs for `ids` [S+1]: the target on the first S tokens, and one draft block a step i, whose context
    is ids[:i+1] and whose anchor is ids[i+1]."""
    logits, taps = v4_oracle.target_forward(c, P, ids[:-1], {})
    tokens, draft_logits, confidence = [], [], []
    for i in steps:
        state: dict = {}
        v4_oracle.draft_context(c, P, taps[: i + 1], state)
        block = v4_oracle.draft_block(c, P, int(ids[i + 1]), state)
        for collected, value in zip((tokens, draft_logits, confidence), block, strict=True):
            collected.append(value)
    return {
        "ids": ids.numpy(),
        "target_logits": logits.numpy(),
        "main_hidden": taps.float().numpy(),
        "draft_steps": np.array(steps),
        "draft_tokens": torch.stack(tokens).numpy(),
        "draft_logits": torch.stack(draft_logits).numpy(),
        "draft_conf": torch.stack(confidence).numpy(),
    }


def config_json(c: v4_oracle.Cfg) -> str:
    """The oracle's configuration as JSON (field names of `v4_oracle.Cfg`)."""
    return json.dumps(dataclasses.asdict(c) | {"ratios": list(c.ratios), "targets": list(c.targets)})


def save(path: Path, c: v4_oracle.Cfg, P: Weights, outputs: dict[str, np.ndarray]) -> None:
    """Writes `cfg`, the weights as `P/<key>`, and the outputs."""
    np.savez_compressed(path, cfg=config_json(c), **outputs, **{"P/" + k: v.numpy() for k, v in P.items()})
