"""Verification row by row: batches, padding, greedy rows, degenerate inputs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.decode.sampling import SamplingParams, SamplingState
from dspark_jax.decode.verify import Verdict, speculative_sample
from helpers.speculation import state, tile
from helpers.statistics import matches

N = 10**6
P4, Q4 = np.array([0.50, 0.30, 0.15, 0.05]), np.array([0.20, 0.45, 0.05, 0.30])


def batch(rows=12, length=3, vocab=10, seed=5):
    rng = np.random.default_rng(seed)
    p = rng.normal(0, 1.5, (rows, length + 1, vocab)).astype(np.float32)
    q = rng.normal(0, 1.5, (rows, length, vocab)).astype(jnp.bfloat16)
    leaves: tuple[Any, ...] = (
        rng.choice([0.0, 0.7, 1.0], rows).astype(np.float32),
        rng.choice([0, 3], rows).astype(np.int32),
        rng.choice([1.0, 0.8], rows).astype(np.float32),
        rng.integers(0, 2**32, rows).astype(np.uint32),
    )
    position = rng.integers(0, 1000, rows).astype(np.int32)
    # Likely drafts, so that every accepted length occurs.
    drafts = np.where(rng.random((rows, length)) < 0.7, p[:, :-1].argmax(-1), q.astype(np.float32).argmax(-1))
    num_drafts = rng.integers(0, length + 1, rows).astype(np.int32)
    return p, q, drafts.astype(np.int32), num_drafts, SamplingState(*leaves), position


_verify = jax.jit(speculative_sample)


def verify(*arguments) -> Verdict:
    """In numpy, as the arguments may be: picking rows eagerly would compile an operation at a time."""
    return jax.tree.map(np.asarray, _verify(*arguments))


def same(a: Verdict, b: Verdict) -> None:
    np.testing.assert_array_equal(a.accepted, b.accepted)
    np.testing.assert_array_equal(a.token, b.token)


def test_a_row_is_the_same_in_any_batch():
    args = batch()
    whole = verify(*args)
    assert len(set(whole.accepted.tolist())) > 2
    for order in (np.random.default_rng(0).permutation(12), np.array([5])):
        part = verify(*jax.tree.map(lambda x, o=order: x[o], args))
        same(part, jax.tree.map(lambda x, o=order: x[o], whole))


def test_nan_rows_change_nothing_for_the_others():
    p, q, drafts, num_drafts, sampling, position = batch()
    whole = verify(p, q, drafts, num_drafts, sampling, position)
    bad = np.array([1, 4, 9])
    spoilt = [np.where(np.isin(np.arange(12), bad)[:, None, None], np.nan, x).astype(x.dtype) for x in (p, q)]
    dirty = verify(*spoilt, drafts, num_drafts, sampling, position)
    good = np.setdiff1d(np.arange(12), bad)
    same(*(jax.tree.map(lambda x: x[good], v) for v in (dirty, whole)))
    assert ((dirty.token >= 0) & (dirty.token < 10) & (dirty.accepted >= 0) & (dirty.accepted <= 3)).all()


def test_drafts_beyond_the_length_are_ignored_even_as_nan():
    p, q, drafts, num_drafts, sampling, position = batch(rows=64)
    whole = verify(p, q, drafts, num_drafts, sampling, position)
    beyond = np.arange(3) >= num_drafts[:, None]
    unread = np.arange(4) > num_drafts[:, None]
    dirty = verify(
        np.where(unread[..., None], np.float32(np.nan), p), np.where(beyond[..., None], np.nan, q).astype(q.dtype),
        np.where(beyond, np.int32(10**6), drafts), num_drafts, sampling, position,
    )  # fmt: skip
    same(dirty, whole)
    for length in (0, 2):  # equal to a block that was no longer
        rows = np.flatnonzero(num_drafts == length)
        short = verify(p[:, : length + 1], q[:, :length], drafts[:, :length], num_drafts, sampling, position)
        same(*(jax.tree.map(lambda x, r=rows: x[r], v) for v in (short, whole)))


def test_the_emitted_token_is_keyed_by_its_own_position():
    # After n acceptances the bonus is what plain decoding draws at that position from the same row.
    p, q, _, _, sampling, position = batch(rows=64)
    hot = np.where(np.arange(10) == 3, 0.0, -np.inf)
    for n in (1, 2):
        certain = p.copy()
        certain[:, :n] = hot
        same_q = np.broadcast_to(hot.astype(q.dtype), q.shape)
        drafts, num_drafts = np.full((64, 3), 3, np.int32), np.full(64, n, np.int32)
        out = verify(certain, same_q, drafts, num_drafts, sampling, position)
        plain = verify(p[:, n : n + 1], q[:, :0], drafts[:, :0], 0 * num_drafts, sampling, position + n)
        assert (out.accepted == n).all()
        np.testing.assert_array_equal(out.token, plain.token)
    assert len(set(out.token.tolist())) > 3


def test_an_impossible_draft_id_is_no_proposal():
    p = jnp.log(jnp.asarray(P4, jnp.float32))
    rows = 200_000
    args = (tile(jnp.stack([p, p]), rows), tile(jnp.asarray(np.log(Q4), jnp.bfloat16)[None], rows))
    for bad in (-1, 4):
        out = verify(*args, jnp.full((rows, 1), bad, jnp.int32), jnp.ones(rows, jnp.int32), state(rows), tile(5, rows))
        assert int(out.accepted.max()) == 0
        assert matches(np.asarray(out.token), P4)


def test_plain_decoding_has_no_drafts():
    rows = N
    p = tile(jnp.log(jnp.asarray(P4, jnp.float32))[None], rows)
    empty = jnp.zeros((rows, 0, 4), jnp.bfloat16), jnp.zeros((rows, 0), jnp.int32), jnp.zeros(rows, jnp.int32)
    out = verify(p, *empty, state(rows), tile(3, rows))
    assert int(out.accepted.max()) == 0
    assert matches(np.asarray(out.token), P4)


def test_greedy_accepts_the_argmax_and_emits_the_argmax():
    rng = np.random.default_rng(8)
    rows, length, vocab = 300, 3, 6
    p = jnp.asarray(np.round(rng.normal(size=(rows, length + 1, vocab)), 1), jnp.float32)  # with ties
    q = jnp.asarray(rng.normal(size=(rows, length, vocab)), jnp.bfloat16)  # not one-hot: must not matter
    best = np.asarray(p).argmax(-1)
    drafts = np.where(rng.random((rows, length)) < 0.6, best[:, :-1], rng.integers(0, vocab, (rows, length)))
    num_drafts = rng.integers(0, length + 1, rows)
    out = verify(
        p,
        q,
        jnp.asarray(drafts, jnp.int32),
        jnp.asarray(num_drafts, jnp.int32),
        state(rows, 0.0, 2, 0.5),
        jnp.arange(rows),
    )
    for r in range(rows):
        n = 0
        while n < num_drafts[r] and drafts[r, n] == best[r, n]:
            n += 1
        assert (int(out.accepted[r]), int(out.token[r])) == (n, best[r, n])


def test_a_draft_outside_the_kept_set_is_never_emitted():
    rows = 20_000
    p = tile(jnp.asarray([[3.0, 2.0, -50.0, -60.0]] * 2, jnp.float32), rows)
    q = tile(jnp.asarray([[0.0, 0.0, 30.0, 30.0]], jnp.bfloat16), rows)
    drafts = jnp.asarray(2 + np.arange(rows) % 2, jnp.int32)[:, None]
    out = verify(p, q, drafts, jnp.ones(rows, jnp.int32), state(rows, 1.0, 2), tile(0, rows))
    assert int(out.accepted.max()) == 0 and int(out.token.max()) <= 1
    # Not even where q underflows to 0 as well, so that u * q <= p would hold.
    q = tile(jnp.asarray([[0.0, 0.0, -200.0, -200.0]], jnp.bfloat16), rows)
    out = verify(p, q, drafts, jnp.ones(rows, jnp.int32), state(rows, 1.0, 2), tile(0, rows))
    assert int(out.accepted.max()) == 0 and int(out.token.max()) <= 1


def test_from_params_rows_drive_the_sampler():
    sampling = SamplingState.from_params([SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, seed=4)])
    p = jnp.asarray([[[0.0, 5.0, 1.0]]] * 2)
    empty = jnp.zeros((2, 0, 3), jnp.bfloat16), jnp.zeros((2, 0), jnp.int32), jnp.zeros(2, jnp.int32)
    assert int(verify(p, *empty, sampling, jnp.zeros(2, jnp.int32)).token[0]) == 1
