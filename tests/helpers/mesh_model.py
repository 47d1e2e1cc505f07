"""A model small enough that its ring compiles in seconds: every layer kind, a hash layer, two draft stages."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dspark_jax.api import LM
from dspark_jax.checkpoint.layout import skeleton
from dspark_jax.config import DraftConfig, RopeConfig, TargetConfig
from dspark_jax.models.speculative import SpeculativeLM
from dspark_jax.parallel.mesh import make_mesh
from dspark_jax.serve.engine import Engine

VOCAB, GAMMA, MAX_LEN = 29, 2, 64  # a vocabulary that no expert axis divides
CONFIG = TargetConfig(
    vocab_size=VOCAB, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, head_dim=16, q_lora_rank=16, o_groups=2,
    o_lora_rank=8, sliding_window=8, compress_ratios=(0, 4, 8, 4), n_routed_experts=8, num_experts_per_tok=2,
    n_shared_experts=1, moe_intermediate_size=16, num_hash_layers=1, routed_scaling_factor=1.5, swiglu_limit=10.0,
    index_n_heads=2, index_head_dim=16, index_topk=3, hc_mult=2, hc_sinkhorn_iters=4, max_position_embeddings=MAX_LEN,
    rope=RopeConfig(dim=8),
)  # fmt: skip
DRAFT = DraftConfig(block_size=GAMMA, noise_token_id=VOCAB - 1, target_layer_ids=(0, 1, 3), num_stages=2, markov_rank=8)


class Letters:
    """Ids as letters, one each."""

    def encode(self, text: str) -> list[int]:
        return [2 + ord(c) % (VOCAB - 3) for c in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(97 + i) for i in ids)


@functools.cache
def model(draft: bool = True) -> tuple[nnx.GraphDef, nnx.State]:
    """Graph and parameters; every parameter random, so that no part is without effect."""

    def make() -> SpeculativeLM:
        return SpeculativeLM(CONFIG, DRAFT if draft else None, axis="expert", rngs=nnx.Rngs(0))

    graph = nnx.graphdef(nnx.eval_shape(make))
    leaves, structure = jax.tree.flatten(jax.jit(lambda: nnx.state(make()))())  # one program, not one an operation
    rng = np.random.default_rng(1)
    noisy = [
        rng.integers(0, CONFIG.n_routed_experts, x.shape).astype(np.int32)
        if x.dtype == np.int32
        else (np.asarray(x) * 1.5 + rng.normal(0, 0.05, x.shape)).astype(np.float32)
        for x in leaves
    ]
    return graph, jax.tree.unflatten(structure, noisy)


@functools.cache
def lm() -> LM:
    """The model behind the batch interface, on one device."""
    graph, params = model()
    return LM(CONFIG, DRAFT, graph, params, Letters(), max_len=MAX_LEN)


@functools.cache
def engine(pipe: int, expert: int, *, slots: int = 0, chunk: int = GAMMA + 1, speculate: bool = True) -> Engine:
    """An engine on emulated devices, shared by all tests of a process; idle between them."""
    mesh = make_mesh(pipe, expert)
    slots = slots or max(4, pipe * expert)
    return Engine(lm(), mesh=mesh, slots=slots, chunk=chunk, max_len=MAX_LEN, speculate=speculate)


@functools.cache
def forward(prompt: tuple[int, ...], tokens: tuple[int, ...]) -> np.ndarray:
    """log-softmax [tokens, V], in numpy, of one pass over the finished text, without any decoding code."""
    graph, _ = skeleton(CONFIG, DRAFT, dtype=jnp.float32, axis=None)
    text = np.zeros((1, MAX_LEN), np.int32)
    text[0, : len(prompt) + len(tokens)] = [*prompt, *tokens]

    @jax.jit
    def run(params, x):
        target = nnx.merge(graph, params).target
        return target.logits(target.sequence(x).hidden).reshape(MAX_LEN, VOCAB)

    logits = np.asarray(run(model()[1], text), np.float64)[len(prompt) - 1 :][: len(tokens)]
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))
