"""Fine-tuning against loops: which tokens are penalised, the loss and its gradient, and what a step does."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from dspark_jax.errors import ConfigError
from dspark_jax.train.data import TokenStream
from dspark_jax.train.loop import train
from dspark_jax.train.rollout import Continuations, Prompts, PromptSource, Rollout, join
from dspark_jax.train.target import init_target
from dspark_jax.train.unlikelihood import PolishRules, PolishStep, repeated_ngrams, unlikelihood_loss
from helpers.micro import micro_model

STREAM = np.concatenate([[0, *np.random.default_rng(i).integers(2, 5, 20), 1] for i in range(20)]).astype(np.int32)
SLOTS, BATCH, PROMPT, NEW = 8, 4, 4, 20


def brute(tokens: np.ndarray, first: int, end: int, n: int) -> list[bool]:
    grams = [tuple(tokens[t - n + 1 : t + 1]) if first + n - 1 <= t < end else None for t in range(len(tokens))]
    return [gram is not None and gram in grams[:t] for t, gram in enumerate(grams)]


@pytest.mark.parametrize("n", [1, 2, 4])
def test_repeats_are_those_of_a_plain_search(n):
    rng = np.random.default_rng(n)
    tokens = rng.integers(0, 2 if n == 4 else 3, (12, 24))
    first, end = rng.integers(0, 10, 12), rng.integers(8, 25, 12)
    found = np.asarray(jax.jit(repeated_ngrams, static_argnums=3)(tokens, first, end, n))
    expected = [brute(t.tolist(), f, e, n) for t, f, e in zip(tokens, first, end, strict=True)]
    np.testing.assert_array_equal(found, expected)
    assert 0.02 < found.mean() < 0.95


def test_a_loop_is_penalised_from_its_second_turn_on():
    text = np.array([[0, 9, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3]])
    mask = np.asarray(repeated_ngrams(jnp.asarray(text), jnp.array([2]), jnp.array([13]), 4))[0]
    assert np.flatnonzero(mask).tolist() == [9, 10, 11, 12]  # 1 2 3 4 first stands at 2..5


def test_copies_from_the_prompt_and_padding_are_no_repeats():
    text = jnp.asarray([[5, 6, 7, 8, 5, 6, 7, 8, 0, 0, 0, 0, 0, 0, 0]])
    assert not np.any(repeated_ngrams(text, jnp.array([4]), jnp.array([8]), 4))
    assert np.flatnonzero(repeated_ngrams(text, jnp.array([0]), jnp.array([8]), 4)[0]).tolist() == [7]


def test_loss_is_the_mean_of_minus_log_of_the_rest():
    rng = np.random.default_rng(0)
    logits, token = rng.normal(size=(2, 5, 6)).astype(np.float32), rng.integers(0, 6, (2, 5))
    mask = rng.random((2, 5)) < 0.5
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    cost = -np.log(1 - np.take_along_axis(p, token[..., None], -1)[..., 0])
    found = unlikelihood_loss(jnp.asarray(logits), jnp.asarray(token), jnp.asarray(mask))
    np.testing.assert_allclose(found, cost[mask].mean(), rtol=1e-5)
    assert float(unlikelihood_loss(jnp.asarray(logits), jnp.asarray(token), jnp.zeros((2, 5), bool))) == 0


def test_gradient_lowers_the_token_and_raises_the_others():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(1, 3, 6)), jnp.float32)
    token, mask = jnp.array([[2, 4, 1]]), jnp.array([[True, False, True]])
    grad = np.asarray(jax.grad(lambda x: unlikelihood_loss(x, token, mask))(logits))[0]
    assert not grad[1].any()
    for row, t in ((0, 2), (2, 1)):
        assert grad[row, t] > 0 and (np.delete(grad[row], t) < 0).all()
        assert abs(grad[row].sum()) < 1e-6


def test_loss_and_gradient_are_exact_where_the_model_is_sure():
    """1 - p is 4e-18 here: computed as a difference it would be 0, and the loss infinite."""
    logits = jnp.array([40.0, 0.0, -1.0])
    value, grad = jax.value_and_grad(lambda x: unlikelihood_loss(x, jnp.array(0), jnp.array(True)))(logits)
    np.testing.assert_allclose(value, 40 - np.log(1 + np.exp(-1)), rtol=1e-6)
    np.testing.assert_allclose(grad, [1, -1 / (1 + np.exp(-1)), -np.exp(-1) / (1 + np.exp(-1))], rtol=1e-5)


OPTIMIZER = optax.adam(3e-3)


@functools.cache
def programs() -> PolishStep:
    """The tiny target's rollout, and both steps compiled: `polish` copies share them."""
    graph, state = init_target(micro_model(seed=1).target, OPTIMIZER)
    rollout = Rollout(graph, SLOTS, PROMPT, NEW, 99)  # no end of text: every continuation is whole
    step = PolishStep(graph, OPTIMIZER, rollout, PromptSource(STREAM, 3, PROMPT, 0, seed=0), PolishRules(n=3, batch=BATCH))
    step.compile(state, BATCHES.at(0))
    return step


def polish(**rules: Any):
    """(step, a fresh state) of the tiny target."""
    shared = programs()
    step = PolishStep(
        shared.graph, OPTIMIZER, shared.rollout, shared.source, PolishRules(**{"batch": BATCH, "n": 3, **rules})
    )
    step._compiled = shared._compiled
    return step, init_target(micro_model(seed=1).target, OPTIMIZER)[1]


