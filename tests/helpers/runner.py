"""A model in pieces: jitted steps over rows, with the caches in the test's hands. One compilation a shape of rows."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dspark_jax.decode.rows import Rows, padded_rows
from dspark_jax.decode.sampling import SamplingParams, SamplingState
from dspark_jax.models.cache import ring_history
from dspark_jax.models.speculative import SpeculativeLM
from helpers.goldens import Golden, load_golden

GOLDENS = Path(__file__).resolve().parents[1] / "data" / "v4_tiny_goldens.npz"


class Caches(NamedTuple):
    """Target state and drafter state."""

    target: Any
    draft: Any


class Drafted(NamedTuple):
    """A proposal beside the raw numbers behind it: logits of the parallel pass, and with the sequential head's bias."""

    tokens: np.ndarray  # [R, gamma]
    confidence: np.ndarray  # [R, gamma]
    processed: np.ndarray  # [R, gamma, V]
    base: np.ndarray  # [R, gamma, V]
    forced: np.ndarray  # [R, gamma, V]
    forced_confidence: np.ndarray  # [R, gamma]


class Runner:
    """Steps of one model over `slots` request slots of up to `max_len` positions."""

    def __init__(self, model: SpeculativeLM, slots: int, max_len: int):
        self.graph, self.params = nnx.split(model)
        self.config, self.draft_config = model.target.config, model.draft.draft if model.draft else None
        self.slots, self.max_len = slots, max_len
        self.gamma = self.draft_config.block_size if self.draft_config else 0
        self._step = jax.jit(self._step_pure)
        self._draft = jax.jit(self._draft_pure)
        self._sequence = jax.jit(self._sequence_pure)
        self._caches = jax.jit(self._caches_pure, static_argnums=1)

    def model(self, params: Any) -> SpeculativeLM:
        return nnx.merge(self.graph, params)

    def caches(self, block: int | None = None) -> Caches:
        """Empty state; `block` is the most rows that may be rejected together (gamma + 1)."""
        return self._caches(self.params, block or self.gamma + 1)

    def _caches_pure(self, params, block: int) -> Caches:
        model = self.model(params)
        target = model.target.init_cache(self.slots, self.max_len, block)
        return Caches(target, model.drafter.init_cache(self.slots, self.max_len) if model.drafter else ())

    def _step_pure(self, params, rows: Rows, keep, caches: Caches):
        model = self.model(params)
        hidden, context, target = model.target.forward(rows, caches.target)
        draft = caches.draft
        if model.drafter:
            draft = model.drafter.write_context(context, rows, keep & rows.valid, draft)
        return model.target.logits(hidden), context, Caches(target, draft)

    def step(self, rows: Rows, caches: Caches, keep: Any = None) -> tuple[jax.Array, jax.Array, Caches]:
        """Logits [B, V], taps [B, m d] and the new caches; rows outside `keep` [B] give no draft context."""
        keep = jnp.ones(rows.token.shape, bool) if keep is None else jnp.asarray(keep)
        return self._step(self.params, rows, keep, caches)

    def feed(self, tokens: Sequence[Sequence[int]], start: Sequence[int], width: int, caches: Caches):
        """A step over padded rows: `tokens[r]` (at most `width`) of slot r from position `start[r]`. Lanes [R, width]."""
        logits, context, caches = self.step(padded(tokens, start, width), caches)
        lanes = (np.asarray(x).reshape(self.slots, width, -1) for x in (logits, context))
        return *lanes, caches

    def _draft_pure(self, params, anchor, position, active, sampling, cache):
        model = self.model(params)
        drafter, stages = model.drafter, model.draft
        proposal = drafter.propose(anchor, position, active, sampling, cache)
        window = self.config.sliding_window
        history = [ring_history(ring, position, window) for ring in cache]
        visible = (position[:, None] - window + jnp.arange(window)) >= 0
        hidden, _ = stages.block(model.target, anchor, position, active, history, visible)
        previous = jnp.concatenate([anchor[:, None], proposal.tokens[:, :-1]], axis=1)
        forced, confidence = stages.forced(model.target, hidden, previous)
        base = stages.base_logits(model.target, hidden)
        processed = proposal.logits.astype(jnp.float32)
        return Drafted(proposal.tokens, proposal.confidence, processed, base, forced, confidence)

    def draft(self, anchor, position, caches: Caches, *, active=None, sampling: SamplingState | None = None) -> Drafted:
        """A block of drafts a slot behind `anchor` [R], which stands at `position` [R]; greedy unless told otherwise."""
        active = np.ones(self.slots, bool) if active is None else active
        sampling = sampling or SamplingState.from_params([SamplingParams()] * self.slots)
        arrays = (jnp.asarray(anchor, jnp.int32), jnp.asarray(position, jnp.int32), jnp.asarray(active))
        return Drafted(*map(np.asarray, self._draft(self.params, *arrays, sampling, caches.draft)))

    def _sequence_pure(self, params, token):
        target = self.model(params).target
        out = target.sequence(token)
        return target.logits(out.hidden), out.taps

    def sequence(self, token) -> tuple[np.ndarray, np.ndarray]:
        """Logits [R, T, V] and taps [R, T, m d] of whole sequences."""
        logits, taps = self._sequence(self.params, jnp.asarray(token, jnp.int32))
        return np.asarray(logits), np.asarray(taps)


def padded(tokens: Sequence[Sequence[int]], start: Sequence[int], width: int) -> Rows:
    """Padded rows; an empty list is an idle slot."""
    table = np.zeros((len(tokens), width), np.int32)
    for r, part in enumerate(tokens):
        table[r, : len(part)] = part
    count = np.array([len(part) for part in tokens], np.int32)
    return padded_rows(jnp.asarray(table), jnp.asarray(start, jnp.int32), jnp.asarray(count))


def packed(tokens: Sequence[Sequence[int]], start: Sequence[int], width: int, total: int) -> Rows:
    """The same rows without the gaps, filled up with invalid rows to `total`."""
    count = [len(part) for part in tokens]
    fill = total - sum(count)
    assert fill >= 0 and max(count) <= width
    slot = [r for r, n in enumerate(count) for _ in range(n)]
    position = [start[r] + i for r, n in enumerate(count) for i in range(n)]
    ints = lambda values: jnp.asarray(values, jnp.int32)  # noqa: E731
    return Rows(
        token=ints([t for part in tokens for t in part] + [0] * fill),
        slot=ints(slot + [0] * fill),
        position=ints(position + [0] * fill),
        valid=jnp.asarray([True] * len(slot) + [False] * fill),
        start=ints(start),
        count=ints(count),
        width=width,
    )


def scaled_error(value: Any, expected: Any) -> float:
    """Largest difference as a fraction of the largest expected magnitude."""
    value, expected = np.asarray(value, np.float64), np.asarray(expected, np.float64)
    assert value.shape == expected.shape, (value.shape, expected.shape)
    assert np.isfinite(value).all()
    return float(np.abs(value - expected).max() / np.abs(expected).max())


SLOTS, MAX_LEN = 6, 96


@functools.cache
def golden() -> Golden:
    """The committed goldens of the tiny model."""
    return load_golden(GOLDENS)


@functools.cache
def golden_runner() -> Runner:
    """The tiny golden model over six slots, shared by all tests of a process: a shape of rows compiles once."""
    return Runner(golden().model(), SLOTS, MAX_LEN)
