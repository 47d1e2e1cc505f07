"""The look-up-table models by themselves and through the real decoding round."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.decode.round import init_state, tick
from dspark_jax.decode.rows import padded_rows
from dspark_jax.decode.sampling import SamplingParams, SamplingState
from dspark_jax.decode.state import WorkItem, decode_item
from dspark_jax.testing import LookupDrafter, LookupTarget
from helpers.sampling_reference import reference_law, softmax
from helpers.speculation import state
from helpers.statistics import P_VALUE_LIMIT, joint_index, markov_joint, matches

VOCAB = 4
TARGET = LookupTarget.random(VOCAB, seed=3)


# Jitted: eager code would compile an operation at a time.
_rows = jax.jit(padded_rows)
_forward = jax.jit(lambda target, rows, cache: target.forward(rows, cache))


def rows(tokens, start, count):
    return _rows(*(np.array(x, np.int32) for x in (tokens, start, count)))


def test_forward_looks_up_the_table():
    item = rows([[1, 3], [2, 0]], [0, 5], [2, 1])
    hidden, context, _ = _forward(TARGET, item, TARGET.init_cache(2, 8, 2))
    np.testing.assert_array_equal(TARGET.logits(hidden)[:3], TARGET.table[jnp.array([1, 3, 2])])
    np.testing.assert_array_equal(context[:3].argmax(-1), [1, 3, 2])
    assert not np.asarray(hidden[3]).any() and not np.asarray(context[3]).any()  # padding
    np.testing.assert_allclose(TARGET.law([0, 1, 3]), softmax(TARGET.table[3]))


def test_b37_order_two_reads_its_cache_and_forgets_rejected_rows():
    target = LookupTarget.random(VOCAB, order=2)
    cache = target.init_cache(1, 8, 3)
    _, _, cache = _forward(target, rows([[1, 2, 3]], [0], [3]), cache)  # 2 and 3 are drafts that fail
    hidden, _, cache = _forward(target, rows([[0, 1, 1]], [1], [2]), cache)
    np.testing.assert_array_equal(hidden[0], target.table[1, 0])
    np.testing.assert_array_equal(hidden[1], target.table[0, 1])
    np.testing.assert_allclose(target.law([1, 0]), softmax(hidden[0]))
    np.testing.assert_allclose(target.law([2]), softmax(target.table[0, 2]))
    # A hole in front of a row is an error that shows.
    hidden, _, _ = _forward(target, rows([[1, 0, 0]], [6], [1]), cache)
    assert np.isnan(hidden[0]).all()


def test_proposal_follows_the_tables():
    drafter = LookupDrafter.random(VOCAB, 2)
    n = 200_000
    anchor = jnp.full(n, 2, jnp.int32)
    position = jnp.full(n, 6, jnp.int32)
    run = jax.jit(lambda a, p, s: drafter.propose(a, p, a > 0, s, drafter.init_cache(n, 8)))
    proposal = run(anchor, position, state(n))
    first, second = np.asarray(proposal.tokens).T
    assert matches(first, softmax(drafter.table[0, 2]))
    for token in range(VOCAB):
        assert matches(second[first == token][:20_000], softmax(drafter.table[1, token])).p_value > 1e-4
    assert proposal.logits.dtype == jnp.bfloat16
    np.testing.assert_array_equal(proposal.logits[:, 1], drafter.table[1, first])
    greedy = run(anchor, position, state(n, temperature=0.0))
    best = np.asarray(drafter.table).argmax(-1)
    np.testing.assert_array_equal(greedy.tokens, np.broadcast_to([best[0, 2], best[1, best[0, 2]]], (n, 2)))


def test_confidence_sees_the_token_before_and_not_the_token_itself():
    drafter = LookupDrafter.random(VOCAB, 2).replace(confidence_table=jnp.arange(8.0).reshape(2, VOCAB))
    n = 50
    inputs = np.full(n, 3, np.int32), np.zeros(n, np.int32), np.ones(n, bool), state(n), None
    proposal = jax.jit(drafter.propose)(*inputs)
    np.testing.assert_array_equal(proposal.confidence[:, 0], 3.0)
    np.testing.assert_array_equal(proposal.confidence[:, 1], 4.0 + proposal.tokens[:, 0])


@pytest.mark.parametrize("rates", [(0.9, 0.7, 0.5), (1.0, 0.3), (0.999,)])
def test_acceptance_curve_hits_its_rates(rates):
    drafter = LookupDrafter.acceptance_curve(TARGET, rates)
    assert drafter.block_size == len(rates)
    exact = np.minimum(softmax(TARGET.table), softmax(drafter.table)).sum(-1)
    np.testing.assert_allclose(exact, np.broadcast_to(np.array(rates)[:, None], exact.shape), atol=1e-3)
    np.testing.assert_allclose(exact, drafter.conditional_acceptance(TARGET))
    for j in np.flatnonzero(np.array(rates) == 1):
        np.testing.assert_array_equal(drafter.table[j], TARGET.table)
    # float32 keeps a confidence near 1 to about 1e-7
    np.testing.assert_allclose(1 / (1 + np.exp(-np.asarray(drafter.confidence_table))), exact, atol=1e-6)


def test_acceptance_curve_refuses_what_no_drafter_can_do():
    for rates in ((0.5, 1.1), (0.5, 0.0), ()):
        with pytest.raises(ValueError, match="rates = "):
            LookupDrafter.acceptance_curve(TARGET, rates)
    with pytest.raises(ValueError, match="order 2"):
        LookupDrafter.acceptance_curve(LookupTarget.random(VOCAB, order=2), (0.5,))


def test_context_remembers_the_committed_rows_only():
    drafter = LookupDrafter.random(VOCAB, 2)
    item = rows([[1, 2, 3], [3, 0, 0], [1, 1, 1]], [4, 0, 2], [3, 1, 0])
    _, context, _ = _forward(TARGET, item, TARGET.init_cache(3, 8, 3))
    keep = jnp.array([[True, True, False], [True, True, True], [True, True, True]]).reshape(-1)
    cache = jax.jit(drafter.write_context)(context, item, keep, drafter.init_cache(3, 8))
    assert cache.length.tolist() == [6, 1, 0] and cache.token.tolist() == [2, 3, 0]


# Through the round.

MAX_LEN = 16


_tick = jax.jit(tick, static_argnames="max_len")
_item = jax.jit(decode_item, static_argnames="gamma")


def _generate(target, drafter, prompt, sampling, count, max_len=MAX_LEN):
    """The last state, and the emissions of every step from the prompt's last chunk on. `prompt` [R, n].

    Its chunks are as wide as a block, so that prompt and rounds are one compiled program.
    """
    prompt = np.asarray(prompt, np.int32)
    slots, length = prompt.shape
    gamma = drafter.block_size if drafter else 0
    after = init_state(target, drafter, slots, max_len)
    own = {"sampling": sampling, "max_tokens": np.full(slots, max_len, np.int32)}
    after = replace(after, requests=replace(after.requests, **own))
    for start in range(0, length, gamma + 1):
        part = prompt[:, start : start + gamma + 1]
        token = np.pad(part, ((0, 0), (0, gamma + 1 - part.shape[1])))
        begin, taken = np.full(slots, start, np.int32), np.full(slots, part.shape[1], np.int32)
        final = np.full(slots, start + gamma + 1 >= length)
        item = WorkItem(*map(jnp.asarray, (token, begin, taken, 0 * begin, final)))
        after, emission = _tick(target, drafter, after, item, max_len=max_len)
    every = [emission]
    for _ in range(count):
        after, emission = _tick(target, drafter, after, _item(after.requests, gamma=gamma), max_len=max_len)
        every.append(emission)
    return after, jax.tree.map(lambda *x: np.stack(x), *every)


def texts(every) -> list[list[int]]:
    tokens, counts = np.asarray(every.token), np.asarray(every.count)
    return [
        [int(t) for step in range(len(tokens)) for t in tokens[step, r, : counts[step, r]]]
        for r in range(tokens.shape[1])
    ]


@pytest.mark.parametrize("order", [pytest.param(1, marks=pytest.mark.long), 2])
def test_greedy_text_through_the_round_is_the_chain_of_argmaxes(order):
    target = LookupTarget.random(VOCAB, order=order, seed=5)
    drafter = LookupDrafter.random(VOCAB, 3, seed=6)
    prompt = jnp.array([[0, 1], [2, 3], [3, 3]], jnp.int32)
    sampling = SamplingState.from_params([SamplingParams()] * 3)
    for model in (drafter, None):
        _, every = _generate(target, model, prompt, sampling, count=8)
        for start, text in zip(prompt.tolist(), texts(every), strict=True):
            expected = list(start)
            for _ in text:
                expected.append(int(target.law(expected).argmax()))
            assert len(text) >= 8 and start + text == expected


@pytest.mark.long
def test_acceptance_through_the_round_equals_the_curve():
    rates = (0.9, 0.75, 0.6)
    drafter = LookupDrafter.acceptance_curve(TARGET, rates)
    n = 50_000
    prompt = jnp.tile(jnp.arange(VOCAB, dtype=jnp.int32)[:, None], (n // VOCAB, 1))
    last, every = _generate(TARGET, drafter, prompt, state(n), count=2, max_len=32)
    accepted = np.asarray(every.accepted[1:]).ravel()
    assert (np.asarray(every.verified[1:]) == 3).all()
    reached = len(accepted)
    for j, rate in enumerate(rates):
        survived = (accepted > j).sum()
        assert abs(survived / reached - rate) < 5 * np.sqrt(rate * (1 - rate) / reached) + 1e-3
        reached = survived
    np.testing.assert_array_equal(last.draft_cache.length, last.requests.length)  # no context row is missing


LONG = pytest.mark.long
CASES = [(1, 1.0, 0, 1.0), (2, 1.0, 0, 1.0), (2, 0.8, 3, 1.0), (2, 1.3, 0, 0.8)]


@pytest.mark.parametrize(
    ("n", "order", "temperature", "top_k", "top_p"),
    [(200_000, *CASES[2]), *(pytest.param(10**6, *case, marks=LONG) for case in CASES)],
)
@pytest.mark.long
def test_joint_of_the_first_three_tokens_through_the_round(n, order, temperature, top_k, top_p):
    target = LookupTarget.random(VOCAB, order=order, seed=11)
    drafter = LookupDrafter.random(VOCAB, 2, seed=12)
    prompt = jnp.broadcast_to(jnp.array([3, 1], jnp.int32), (n, 2))
    last, every = _generate(target, drafter, prompt, state(n, temperature, top_k, top_p), count=2, max_len=12)
    tokens, counts = np.asarray(every.token), np.asarray(every.count)
    text = np.full((n, 3), -1)
    filled = np.zeros(n, int)
    for step in range(len(tokens)):
        for j in range(tokens.shape[2]):
            use = (j < counts[step]) & (filled < 3)
            text[use, filled[use]] = tokens[step, use, j]
            filled += use
    assert (filled == 3).all()

    table = np.asarray(target.table)
    joint = markov_joint(
        lambda prefix: reference_law(table[(3, 1, *prefix)[-order:]], temperature, top_k, top_p), VOCAB, 3
    )
    verdict = matches(joint_index(text, VOCAB), joint)
    # With fewer samples the distance of the truth itself is above the limit; the G-test holds for any number.
    assert verdict.p_value > P_VALUE_LIMIT and (n < 10**6 or verdict), verdict
    assert 0.05 < np.asarray(every.accepted[1:]).mean() < 1.95  # accepted and rejected drafts both took part
    np.testing.assert_array_equal(last.draft_cache.length, last.requests.length)
