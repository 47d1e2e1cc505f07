"""The same rows in programs of 4, 8, 16 and 36 rows: other matmul shapes round otherwise, and no more than that."""

import functools

import numpy as np
import pytest

from helpers.runner import MAX_LEN, SLOTS, Runner, golden_runner, scaled_error

LENGTH = 48  # several windows, closed groups of every ratio
TEXT = np.random.default_rng(0).integers(1, 63, (SLOTS, LENGTH)).tolist()


@functools.cache
def runner(slots: int) -> Runner:
    """The tiny golden target, without its drafter; over six slots as other tests have it, whose program is then there."""
    if slots == SLOTS:
        return golden_runner()
    model = golden_runner().model(golden_runner().params)
    model.draft = None
    return Runner(model, slots, MAX_LEN)


@functools.cache
def logits_of(width: int, slots: int, busy: bool) -> np.ndarray:
    """Logits [LENGTH, V] of one request, read in chunks of `width` in the last slot; the others idle or read other texts."""
    caches, found = runner(slots).caches(), []
    for start in range(0, LENGTH, width):
        others = [text[start : start + width] if busy else [] for text in TEXT[1:slots]]
        logits, _, caches = runner(slots).feed([*others, TEXT[0][start : start + width]], [start] * slots, width, caches)
        found += list(logits[-1])
    return np.array(found)


SHAPES = ((8, 1, False), (16, 1, False), (4, 2, False), (4, 2, True), (4, 4, False), (4, 4, True))
LONG = [pytest.param(*x, marks=pytest.mark.long) for x in SHAPES]


@pytest.mark.parametrize(
    ("width", "slots", "busy"),
    [(6, SLOTS, True), *LONG],
    ids=lambda x: str(x),
)
def test_logits_agree_across_buckets(width: int, slots: int, busy: bool):
    values, four_rows = logits_of(width, slots, busy), logits_of(4, 1, False)
    assert four_rows.shape == (LENGTH, golden_runner().config.vocab_size) and np.abs(four_rows).max(axis=1).min() > 0
    error = scaled_error(values, four_rows)
    print(f"{width * slots} rows: {error:.1e}")
    assert error < 1e-5
