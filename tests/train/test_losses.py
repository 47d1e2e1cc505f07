"""Losses of the target and the drafter against a few lines of numpy, and public faults by their ids (2-slot blocks)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dspark_jax.models.attention import AttentionAux
from dspark_jax.train import losses as training_losses
from dspark_jax.train.drafter import sample_anchors
from dspark_jax.train.losses import accepted_length, indexer_loss, next_token_loss
from dspark_jax.train.optimizer import matrix_axes
from helpers.micro import MICRO, micro_model

# One program a shape, instead of one for each operation.
draft_losses = jax.jit(training_losses.draft_losses, static_argnames=("decay", "weights"))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def blocks(n: int = 4, gamma: int = 3, vocab: int = 6, seed: int = 0) -> dict[str, Any]:
    """Random inputs of `draft_losses`; one block is not kept."""
    rng = np.random.default_rng(seed)
    return {
        "draft_logits": rng.normal(size=(n, gamma, vocab)).astype(np.float32),
        "target_logits": rng.normal(size=(n, gamma, vocab)).astype(np.float32),
        "confidence": rng.normal(size=(n, gamma)).astype(np.float32),
        "label": rng.integers(0, vocab, (n, gamma)).astype(np.int32),
        "keep": np.arange(n) != 1,
    }


def uniform_blocks(gamma: int, keep) -> dict[str, Any]:
    """The draft is uniform over two tokens and the target sure of the first: every slot costs the same."""
    n = len(keep)
    return {
        "draft_logits": jnp.zeros((n, gamma, 2)),
        "target_logits": jnp.broadcast_to(jnp.array([0.0, -50.0]), (n, gamma, 2)),
        "confidence": jnp.zeros((n, gamma)),
        "label": jnp.zeros((n, gamma), jnp.int32),
        "keep": jnp.asarray(keep),
    }


def test_the_three_losses_of_the_paper():
    x = blocks()
    losses = draft_losses(**x)
    kept = [0, 2, 3]
    weight = np.exp(-np.arange(3) / 4.0)
    weight /= weight.mean()
    p_d, p_t = softmax(x["draft_logits"])[kept], softmax(x["target_logits"])[kept]
    entropy = -np.log(np.take_along_axis(p_d, x["label"][kept][..., None], -1)[..., 0])
    distance = np.abs(p_d - p_t).sum(-1)
    goal, guess = 1 - distance / 2, 1 / (1 + np.exp(-x["confidence"][kept]))
    binary = -(goal * np.log(guess) + (1 - goal) * np.log(1 - guess))
    expected = [(value * weight).mean() for value in (entropy, distance, binary)]
    found = [losses.cross_entropy, losses.distance, losses.confidence]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(losses.total, np.dot([0.1, 0.9, 1.0], expected), rtol=1e-5)
    # 1 - half the L1 distance is what speculative sampling accepts: the overlap of the two distributions.
    np.testing.assert_allclose(losses.acceptance, np.minimum(p_d, p_t).sum(-1).mean(0), rtol=1e-5)
    np.testing.assert_allclose(losses.tau, (1 + np.cumprod(goal, 1).sum(1)).mean(), rtol=1e-5)
    same = p_d.argmax(-1) == p_t.argmax(-1)
    np.testing.assert_allclose(losses.greedy_tau, (1 + np.cumprod(same, 1).sum(1)).mean(), rtol=1e-5)


def test_later_positions_count_less():
    def gradient(decay: float) -> np.ndarray:
        x = uniform_blocks(4, [True])
        grad = jax.grad(lambda logits: draft_losses(**{**x, "draft_logits": logits}, decay=decay).distance)
        return np.abs(np.asarray(grad(x["draft_logits"]))).sum(axis=(0, 2))

    slots = gradient(4.0)
    np.testing.assert_allclose(slots / slots[0], np.exp(-np.arange(4) / 4.0), rtol=1e-5)
    np.testing.assert_allclose(gradient(1e9), np.full(4, gradient(1e9)[0]), rtol=1e-5)


def test_blocks_that_are_not_kept_count_nowhere():
    x = blocks()
    other = {k: np.array(v) for k, v in x.items()}
    for key in ("draft_logits", "target_logits", "confidence"):
        other[key][1] += 3.0
    first, second = draft_losses(**x), draft_losses(**other)
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)
    nothing = draft_losses(**{**x, "keep": np.zeros(4, bool)})
    assert float(nothing.total) == 0


def test_no_gradient_reaches_the_target():
    x = blocks()
    grads = jax.grad(lambda t, d: draft_losses(**{**x, "target_logits": t, "draft_logits": d}).total, argnums=(0, 1))
    target, draft = grads(jnp.asarray(x["target_logits"]), jnp.asarray(x["draft_logits"]))
    assert not np.any(target) and np.any(draft)


def test_the_confidence_learns_and_the_draft_ignores_its_goal():
    x = blocks()
    weights = (0.0, 0.0, 1.0)
    by_draft = jax.grad(lambda d: draft_losses(**{**x, "draft_logits": d}, weights=weights).total)
    by_confidence = jax.grad(lambda c: draft_losses(**{**x, "confidence": c}, weights=weights).total)
    assert not np.any(by_draft(jnp.asarray(x["draft_logits"])))
    slope = np.asarray(by_confidence(jnp.asarray(x["confidence"])))
    p_d, p_t = softmax(x["draft_logits"]), softmax(x["target_logits"])
    wrong = 1 / (1 + np.exp(-x["confidence"])) - np.minimum(p_d, p_t).sum(-1)
    np.testing.assert_array_equal(np.sign(slope[x["keep"]]), np.sign(wrong[x["keep"]]))
    assert not np.any(slope[1])


def test_b53_slot_zero_counts_and_the_mean_is_over_all_slots():
    """Slots that all cost the same give that cost as the loss, whatever is kept; slot 0 has a gradient of its own."""
    for keep in ([True, True, True], [True, True, False], [True, False, False]):
        losses = draft_losses(**uniform_blocks(2, keep))
        np.testing.assert_allclose(losses.distance, 1.0, rtol=1e-5)
        np.testing.assert_allclose(losses.cross_entropy, np.log(2), rtol=1e-5)
        np.testing.assert_allclose(losses.confidence, np.log(2), rtol=1e-5)
    x = uniform_blocks(2, [True])
    grad = jax.grad(lambda d: draft_losses(**{**x, "draft_logits": d}).distance)(x["draft_logits"])
    assert np.abs(grad[0, 0]).sum() > np.abs(grad[0, 1]).sum() > 0


def test_b54_a_perfect_two_slot_draft_has_length_three():
    x = blocks(gamma=2)
    perfect = draft_losses(**{**x, "draft_logits": x["target_logits"]})
    np.testing.assert_allclose([perfect.tau, perfect.greedy_tau], [3, 3], rtol=1e-5)
    keep = jnp.ones((1, 2), bool)
    assert float(accepted_length(jnp.array([[0.0, 1.0]]), keep)) == 1  # nothing survives behind a rejected slot
    assert float(accepted_length(jnp.array([[1.0, 0.0]]), keep)) == 2


def test_b55_blocks_stay_inside_their_document_and_sequence():
    bos, gamma, length = 0, 2, 24
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 5, (3, length)).astype(np.int32)
    tokens[0, [0, 9, 10, 17]] = bos
    tokens[2, -1] = bos
    seen, refused = set(), 0
    sample = jax.jit(sample_anchors, static_argnums=(2, 3, 4))
    for seed in range(20):
        anchors = sample(jax.random.key(seed), jnp.asarray(tokens), 8, gamma, bos)
        for row in range(3):
            for at, keep in zip(anchors.position[row].tolist(), anchors.keep[row].tolist(), strict=True):
                assert at >= 0 and at + gamma < length
                assert keep == (bos not in tokens[row, at + 1 : at + gamma + 1]), (row, at)
                seen.add(at)
                refused += not keep
    assert seen == set(range(length - gamma)) and refused > 0


def test_anchors_are_spread_over_the_sequence():
    tokens = jnp.ones((2, 101), jnp.int32)
    position = np.asarray(sample_anchors(jax.random.key(1), tokens, 20, 1, 0).position)
    assert (position // 5 == np.arange(20)).all()
    assert (position[0] != position[1]).any()


def test_b56_the_markov_tables_begin_small_and_stay_out_of_muon():
    from dspark_jax.drafters.heads import MarkovHead

    head = MarkovHead(8, 500, 40, rngs=nnx.Rngs(0))
    for table in (head.markov_w1.weight[...], head.markov_w2.weight[...]):
        assert np.std(table) == pytest.approx(0.01, rel=0.05)
    axes = nnx.to_flat_state(matrix_axes(nnx.state(micro_model().draft, nnx.Param)))
    found = {".".join(map(str, path)): value for path, value in axes}
    assert not any("markov" in name for name, value in found.items() if _axes(value) is not None)
    assert any("wq_a" in name for name, value in found.items() if _axes(value) is not None)


def _axes(leaf):
    return leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf


def test_b57_the_confidence_trains_the_backbone():
    """Its loss reaches the hidden rows and the Markov embedding: the input is not detached."""
    model = micro_model()
    graph, params = nnx.split(model.draft)
    hidden = jnp.asarray(np.random.default_rng(0).normal(size=(3, 2, MICRO.hidden_size)), jnp.float32)

    def loss(params, hidden):
        _, confidence = nnx.merge(graph, params).forced(model.target, hidden, jnp.array([[1, 2], [3, 4], [2, 2]]))
        x = blocks(3, 2, MICRO.vocab_size)
        return draft_losses(**{**x, "confidence": confidence}, weights=(0.0, 0.0, 1.0)).total

    by_params, by_hidden = jax.jit(jax.grad(loss, argnums=(0, 1)))(params, hidden)
    assert (np.abs(by_hidden[np.array([0, 2])]).max(axis=-1) > 0).all()
    flat = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(by_params)}
    (table,) = (v.get_value() for name, v in flat.items() if "markov_w1" in name)
    assert np.abs(table).max() > 0


def test_confidence_loss_stays_finite_for_huge_logits():
    """A confidence that is surely wrong costs its logit, not infinity."""
    x = blocks()
    for sign in (1, -1):
        confidence = np.full((4, 3), sign * 1e4, np.float32)
        value, grad = jax.value_and_grad(lambda c: draft_losses(**{**x, "confidence": c}).confidence)(confidence)
        assert np.isfinite(value) and value < 1e4 and np.isfinite(grad).all()


def test_next_token_loss():
    rng = np.random.default_rng(0)
    logits, label = rng.normal(size=(2, 5, 7)).astype(np.float32), rng.integers(0, 7, (2, 5))
    expected = -np.log(np.take_along_axis(softmax(logits), label[..., None], -1)).mean()
    np.testing.assert_allclose(next_token_loss(jnp.asarray(logits), jnp.asarray(label)), expected, rtol=1e-6)


def attention_aux(seed: int = 0) -> AttentionAux:
    rng = np.random.default_rng(seed)
    visible = rng.random((2, 4, 5)) < 0.6
    visible[0, 0] = False  # a query in front of the first entry
    visible[0, 1] = True
    weights = np.where(visible, rng.random((2, 4, 5)), 0)
    return AttentionAux(
        jnp.asarray(rng.normal(size=(2, 4, 5)), jnp.float32), jnp.asarray(weights, jnp.float32), jnp.asarray(visible)
    )


def test_indexer_loss_is_the_divergence_over_visible_entries():
    aux = attention_aux()
    total, rows = 0.0, 0
    for scores, weights, visible in zip(*(np.asarray(x).reshape(-1, 5) for x in aux), strict=True):
        if visible.any():
            p, q = weights[visible] / weights[visible].sum(), softmax(scores[visible])
            total, rows = total + np.sum(p * np.log(p / q)), rows + 1
    np.testing.assert_allclose(indexer_loss(aux), total / rows, rtol=1e-4)


def test_indexer_loss_vanishes_at_the_attention_and_teaches_only_visible_scores():
    aux = attention_aux()
    perfect = aux._replace(scores=jnp.log(aux.weights + 1e-20) + 7.0)
    assert abs(float(indexer_loss(perfect))) < 1e-5
    grad = np.asarray(jax.grad(lambda s: indexer_loss(aux._replace(scores=s)))(aux.scores))
    assert np.isfinite(grad).all() and not np.any(grad[~np.asarray(aux.visible)]) and np.any(grad)
