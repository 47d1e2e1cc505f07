"""The first three tokens of a tiny V4 with its DSpark stages, through the round, follow the enumerated joint law."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dspark_jax.checkpoint.layout import skeleton
from dspark_jax.decode.round import init_state, tick
from dspark_jax.decode.state import DecodeState, WorkItem, decode_item
from helpers.checkpoints import random_params
from helpers.micro import MICRO, MICRO_DRAFT
from helpers.sampling_reference import reference_law
from helpers.speculation import state as sampling_state
from helpers.statistics import P_VALUE_LIMIT, count, g_test, joint_index, markov_joint

pytestmark = pytest.mark.long

N = 20_000
VOCAB, GAMMA, MAX_LEN = 4, MICRO_DRAFT.block_size, 16
WIDTH = GAMMA + 1
# Six tokens: the window has slid, and the new ones close a heavily compressed group and the second compressed-sparse one.
PROMPT = (1, 3, 0, 2, 2, 1)
assert len(PROMPT) == 2 * WIDTH  # two chunks as wide as a block: prompt and rounds are one program

GRAPH = skeleton(replace(MICRO, vocab_size=VOCAB), replace(MICRO_DRAFT, noise_token_id=3), dtype=jnp.float32, axis=None)[0]


@functools.cache
def params() -> nnx.State:
    return random_params(replace(MICRO, vocab_size=VOCAB), replace(MICRO_DRAFT, noise_token_id=3), seed=2)


@jax.jit
def _start(params) -> DecodeState:
    model = nnx.merge(GRAPH, params)
    return init_state(model.target, model.drafter, N, MAX_LEN)


@jax.jit
def _tick(params, state: DecodeState, item: WorkItem):
    model = nnx.merge(GRAPH, params)
    return tick(model.target, model.drafter, state, item, MAX_LEN)


@functools.cache
def logits() -> np.ndarray:
    """Raw logits [V, V, 3, V] behind the prompt and every prefix of it, from one pass without any decoding code."""
    texts = np.array([[*PROMPT, *prefix] for prefix in np.ndindex(VOCAB, VOCAB)], np.int32)

    @jax.jit
    def run(params, texts):
        target = nnx.merge(GRAPH, params).target
        return target.logits(target.sequence(texts).hidden)

    return np.asarray(run(params(), texts))[:, -3:].reshape(VOCAB, VOCAB, 3, VOCAB)


def joint_law(*settings) -> np.ndarray:
    def follow(prefix: tuple[int, ...]) -> np.ndarray:
        first, second = (*prefix, 0, 0)[:2]  # later tokens change nothing in front of them
        return reference_law(logits()[first, second, len(prefix)], *settings)

    return markov_joint(follow, VOCAB, 3)


def prompt_items() -> list[WorkItem]:
    items = []
    for start in (0, WIDTH):
        token = np.broadcast_to(np.array(PROMPT[start : start + WIDTH], np.int32), (N, WIDTH))
        whole = functools.partial(np.full, N)
        fields: tuple[Any, ...] = (token, whole(start), whole(WIDTH), whole(0), whole(start > 0))
        items.append(WorkItem(*(x if x.dtype == bool else x.astype(np.int32) for x in fields)))
    return items


def first_three(*settings, spoil=lambda requests: requests) -> tuple[np.ndarray, float]:
    """Three tokens [N, 3] of N requests that differ in their seed only, and the mean accepted length.

    `spoil` may change the requests in front of every round.
    """
    state = _start(params())
    own: dict[str, Any] = {"sampling": sampling_state(N, *settings), "max_tokens": jnp.full(N, 9, jnp.int32)}
    state = replace(state, requests=replace(state.requests, **own))
    for item in prompt_items():
        state, emission = _tick(params(), state, item)
    tokens, filled = np.full((N, 3), -1), np.ones(N, int)
    tokens[:, 0] = emission.token[:, 0]
    accepted = []
    for _ in range(2):
        state = replace(state, requests=spoil(state.requests))
        state, emission = _tick(params(), state, decode_item(state.requests, GAMMA))
        made, counts = np.asarray(emission.token), np.asarray(emission.count)
        for j in range(WIDTH):
            use = (j < counts) & (filled < 3)
            tokens[use, filled[use]] = made[use, j]
            filled += use
        accepted.append(np.asarray(emission.accepted).mean())
    assert (filled == 3).all()
    return tokens, float(np.mean(accepted))


@functools.cache
def unspoilt() -> tuple[np.ndarray, float]:
    return first_three(1.0, 0, 1.0)


def p_value(tokens: np.ndarray, law: np.ndarray) -> float:
    return g_test(count(joint_index(tokens, VOCAB), VOCAB**3), law)


@pytest.mark.parametrize("settings", [(1.0, 0, 1.0), (1.4, 3, 0.95)])
def test_the_joint_law_of_three_tokens(settings):
    law = joint_law(*settings)
    assert (law > 5 / N).sum() >= 12  # enough cells to tell laws apart
    tokens, accepted = unspoilt() if settings == (1.0, 0, 1.0) else first_three(*settings)
    assert p_value(tokens, law) > P_VALUE_LIMIT
    assert 0.1 < accepted < GAMMA - 0.1  # accepted and rejected drafts both took part


# The same test refuses what is nearly right.


def test_a_verifier_told_another_temperature_is_rejected():
    spoil = lambda r: replace(r, draft_logits=r.draft_logits * 2)  # noqa: E731
    assert p_value(first_three(1.0, 0, 1.0, spoil=spoil)[0], joint_law(1.0)) < P_VALUE_LIMIT


def test_an_argmax_draft_with_a_softmax_q_is_rejected():
    def spoil(r):
        best = r.draft_logits[:, 0].argmax(-1).astype(jnp.int32)
        return replace(r, drafts=r.drafts.at[:, 0].set(best), num_drafts=jnp.ones(N, jnp.int32))

    assert p_value(first_three(1.0, 0, 1.0, spoil=spoil)[0], joint_law(1.0)) < P_VALUE_LIMIT


def test_another_law_is_rejected():
    tokens, _ = unspoilt()
    assert p_value(tokens, joint_law(1.1)) < P_VALUE_LIMIT
    # Every token with its right law, but the third independent of the others.
    mixed = np.column_stack([tokens[:, :2], np.random.default_rng(0).permutation(tokens[:, 2])])
    assert p_value(mixed, joint_law(1.0)) < P_VALUE_LIMIT
