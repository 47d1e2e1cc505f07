"""Packed anchors: every block sees what it would see while decoding, and training moves the stages alone."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from dspark_jax.train.balance import biases
from dspark_jax.train.drafter import Anchors, draft_objective, drafter_step, init_drafter, packed_blocks
from helpers.micro import MICRO, micro_model
from helpers.runner import Runner, scaled_error

LENGTH, GAMMA = 14, 3
TOKENS = np.random.default_rng(1).integers(0, MICRO.vocab_size, (2, LENGTH + 1)).astype(np.int32)
# Every place of a block: no context at all, a partial window, a full one, the last that fits.
POSITIONS = np.arange(LENGTH - GAMMA + 1)


@pytest.fixture(scope="module", params=["markov", pytest.param("rnn", marks=pytest.mark.long)])
def model(request):
    return micro_model(request.param, gamma=GAMMA, stages=2)


@pytest.fixture(scope="module")
def packed(model):
    """(tokens, taps, positions) -> forced logits, confidence, base logits of all anchors [2, A, gamma, ...]."""
    graph, params = nnx.split(model)

    @jax.jit
    def run(params, tokens, taps, position):
        lm = nnx.merge(graph, params)
        anchors = Anchors(position, jnp.ones(position.shape, bool))
        logits, confidence, hidden, _ = packed_blocks(lm.target, lm.draft, tokens, taps, anchors)
        base = lm.draft.base_logits(lm.target, hidden)
        return tuple(x.reshape(*position.shape, *x.shape[1:]) for x in (logits, confidence, base))

    return lambda *arrays: tuple(np.asarray(x) for x in run(params, *arrays))


@pytest.fixture(scope="module")
def taps(model) -> np.ndarray:
    graph, params = nnx.split(model.target)
    return np.asarray(jax.jit(lambda p, t: nnx.merge(graph, p).sequence(t).taps)(params, TOKENS[:, :-1]))


def test_packed_blocks_equal_the_decoding_drafter(model, packed, taps):
    """Each anchor against its own prefix: fed as a prompt, then drafted by the code that serves requests."""
    positions = np.stack([POSITIONS, POSITIONS])
    logits, confidence, base = packed(TOKENS, taps, positions)
    slots = positions.size
    runner = Runner(model, slots, 32)
    prefix = [TOKENS[row, :at].tolist() for row in range(2) for at in POSITIONS]
    _, _, caches = runner.feed(prefix, [0] * slots, LENGTH, runner.caches())
    anchor = [TOKENS[row, at] for row in range(2) for at in POSITIONS]
    drafted = runner.draft(anchor, positions.reshape(-1), caches)
    assert scaled_error(base.reshape(slots, GAMMA, -1), drafted.base) < 1e-4
    # Behind the anchor both heads have read the same; further on where the drafts are the text.
    behind = np.stack([TOKENS[row, at + 1 : at + GAMMA] for row in range(2) for at in POSITIONS])
    same = np.cumprod(np.c_[np.ones(slots, bool), drafted.tokens[:, : GAMMA - 1] == behind], axis=1).astype(bool)
    assert same[:, 0].all() and 0 < same[:, 1:].sum() < same[:, 1:].size
    forced, sure = logits.reshape(slots, GAMMA, -1), confidence.reshape(slots, GAMMA)
    np.testing.assert_allclose(forced[same], drafted.forced[same], atol=1e-4 * np.abs(drafted.forced).max())
    np.testing.assert_allclose(sure[same], drafted.confidence[same], atol=1e-4 * np.abs(drafted.confidence).max())


def test_a_block_sees_the_window_in_front_of_its_anchor_and_nothing_else(packed, taps):
    """A nudge at one place of the context reaches exactly the blocks whose anchors lie 1 to `window` behind it."""
    positions = np.stack([POSITIONS, POSITIONS])
    _, _, plain = packed(TOKENS, taps, positions)
    for at in range(LENGTH):
        nudged = taps.copy()
        nudged[0, at] += 1.0
        _, _, other = packed(TOKENS, nudged, positions)
        moved = np.abs(other - plain).max(axis=(2, 3)) > 1e-4
        assert not moved[1].any()  # the other sequence
        np.testing.assert_array_equal(moved[0], np.isin(POSITIONS - at, range(1, MICRO.sliding_window + 1)))


def test_the_text_behind_an_anchor_reaches_only_the_sequential_head(packed, taps):
    """Rows of the parallel pass are noise; row k's bias follows token k - 1 and not token k."""
    at = 5
    position = np.full((2, len(POSITIONS)), at)  # as many as elsewhere, so that the program is there
    logits, _, base = packed(TOKENS, taps, position)
    for k in range(GAMMA + 1):
        other = TOKENS.copy()
        other[0, at + k] = (other[0, at + k] + 1) % MICRO.vocab_size
        changed, _, same = packed(other, taps, position)
        moved = (changed != logits).any(axis=(1, 3))
        assert not moved[1].any()
        if k == 0:
            assert moved[0].all() and np.abs(same - base).max() > 1e-4  # the anchor itself is read
        else:
            np.testing.assert_array_equal(same, base)
            assert moved[0, k:].any() == (k < GAMMA) and not moved[0, :k].any()


