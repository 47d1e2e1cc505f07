"""A target and drafter so small that programs compile fast and every distribution can be enumerated."""

from dataclasses import replace

import jax.numpy as jnp
from flax import nnx

from dspark_jax.checkpoint.layout import skeleton
from dspark_jax.config import DraftConfig, HeadKind, RopeConfig, TargetConfig
from dspark_jax.models.speculative import SpeculativeLM
from helpers.checkpoints import random_params

# A heavily compressed layer with a hash table, and a compressed sparse one that must refuse entries.
MICRO = TargetConfig(
    vocab_size=5,
    hidden_size=8,
    num_hidden_layers=2,
    num_attention_heads=2,
    head_dim=8,
    q_lora_rank=6,
    o_groups=2,
    o_lora_rank=3,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=5,
    compress_ratios=(3, 4),
    num_hash_layers=1,
    sliding_window=3,
    index_n_heads=6,
    index_head_dim=4,
    index_topk=1,
    hc_mult=2,
    max_position_embeddings=32,
    rope=RopeConfig(dim=4, yarn_original=16),
)
MICRO_DRAFT = DraftConfig(block_size=2, noise_token_id=4, target_layer_ids=(0, 1), num_stages=1, markov_rank=3)


def micro_model(head: HeadKind = "markov", *, gamma: int = 2, stages: int = 1, seed: int = 0) -> SpeculativeLM:
    """Random weights everywhere: biases, sinks and scales too."""
    draft = replace(MICRO_DRAFT, head=head, block_size=gamma, num_stages=stages)
    graph, _ = skeleton(MICRO, draft, dtype=jnp.float32, axis=None)
    return nnx.merge(graph, random_params(MICRO, draft, seed))
