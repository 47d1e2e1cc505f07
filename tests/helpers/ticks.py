"""Ticks of look-up-table models, all in one compiled program: a target of order 2, three drafts, 32 slots, four rows a slot."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.decode.round import init_state, tick
from dspark_jax.decode.sampling import SamplingParams, SamplingState
from dspark_jax.decode.state import DecodeState, Emission, WorkItem, decode_item
from dspark_jax.testing import LookupDrafter, LookupTarget

VOCAB, GAMMA, SLOTS, MAX_LEN = 12, 3, 32, 20
WIDTH = GAMMA + 1
WITHOUT_LIMIT = 99

step = jax.jit(tick, static_argnames="max_len")
item_of = jax.jit(decode_item, static_argnames="gamma")
# Shared by all tests: eager array creation would compile an operation at a time.
_start = jax.jit(lambda target, drafter: init_state(target, drafter, SLOTS, MAX_LEN))


def counting() -> LookupTarget:
    """a is followed by a + 1, nearly always."""
    table = np.full((VOCAB, VOCAB, VOCAB), -30, np.float32)
    table[:, np.arange(VOCAB), (np.arange(VOCAB) + 1) % VOCAB] = 0
    return LookupTarget(jnp.asarray(table))


def counting_drafter() -> LookupDrafter:
    table = np.broadcast_to(np.asarray(counting().table)[0], (GAMMA, VOCAB, VOCAB))
    return LookupDrafter(jnp.asarray(table), jnp.zeros((GAMMA, VOCAB), jnp.float32))


def hosted(tree) -> Any:
    return jax.tree.map(np.asarray, tree)


def start(target, drafter, params: list[SamplingParams]) -> DecodeState:
    """Idle slots that know their parameters, limits and stop tokens."""
    state = _start(target, drafter)
    params = params + [SamplingParams()] * (SLOTS - len(params))
    stop = np.full((SLOTS, state.requests.stop.shape[1]), -1, np.int32)
    for r, one in enumerate(params):
        stop[r, : len(one.stop_token_ids)] = one.stop_token_ids
    limit = np.array([one.max_tokens for one in params], np.int32)
    own: dict[str, Any] = {"max_tokens": limit, "stop": stop, "sampling": SamplingState.from_params(params)}
    return replace(state, requests=replace(state.requests, **own))


def chunk(parts: list[list[int]], begin: list[int], final: list[bool]) -> WorkItem:
    """Prompt chunks; an empty part leaves the slot out."""
    token = np.zeros((SLOTS, WIDTH), np.int32)
    count, at, last = np.zeros((3, SLOTS), np.int32)
    for r, part in enumerate(parts):
        token[r, : len(part)] = part
        count[r], at[r], last[r] = len(part), begin[r], final[r] and len(part) > 0
    fields: tuple[Any, ...] = (token, at, count, np.zeros(SLOTS, np.int32), last.astype(bool))
    return WorkItem(*fields)


def prefill(target, drafter, state, prompts: list[list[int]]) -> tuple[DecodeState, Emission]:
    return step(target, drafter, state, chunk(prompts, [0] * SLOTS, [True] * SLOTS), max_len=MAX_LEN)


def decode(target, drafter, state, ticks: int) -> tuple[DecodeState, list[Emission]]:
    """Ticks in which every active slot takes part; a request never gets a row behind its context."""
    made = []
    for _ in range(ticks):
        item = item_of(state.requests, gamma=GAMMA)
        end = np.where(item.count, item.start + item.count, 0)
        assert end.max() < MAX_LEN  # the last position's token is never processed
        state, emission = step(target, drafter, state, item, max_len=MAX_LEN)
        made.append(hosted(emission))
    return state, made


def text(emissions: list[Emission], slot: int) -> list[int]:
    return [int(t) for e in emissions for t in e.token[slot, : e.count[slot]]]