BATCHES = TokenStream(STREAM, 12, 2, seed=3)


def repeat_chance(step: PolishStep, state, prompts: Prompts, new: Continuations) -> float:
    """Mean probability of the tokens that completed a repeated n-gram."""
    tokens = join(prompts.token, prompts.length, new)
    mask = repeated_ngrams(tokens, jnp.asarray(prompts.length), prompts.length + new.count, step.rules.n)

    @jax.jit
    def chance(params, fixed, tokens, mask):
        model = nnx.merge(step.graph, params, fixed)
        p = jax.nn.softmax(model.logits(model.sequence(tokens[:, :-1]).hidden), axis=-1)
        chosen = jnp.take_along_axis(p, tokens[:, 1:, None], axis=-1)[..., 0]
        return jnp.sum(chosen * mask[:, 1:]) / jnp.sum(mask)

    return float(chance(state.params, state.fixed, tokens, mask))


@pytest.fixture(scope="module")
def looping() -> dict[str, Any]:
    """Twelve steps on a target that loops, with what they saw; the pool of the first four is kept."""
    step, state = polish(goal=1.0, weight=1.0)
    draws, chances = [], []
    original = step._draw
    step._draw = lambda state, index: draws.append(original(state, index)) or draws[-1]
    metrics = []
    for index in range(12):
        state, values = step(state, BATCHES.at(index), index)
        metrics.append(jax.device_get(values))
        if index in (0, 3):
            chances.append(repeat_chance(step, state, *draws[0]))
    return {"draws": draws, "chances": chances, "metrics": metrics, "state": state, "step": step}


@pytest.mark.long
def test_a_looping_model_is_found_and_its_repeats_become_less_likely(looping):
    assert looping["metrics"][1]["distinct"] < 0.6 and looping["metrics"][1]["repeated"] > 0.2
    before, after = looping["chances"]  # behind the first corpus step, and behind two steps against the loops
    assert after < before - 0.005


@pytest.mark.long
def test_a_pool_lasts_until_its_sequences_are_used_up(looping):
    assert looping["step"].refresh == 2 * SLOTS // BATCH == 4
    assert len(looping["draws"]) == 3
    first, second = (draw[0].token for draw in looping["draws"][:2])
    assert (first != second).any()


@pytest.mark.long
def test_even_steps_teach_the_corpus_and_odd_ones_unlearn(looping):
    losses = [float(m["loss"]) for m in looping["metrics"]]
    assert all(losses[i] == losses[i + 1] for i in range(0, 12, 2)) and len(set(losses)) == 6
    against = [float(m.get("unlikelihood", -1)) for m in looping["metrics"]]
    assert against[0] == -1 and all(against[i] == against[i + 1] for i in range(1, 11, 2)) and len(set(against)) == 7
    assert int(looping["state"].step) == 12


@pytest.mark.long
def test_each_part_of_the_pool_is_used_once():
    step, state = polish(goal=1.0, weight=0.5)
    seen = []
    state, _ = step(state, BATCHES.at(0), 0)
    corpus, _ = step.compile(state, BATCHES.at(0))

    def spy(state, prompt, length, new, weight):
        seen.append((prompt, float(weight)))
        return state, {}

    step._compiled = (corpus, spy)
    for index in (1, 2, 3):
        state, _ = step(state, BATCHES.at(index), index)
    assert [w for _, w in seen] == [0.5, 0.5]
    np.testing.assert_array_equal(np.concatenate([p for p, _ in seen]), step._pool[0].token)


@pytest.mark.long
def test_text_that_is_varied_enough_is_left_alone():
    """At the goal the loss weighs nothing, so its step has no gradient."""
    norms = []
    for goal in (0.0, 1.0):
        step, state = polish(goal=goal, weight=0.5)
        state, _ = step(state, BATCHES.at(0), 0)
        _, metrics = step(state, BATCHES.at(1), 1)
        assert float(metrics["unlikelihood"]) > 0
        norms.append(float(metrics["unlikelihood_grad_norm"]))
    assert norms[0] == 0 < norms[1]


@pytest.mark.long
def test_polishing_resumes_to_the_same_parameters(tmp_path: Path):
    step, state = polish(goal=1.0)
    whole = train(step, state, BATCHES, 8, folder=tmp_path / "whole", save_every=4)
    parts = {"folder": tmp_path / "parts", "save_every": 4}
    assert int(train(*polish(goal=1.0), BATCHES, 8, stop=lambda: True, **parts).step) == 4
    resumed = train(*polish(goal=1.0), BATCHES, 8, **parts)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(resumed), strict=True):
        np.testing.assert_array_equal(a, b)


def test_impossible_rules():
    graph, _ = init_target(micro_model(seed=1).target, OPTIMIZER)
    parts = graph, OPTIMIZER, Rollout(graph, SLOTS, PROMPT, NEW, 99), PromptSource(STREAM, 3, PROMPT, 0, seed=0)
    with pytest.raises(ConfigError, match=r"2 faults\n.*n is 0, weight is 0.3.*\n.*divisor of the rollout's 8 slots"):
        PolishStep(*parts, PolishRules(n=0, batch=3))
