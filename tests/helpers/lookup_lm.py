"""A look-up-table target and drafter as an `LM`: the whole Python interface over a model that compiles in a second."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from dspark_jax import LM
from dspark_jax.config import DraftConfig, RopeConfig, TargetConfig
from dspark_jax.testing import DummyTokenizer, LookupDrafter, LookupTarget

LETTERS = "abcdefghijklmn"
BOS, EOS, VOCAB, GAMMA = 14, 15, 16, 4


class LookupModel(nnx.Module):
    """The tables as parameters, so that `nnx.split` gives what `LM` takes."""

    def __init__(self, target: LookupTarget, drafter: LookupDrafter | None):
        self.tables = nnx.Param(target.table)
        self.drafts = None if drafter is None else nnx.Param(drafter.table)

    @property
    def target(self) -> LookupTarget:
        return LookupTarget(self.tables[...])

    @property
    def drafter(self) -> LookupDrafter | None:
        if self.drafts is None:
            return None
        table = self.drafts[...]
        return LookupDrafter(table, jnp.zeros(table.shape[:2], jnp.float32))


def lookup_config(vocab: int = VOCAB, max_len: int = 512) -> TargetConfig:
    """A configuration of which only the vocabulary, its special tokens and the context length matter."""
    return TargetConfig(
        vocab_size=vocab, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, head_dim=8, q_lora_rank=8,
        o_groups=1, o_lora_rank=8, n_routed_experts=4, num_experts_per_tok=1, moe_intermediate_size=8,
        compress_ratios=(0,), max_position_embeddings=max_len, bos_token_id=BOS, eos_token_id=EOS,
        rope=RopeConfig(dim=4),
    )  # fmt: skip


def lookup_lm(target: LookupTarget, drafter: LookupDrafter | None, tokenizer=None, **options) -> LM:
    """`options` are those of LM, and `max_position_embeddings`."""
    config = lookup_config(target.vocab_size, options.pop("max_position_embeddings", 512))
    draft = None
    if drafter is not None:
        draft = DraftConfig(drafter.block_size, noise_token_id=0, target_layer_ids=(0,), num_stages=1)
    graph, params = nnx.split(LookupModel(target, drafter))
    tokenizer = tokenizer or DummyTokenizer(target.vocab_size, LETTERS)
    return LM(config, draft, graph, params, tokenizer, **options)


def chain(follower: dict[int, int], vocab: int = VOCAB) -> LookupTarget:
    """A target that follows token a with `follower[a]`, nearly always; other tokens are followed by 0."""
    table = np.full((vocab, vocab), -20.0, np.float32)
    for a in range(vocab):
        table[a, follower.get(a, 0)] = 0.0
    return LookupTarget(jnp.asarray(table))


def alphabet() -> LookupTarget:
    """a b c … n a b c …; the first letter behind the beginning of sequence is a."""
    return chain({a: (a + 1) % len(LETTERS) for a in range(len(LETTERS))})


def agreeing(target: LookupTarget, gamma: int = GAMMA) -> LookupDrafter:
    """Proposes the target's own law at every position: every draft is accepted."""
    table = jnp.broadcast_to(target.table, (gamma, *target.table.shape))
    return LookupDrafter(table, jnp.zeros(table.shape[:2], jnp.float32))


def noisy(target: LookupTarget, gamma: int = GAMMA, scale: float = 1.0) -> LookupDrafter:
    """The target's law with noise on the logits: some drafts are accepted and some are not."""
    noise = np.random.default_rng(0).normal(0, scale, (gamma, *target.table.shape))
    table = (target.table + jnp.asarray(noise, jnp.float32)).astype(jnp.bfloat16).astype(jnp.float32)
    return LookupDrafter(table, jnp.zeros(table.shape[:2], jnp.float32))
