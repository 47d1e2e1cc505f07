"""Fine-tuning against loops: sequence-level unlikelihood (Welleck et al. 2019, "Neural text generation with
unlikelihood training").

A small model that decodes greedily soon repeats itself. Every other step teaches the corpus as before; the steps
between take the model's own greedy continuations and lower the probability of each token that completed an n-gram for
the second time.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float32, Int

from dspark_jax.errors import ConfigError, raise_all
from dspark_jax.train.background import Background
from dspark_jax.train.rollout import Continuations, Prompts, PromptSource, Rollout, distinct_ngrams, join
from dspark_jax.train.target import Metrics, TargetRules, TargetStep, TrainState


def repeated_ngrams(
    tokens: Int[Array, "B T"], first: Int[Array, "B"], end: Int[Array, "B"], n: int = 4
) -> Bool[Array, "B T"]:
    """Tokens that complete an n-gram which occurred before, both of its occurrences inside [first, end).

    With `first` at the end of the prompt, copying from the prompt is no repetition; with 0 it is.
    """
    length = tokens.shape[1]
    same = tokens[:, :, None] == tokens[:, None, :]
    match = same
    for back in range(1, n):
        # match[t, s]: the n-grams that end at t and at s agree.
        match &= jnp.pad(same, ((0, 0), (back, 0), (back, 0)))[:, :length, :length]
    at = jnp.arange(length)
    inside = (at >= (first + n - 1)[:, None]) & (at < end[:, None])
    return jnp.any(match & (at[None, :, None] > at[None, None, :]) & inside[:, None, :], axis=2) & inside


def unlikelihood_loss(
    logits: Float32[Array, "... V"], token: Int[Array, "..."], mask: Bool[Array, "..."]
) -> Float32[Array, ""]:
    """Mean of `-log(1 - p(token))` in nats over the positions of `mask`; 0 where there are none.

    1 - p is the summed probability of the other tokens, so that it stays exact when p is near 1.
    """
    others = jnp.where(jnp.arange(logits.shape[-1]) == token[..., None], -jnp.inf, logits)
    cost = jax.nn.logsumexp(logits, axis=-1) - jax.nn.logsumexp(others, axis=-1)
    return jnp.sum(jnp.where(mask, cost, 0.0)) / jnp.maximum(jnp.sum(mask), 1)


@dataclass(frozen=True)
class PolishRules:
    """`weight` of the unlikelihood loss, its n-gram length, and the sequences of a step (of a pool of `Rollout.slots`).

    A pool is drawn anew when its sequences are used up, every `2 * slots / batch` steps. A pool of which at least
    `goal` of the n-grams are distinct (see `distinct_ngrams`) is left alone: good text repeats itself too, names above
    all.
    """

    weight: float = 0.3
    goal: float = 0.65
    n: int = 4
    batch: int = 64


class PolishStep:
    """(state, corpus tokens [B, T+1], step) -> (state, metrics), for `loop.train`.

    Even steps: next-token loss of the corpus with the target's other rules. Odd steps: unlikelihood on the pool. What a
    step does depends on the state at the last refresh, so a run resumes exactly from checkpoints at multiples of
    `refresh`.
    """

    def __init__(
        self,
        graph: nnx.GraphDef,
        optimizer: optax.GradientTransformation,
        rollout: Rollout,
        source: PromptSource,
        rules: PolishRules,
    ):
        faults = []
        if rules.n < 1 or rules.weight < 0:
            faults.append(f"n is {rules.n}, weight is {rules.weight}; expected n >= 1 and weight >= 0")
        if rules.batch < 1 or rollout.slots % rules.batch:
            faults.append(f"batch is {rules.batch}; expected a divisor of the rollout's {rollout.slots} slots")
        raise_all(ConfigError, "polish", faults)
        self.graph, self.optimizer, self.rollout, self.source, self.rules = graph, optimizer, rollout, source, rules
        self.corpus = TargetStep(graph, optimizer, TargetRules(dense_steps=0)).sparse
        self.unlikely = jax.jit(self._unlikely, donate_argnums=0)
        self._compiled: tuple[Background, Background] | None = None
        self._pool: tuple[Prompts, Continuations] | None = None
        self._weight = np.float32(rules.weight)
        self._metrics: Metrics = {}

    @property
    def refresh(self) -> int:
        """Steps that one pool lasts."""
        return 2 * self.rollout.slots // self.rules.batch

    def __call__(self, state: TrainState, tokens: np.ndarray, index: int) -> tuple[TrainState, Metrics]:
        corpus, unlikely = self.compile(state, tokens)
        if self._pool is None or index % self.refresh == 0:
            self._pool = self._draw(state, index // self.refresh)
            distinct = distinct_ngrams(self._pool[1], self.rules.n)
            self._weight = np.float32(self.rules.weight if distinct < self.rules.goal else 0.0)
            self._metrics["distinct"] = jnp.asarray(distinct)
        if index % 2 == 0:
            state, own = corpus(state, tokens)
        else:
            prompts, new = self._pool
            first = index % self.refresh // 2 * self.rules.batch
            part = slice(first, first + self.rules.batch)
            batch = (prompts.token[part], prompts.length[part], Continuations(new.token[part], new.count[part]))
            state, own = unlikely(state, *batch, self._weight)
        self._metrics = {**self._metrics, **own}
        return state, {"loss": jnp.zeros(()), **self._metrics}

    def _draw(self, state: TrainState, index: int) -> tuple[Prompts, Continuations]:
        """The pool: greedy continuations by the parameters of this moment."""
        slots = self.rollout.slots
        prompts = self.source.draw(slots, index)
        return prompts, self.rollout((state.params, state.fixed), prompts, np.zeros(slots), np.zeros(slots))

    def compile(self, state: TrainState, tokens: np.ndarray) -> tuple[Background, Background]:
        """Both programs. The first call begins to compile them, in the background; the first step needs them."""
        if self._compiled is None:
            rows, rollout = self.rules.batch, self.rollout
            prompt, length = jnp.zeros((rows, rollout.prompt), jnp.int32), jnp.zeros((rows,), jnp.int32)
            new = Continuations(jnp.zeros((rows, rollout.new), jnp.int32), length)
            unlikely = Background(self.unlikely, state, prompt, length, new, np.float32(0))
            self._compiled = Background(self.corpus, state, tokens), unlikely
        return self._compiled

    def _unlikely(
        self,
        state: TrainState,
        prompt: Int[Array, "B P"],
        length: Int[Array, "B"],
        new: Continuations,
        weight: Float32[Array, ""],
    ) -> tuple[TrainState, Metrics]:
        tokens = join(prompt, length, new)
        mask = repeated_ngrams(tokens, length, length + new.count, self.rules.n)

        def loss_of(params: nnx.State) -> tuple[jax.Array, jax.Array]:
            model = nnx.merge(self.graph, params, state.fixed)
            logits = model.logits(model.sequence(tokens[:, :-1]).hidden)
            loss = unlikelihood_loss(logits, tokens[:, 1:], mask[:, 1:])
            return weight * loss, loss

        (_, loss), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
        updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params)
        params: Any = optax.apply_updates(state.params, updates)
        metrics = {
            "unlikelihood": loss,
            "repeated": jnp.sum(mask) / jnp.maximum(jnp.sum(new.count), 1),
            "unlikelihood_grad_norm": optax.tree.norm(grads),
        }
        return TrainState(params, state.fixed, opt_state, state.step + 1), metrics
