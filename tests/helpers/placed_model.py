"""A model whose ring compiles fast, with more experts than ranks and draft stages: for tests of expert placement."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dspark_jax.api import LM
from dspark_jax.checkpoint.layout import skeleton
from dspark_jax.config import DraftConfig, RopeConfig, TargetConfig
from dspark_jax.decode.sampling import SamplingParams
from dspark_jax.eplb import ExpertLayers, Placement
from dspark_jax.parallel.mesh import make_mesh
from dspark_jax.results import Completion
from dspark_jax.serve.engine import Engine
from helpers.checkpoints import random_params
from helpers.runner import scaled_error

EXPERTS, MAX_LEN, GAMMA = 8, 32, 1
# Only windowed attention: placement does not touch it. The first layer routes by a hash table.
CONFIG = TargetConfig(
    vocab_size=11, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, head_dim=8, q_lora_rank=6, o_groups=2,
    o_lora_rank=3, n_routed_experts=EXPERTS, num_experts_per_tok=3, moe_intermediate_size=5, compress_ratios=(0, 0),
    num_hash_layers=1, sliding_window=4, hc_mult=2, hc_sinkhorn_iters=2, max_position_embeddings=MAX_LEN,
    rope=RopeConfig(dim=4),
)  # fmt: skip
DRAFT = DraftConfig(block_size=GAMMA, noise_token_id=10, target_layer_ids=(0, 1), num_stages=2, markov_rank=3)
LAYERS = ExpertLayers.of(CONFIG, DRAFT)
TOP = 10  # log-probabilities that are compared, of a vocabulary of 11


class Letters:
    """Ids as letters, one each."""

    def encode(self, text: str) -> list[int]:
        return [2 + ord(c) % 8 for c in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(97 + i) for i in ids)


class Outputs(NamedTuple):
    """Tokens, drafts and acceptance by request; target log-probabilities by token id; confidence logits [lanes, gamma]."""

    exact: list[tuple]
    law: np.ndarray
    confidence: np.ndarray


@functools.cache
def lm() -> LM:
    """Random weights everywhere; small vectors would hide a wrong expert."""
    graph, _ = skeleton(CONFIG, DRAFT, dtype=np.float32, axis="expert")
    return LM(CONFIG, DRAFT, graph, random_params(CONFIG, DRAFT, 0), Letters(), max_len=MAX_LEN)


def rotated(ranks: int, layers: int = LAYERS.num_layers, experts: int = EXPERTS) -> Placement:
    """Slot j of layer i holds expert (i + j) mod E; E + 8 slots."""
    return Placement((np.arange(layers)[:, None] + np.arange(experts + 8)) % experts, experts, ranks)


def shuffled(ranks: int, seed: int = 5, slots: int = 12, layers: int = LAYERS.num_layers) -> Placement:
    """Every expert once and random replicas, in random order, another in every layer."""
    rng = np.random.default_rng(seed)
    rows = [[*range(EXPERTS), *rng.integers(0, EXPERTS, slots - EXPERTS)] for _ in range(layers)]
    return Placement(np.array([rng.permutation(row) for row in rows]), EXPERTS, ranks)


PLACEMENTS = {
    "rotated": rotated,
    "random": shuffled,
    "auto": lambda ranks: Placement.auto(LAYERS.num_layers, EXPERTS, 12, ranks),
}


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Greedy and sampled, ragged; more than the smallest engines have slots."""
    rng = np.random.default_rng(2)
    prompts = [rng.integers(0, 10, int(rng.integers(1, 7))).tolist() for _ in range(10)]
    params = [SamplingParams(0.9 * (i % 2), seed=i, max_tokens=int(rng.integers(4, 16)), logprobs=TOP) for i in range(10)]
    return prompts, params


def make_engine(pipe: int, expert: int, **options: Any) -> Engine:
    """An engine on emulated devices."""
    options = {"slots": max(4, pipe * expert), "chunk": GAMMA + 1, "max_len": MAX_LEN, "max_logprobs": TOP} | options
    return Engine(lm(), mesh=make_mesh(pipe, expert), **options)


@functools.cache
def base_engine(pipe: int, expert: int) -> Engine:
    """Without a placement; shared by all tests of a process, idle between them."""
    return make_engine(pipe, expert, count_experts=(0, 10**6))


@functools.cache
def base_outputs(pipe: int, expert: int) -> Outputs:
    """`outputs` without a placement."""
    return outputs(base_engine(pipe, expert))


def outputs(engine: Engine) -> Outputs:
    """Of all requests."""
    return read(engine, engine.generate(*requests()))


def read(engine: Engine, answers: list[Completion]) -> Outputs:
    """What answers hold, and what the engine keeps of the last block that was drafted in every slot."""
    exact = [(a.tokens, a.drafted, a.accepted_by_position, a.finish_reason) for a in answers]
    law = [value for a in answers for one in a.logprobs or () for _, value in sorted(one.top)]
    return Outputs(exact, np.array(law), np.asarray(engine._state.requests.confidence)[-1])


def same(found: Outputs, expected: Outputs) -> None:
    """Equal tokens and drafts; log-probabilities, and confidences (logits too), to 1e-5 of their scale."""
    assert found.exact == expected.exact
    assert scaled_error(found.law, expected.law) < 1e-5
    assert scaled_error(found.confidence, expected.confidence) < 1e-5
