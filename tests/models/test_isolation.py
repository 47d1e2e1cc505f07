"""Nothing that a row may not read changes it, bit for bit within one shape: idle slots, other requests, stale state."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from helpers.runner import MAX_LEN, SLOTS, Caches, Runner, golden_runner, packed, padded

GAMMA = golden_runner().gamma
WIDTH = GAMMA + 1
# Without token 0, which padding rows hold, and the noise token.
TEXT = [np.random.default_rng(r).integers(1, 63, MAX_LEN).tolist() for r in range(SLOTS)]
LENGTHS = [9, 14, 4, 0, 23, 30]
COUNTS = [6, 2, 1, 0, 3, 5]  # slot 3 is idle; slot 2 leaves a group open that its padding lanes lie behind
ACTIVE = np.array([True, True, True, False, True, True])


def history(lengths=LENGTHS, text=TEXT) -> Caches:
    caches = golden_runner().caches()
    for start in range(0, max(lengths), WIDTH):
        parts = [t[start : min(start + WIDTH, n)] for t, n in zip(text, lengths, strict=True)]
        *_, caches = golden_runner().feed(parts, [start] * SLOTS, WIDTH, caches)
    return caches


def blocks(counts=COUNTS, lengths=LENGTHS, text=TEXT) -> list[list[int]]:
    return [t[n : n + c] for t, n, c in zip(text, lengths, counts, strict=True)]


class Result:
    """What a step and the draft behind it gave the valid rows: logits and taps by slot, drafts, a second step's logits."""

    def __init__(self, caches: Caches, counts=COUNTS, lengths=LENGTHS, text=TEXT, *, runner: Runner | None = None, total=None):
        runner = runner or golden_runner()
        self.parts = {}
        start, active = list(lengths), np.array(counts) > 0
        for turn in (0, 1):
            parts = blocks(counts, start, text)
            rows = padded(parts, start, WIDTH) if total is None else packed(parts, start, WIDTH, total)
            logits, taps, caches = runner.step(rows, caches)
            slot, valid = np.asarray(rows.slot), np.asarray(rows.valid)
            start = [n + c for n, c in zip(start, counts, strict=True)]
            anchor = [t[n] if c else 0 for t, n, c in zip(text, start, counts, strict=True)]
            drafted = runner.draft(anchor, start, caches, active=active)
            for r in np.flatnonzero(active):
                own = valid & (slot == r)
                self.parts[int(r), turn] = [np.asarray(logits)[own], np.asarray(taps)[own], *(x[r] for x in drafted)]

    def equals(self, other: "Result", order=None) -> None:
        """The same bits; with `order` the same values: products may sum a row elsewhere in the batch in another order."""
        for (r, turn), parts in self.parts.items():
            match = other.parts[r if order is None else order[r], turn]
            for mine, theirs in zip(parts, match, strict=True):
                rounding = 0 if order is None else 2e-5 * np.abs(theirs[np.isfinite(theirs)]).max()
                np.testing.assert_allclose(mine, theirs, rtol=0, atol=rounding, err_msg=f"slot {r}, step {turn}")
                assert not np.isnan(mine).any()


@functools.cache
def plain() -> tuple[Caches, Result]:
    caches = history()
    return caches, Result(caches)


def test_a_finished_slot_changes_nothing_for_others():
    caches, expected = plain()
    for gone in (0, 4):
        counts = [0 if r == gone else c for r, c in enumerate(COUNTS)]
        Result(caches, counts).equals(expected)


def test_other_requests_change_nothing():
    _, expected = plain()
    text = [TEXT[r] if r in (1, 5) else TEXT[r][::-1] for r in range(SLOTS)]
    lengths = [n if r in (1, 5) else 31 - n for r, n in enumerate(LENGTHS)]
    counts = [c if r in (1, 5) else 1 + r % WIDTH for r, c in enumerate(COUNTS)]
    result = Result(history(lengths, text), counts, lengths, text)
    result.parts = {key: value for key, value in result.parts.items() if key[0] in (1, 5)}
    assert len(result.parts) == 4
    result.equals(expected)


def test_the_order_of_the_batch_changes_nothing():
    _, expected = plain()
    order = [4, 3, 5, 1, 0, 2]
    text, lengths, counts = ([values[r] for r in order] for values in (TEXT, LENGTHS, COUNTS))
    Result(history(lengths, text), counts, lengths, text).equals(expected, order)


def poisoned(caches: Caches) -> Caches:
    """NaN wherever no row may read before it is written: other positions of the rings, open entries, trash, the idle slot."""
    config = golden_runner().config

    def ring(values, reach):
        values = np.array(values)
        for r, length in enumerate(LENGTHS):
            kept = [t % (values.shape[1] - 1) for t in range(max(0, length - reach), length)]
            values[r, np.setdiff1d(np.arange(values.shape[1]), kept)] = np.nan
        return jnp.asarray(values)

    def closed(values, ratio):
        values = np.array(values)
        for r, length in enumerate(LENGTHS):
            values[r, length // ratio :] = np.nan
        return jnp.asarray(values)

    target = []
    for cache, ratio in zip(caches.target, config.compress_ratios, strict=True):
        reach = ratio * (2 if ratio == config.csa_ratio else 1) - 1
        compressed, index = (
            s and s.replace(raw=ring(s.raw, reach), entries=closed(s.entries, ratio)) for s in (cache.compressed, cache.index)
        )
        target.append(cache.replace(window=ring(cache.window, config.sliding_window), compressed=compressed, index=index))
    return Caches(tuple(target), tuple(ring(r, config.sliding_window) for r in caches.draft))


def test_nan_in_stale_and_foreign_state_changes_nothing():
    caches, expected = plain()
    bad = poisoned(caches)
    assert all(np.isnan(leaf).any(axis=(1, 2)).all() for leaf in jax.tree.leaves(bad))  # every slot of every array
    Result(bad).equals(expected)


def test_nan_in_another_slot_changes_nothing():
    """A request whose whole state is NaN, also while it runs."""
    caches, expected = plain()
    bad = jax.tree.map(lambda x: x.at[4].set(jnp.nan), caches)
    result = Result(bad)
    assert np.isnan(result.parts[4, 0][0]).all()
    result.parts = {key: value for key, value in result.parts.items() if key[0] != 4}
    result.equals(expected)


@pytest.mark.parametrize("form", ["padded", "packed"])
def test_nan_in_padding_rows_changes_nothing(form):
    """Padding rows hold token 0, so its embedding makes them NaN from the first layer on; idle slots draft behind it too."""
    runner = golden_runner()
    caches, expected = plain()
    total = None if form == "padded" else 24
    if total:
        expected = Result(caches, total=total)
    bad = Runner(runner.model(runner.params), SLOTS, MAX_LEN)
    bad._step, bad._draft = runner._step, runner._draft  # the compiled programs: parameters are arguments
    flat = dict(nnx.to_flat_state(runner.params))
    path = ("target", "embed", "weight")
    flat[path] = flat[path].replace(flat[path].get_value().at[0].set(jnp.nan))
    bad.params = nnx.from_flat_state(flat)
    Result(caches, runner=bad, total=total).equals(expected)