def test_b52_the_head_follows_the_block_s_own_tokens():
    """Slot 0 follows the anchor, slot k the token k places behind it: not the one before, not the label."""
    model = micro_model(gamma=2)
    graph, params = nnx.split(model)
    position = jnp.asarray([[4, 8], [2, 11]])

    @jax.jit
    def biases_of(params, tokens):
        lm = nnx.merge(graph, params)
        taps = lm.target.sequence(tokens[:, :-1]).taps
        anchors = Anchors(position, jnp.ones((2, 2), bool))
        logits, _, hidden, _ = packed_blocks(lm.target, lm.draft, tokens, taps, anchors)
        return logits - lm.draft.base_logits(lm.target, hidden)

    found = np.asarray(biases_of(params, TOKENS))
    head = model.draft.mtp[-1].markov_head
    table = np.asarray(head.markov_w1.weight[...]) @ np.asarray(head.markov_w2.weight[...])
    expected = [[table[TOKENS[row, at + k]] for k in range(2)] for row in range(2) for at in np.asarray(position)[row]]
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(table).max())


@pytest.mark.long
def test_the_objective_compares_with_the_target_at_the_same_places():
    """p_t of slot k is the target's distribution behind token p + k, and the label the token it predicts."""
    model = micro_model(gamma=2)
    graph, params = nnx.split(model)
    position, keep = np.array([[4, 8], [2, 11]]), np.array([[True, True], [False, True]])

    @jax.jit
    def run(params, tokens):
        lm = nnx.merge(graph, params)
        losses, _ = draft_objective(lm.target, lm.draft, tokens, Anchors(jnp.asarray(position), jnp.asarray(keep)))
        out = lm.target.sequence(tokens[:, :-1])
        anchors = Anchors(jnp.asarray(position), jnp.asarray(keep))
        logits = packed_blocks(lm.target, lm.draft, tokens, out.taps, anchors)[0]
        return losses, lm.target.logits(out.hidden), logits

    losses, truth, logits = (jax.tree.map(np.asarray, x) for x in run(params, TOKENS))
    draft = jax.nn.softmax(logits, axis=-1)
    target = np.stack([jax.nn.softmax(truth[r, p : p + 2], axis=-1) for r in range(2) for p in position[r]])
    label = np.stack([TOKENS[r, p + 1 : p + 3] for r in range(2) for p in position[r]])
    kept = keep.reshape(-1)
    weight = np.exp(-np.arange(2) / 4.0)
    weight /= weight.mean()
    distance = np.abs(draft - target).sum(-1)[kept]
    entropy = -np.log(np.take_along_axis(np.asarray(draft), label[..., None], -1)[kept, :, 0])
    np.testing.assert_allclose(losses.distance, (distance * weight).mean(), rtol=1e-4)
    np.testing.assert_allclose(losses.cross_entropy, (entropy * weight).mean(), rtol=1e-4)


@pytest.fixture(scope="module")
def trained() -> dict[str, Any]:
    """Sixty steps on one batch."""
    model = micro_model(gamma=2, stages=2)
    optimizer = optax.adam(3e-3)
    target_graph, frozen = nnx.split(model.target)
    graph, state = init_drafter(model.draft, optimizer)
    step = drafter_step(target_graph, graph, optimizer, anchors=6, bos=0, seed=0, bias_rate=0.01)
    before = jax.tree.map(np.array, (state.params, state.fixed, frozen))
    metrics = []
    tokens = np.random.default_rng(0).integers(1, MICRO.vocab_size, (2, LENGTH + 1)).astype(np.int32)
    for _ in range(60):
        state, values = step(state, frozen, tokens)
        metrics.append(jax.device_get(values))
    return {"before": before, "state": state, "frozen": frozen, "metrics": metrics, "graph": graph}


@pytest.mark.long
def test_training_lowers_the_loss_and_raises_the_length(trained):
    loss, tau = ([float(m[name]) for m in trained["metrics"]] for name in ("loss", "tau"))
    assert np.mean(loss[-5:]) < 0.8 * np.mean(loss[:5])
    assert np.mean(tau[-5:]) > np.mean(tau[:5]) + 0.1


@pytest.mark.long
def test_the_target_is_frozen(trained):
    """Its arrays are neither changed nor donated, and the state holds none of them."""
    for old, new in zip(jax.tree.leaves(trained["before"][2]), jax.tree.leaves(trained["frozen"]), strict=True):
        np.testing.assert_array_equal(old, new)
    names = {path[0] for path, _ in nnx.to_flat_state(trained["state"].params)}
    assert names == {"mtp"}


@pytest.mark.long
def test_every_trainable_part_of_the_stages_moves(trained):
    old, new = (dict(nnx.to_flat_state(x)) for x in (trained["before"][0], trained["state"].params))
    still = [".".join(map(str, p)) for p in old if np.array_equal(old[p].get_value(), new[p].get_value())]
    assert not still


def test_router_biases_of_the_stages_follow_the_rule(trained):
    old, new = biases(trained["before"][1]), biases(trained["state"].fixed)
    assert len(old) == len(new) == 2
    for a, b in zip(old, new, strict=True):
        steps = np.asarray(b - a) / 0.01
        np.testing.assert_allclose(steps, np.round(steps), atol=1e-2)
        assert np.abs(steps).max() >= 1
    assert int(trained["state"].step) == 60
