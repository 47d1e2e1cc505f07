"""Rejected drafts leave nothing behind: after any accepted length the state is that of the committed prefix alone.

The state is compared by position over everything that a later query may read: window ring, uncompressed rows and compressed
entries of compressor and indexer, and the drafter's rings.
"""

import functools
from collections.abc import Iterator

import numpy as np
import pytest

from helpers.runner import MAX_LEN, SLOTS, Caches, golden_runner, packed, padded, scaled_error

LIMIT = 1e-5
GAMMA = golden_runner().gamma
WIDTH = GAMMA + 1
TEXT = np.random.default_rng(7).integers(0, 63, MAX_LEN).tolist()
assert SLOTS == WIDTH  # one slot for every accepted length


def readable(caches: Caches, slot: int, length: int) -> Iterator[tuple[str, int, np.ndarray]]:
    """(name, position or entry, value) of whatever a row at position `length` or later may read."""
    config = golden_runner().config
    window = range(max(0, length - config.sliding_window), length)
    for layer, (cache, ratio) in enumerate(zip(caches.target, config.compress_ratios, strict=True)):
        ring = np.asarray(cache.window)[slot]
        for t in window:
            yield f"layer {layer} window", t, ring[t % (len(ring) - 1)]
        for name, state in (("compressor", cache.compressed), ("indexer", cache.index)):
            if state is None:
                continue
            raw, entries = np.asarray(state.raw)[slot], np.asarray(state.entries)[slot]
            reach = ratio * (2 if ratio == config.csa_ratio else 1) - 1
            for t in range(max(0, length - reach), length):
                yield f"layer {layer} {name} rows", t, raw[t % (len(raw) - 1)]
            for g in range(length // ratio):
                yield f"layer {layer} {name} entries", g, entries[g]
    for stage, cache in enumerate(caches.draft):
        ring = np.asarray(cache)[slot]
        for t in window:
            yield f"stage {stage} context", t, ring[t % (len(ring) - 1)]


@functools.cache
def clean() -> tuple[np.ndarray, dict[str, dict[int, np.ndarray]], dict[str, float]]:
    """Logits [MAX_LEN, V] of TEXT without any rejection, every state value by name and position, scales by name."""
    runner, caches, logits = golden_runner(), golden_runner().caches(), []
    state: dict[str, dict[int, np.ndarray]] = {}
    for start in range(0, MAX_LEN, WIDTH):
        part = TEXT[start : start + WIDTH]
        lanes, _, caches = runner.feed([part] + [[]] * (SLOTS - 1), [start] + [0] * (SLOTS - 1), WIDTH, caches)
        logits.append(lanes[0, : len(part)])
        for name, at, value in readable(caches, 0, start + len(part)):
            state.setdefault(name, {}).setdefault(at, value)
    scales = {name: max(float(np.abs(v).max()) for v in values.values()) for name, values in state.items()}
    return np.concatenate(logits), state, scales


def check_state(caches: Caches, lengths: list[int]) -> None:
    _, state, scales = clean()
    for slot, length in enumerate(lengths):
        for name, at, value in readable(caches, slot, length):
            error = np.abs(value - state[name][at]).max() / scales[name]
            assert error <= LIMIT, f"slot {slot} length {length}: {name} {at} is off by {error:.1e}"  # NaN fails too


def prefill(lengths: list[int], caches: Caches) -> Caches:
    """Slot r holds the first `lengths[r]` tokens of TEXT."""
    for start in range(0, max(lengths), WIDTH):
        parts = [TEXT[start : min(start + WIDTH, n)] for n in lengths]
        *_, caches = golden_runner().feed(parts, [start] * SLOTS, WIDTH, caches)
    return caches


def block(length: int, accepted: int, width: int) -> list[int]:
    """The anchor, `accepted` right drafts, and wrong ones."""
    part = TEXT[length : length + width]
    return [token if j <= accepted else (token + 1 + j) % 63 for j, token in enumerate(part)]


def speculate(lengths, accepted, widths, caches: Caches, total: int | None = None) -> tuple[list[int], Caches]:
    """One verified block a slot (none where widths[r] is 0) with the given accepted lengths; checks the committed logits."""
    blocks = [block(n, a, w) for n, a, w in zip(lengths, accepted, widths, strict=True)]
    rows = padded(blocks, lengths, WIDTH) if total is None else packed(blocks, lengths, WIDTH, total)
    slot, position = np.asarray(rows.slot), np.asarray(rows.position)
    keep = np.asarray(rows.valid) & (position - np.asarray(lengths)[slot] <= np.asarray(accepted)[slot])
    logits, _, caches = golden_runner().step(rows, caches, keep)
    assert scaled_error(np.asarray(logits)[keep], clean()[0][position[keep]]) <= LIMIT
    return [n + (a + 1 if w else 0) for n, a, w in zip(lengths, accepted, widths, strict=True)], caches


@pytest.mark.parametrize("prompt", [1, 7, 18])
def test_b37_rounds_at_every_accepted_length(prompt):
    """Slot a accepts a drafts in every round, until a ring has turned several times or the text ends."""
    caches = prefill([prompt] * SLOTS, golden_runner().caches())
    lengths = [prompt] * SLOTS
    for _ in range(24):
        widths = [WIDTH if n + WIDTH <= MAX_LEN else 0 for n in lengths]
        lengths, caches = speculate(lengths, range(SLOTS), widths, caches)
        check_state(caches, lengths)
    assert lengths[-1] >= 5 * golden_runner().config.sliding_window


def test_b37_next_logits_equal_a_fresh_forward_on_the_committed_prefix():
    runner = golden_runner()
    lengths = [11 + r for r in range(SLOTS)]
    lengths, caches = speculate(lengths, range(SLOTS), [WIDTH] * SLOTS, prefill(lengths, runner.caches()))
    following = [[TEXT[n]] for n in lengths]
    logits, _, caches = runner.feed(following, lengths, WIDTH, caches)
    prefix = [TEXT[: n + 1] for n in lengths]
    fresh, _, fresh_caches = runner.feed(prefix, [0] * SLOTS, 44, runner.caches())
    for r, n in enumerate(lengths):
        assert scaled_error(logits[r, 0], fresh[r, n]) <= LIMIT
    # And the drafts that follow.
    anchor, position = [TEXT[n + 1] for n in lengths], [n + 1 for n in lengths]
    after, expected = (runner.draft(anchor, position, c) for c in (caches, fresh_caches))
    np.testing.assert_array_equal(after.tokens, expected.tokens)
    assert scaled_error(after.forced, expected.forced) <= LIMIT


def test_b27_verify_widths_that_change_every_round():
    """Packed rows: each slot has another width in every round, 1 to gamma + 1, and any accepted length below it."""
    rng = np.random.default_rng(0)
    lengths = [3, 4, 8, 9, 15, 2]
    caches = prefill(lengths, golden_runner().caches())
    closed = set()
    for turn in range(26):
        widths = [1 + (r + 5 * turn) % WIDTH if lengths[r] + WIDTH <= MAX_LEN else 0 for r in range(SLOTS)]
        accepted = [int(rng.integers(0, w)) if w else 0 for w in widths]
        before = lengths
        lengths, caches = speculate(lengths, accepted, widths, caches, total=24)
        check_state(caches, lengths)
        closed |= {(n + w) % 8 for n, w in zip(before, widths, strict=True) if w}
    assert closed == set(range(8))  # blocks ended at every place of a group
    assert min(lengths) > 3 * 13  # every ring of window + gamma turned three times


@pytest.mark.long
def test_b27_a_ring_without_room_for_the_block_would_lose_its_window():
    """The checks above notice a ring that is too short: one that protects a single row."""
    lengths = [20] * SLOTS
    caches = prefill(lengths, golden_runner().caches(block=1))
    check_state(caches, lengths)
    with pytest.raises(AssertionError):
        _, caches = speculate(lengths, [0] * SLOTS, [WIDTH] * SLOTS, caches)
        check_state(caches, [21] * SLOTS)
        speculate([21] * SLOTS, [0] * SLOTS, [WIDTH] * SLOTS, caches)


def test_b27_sizes_follow_from_the_block():
    config, gamma = golden_runner().config, GAMMA
    for cache, ratio in zip(golden_runner().caches().target, config.compress_ratios, strict=True):
        assert cache.window.shape[1] == config.sliding_window + gamma + 1  # and the trash slot
        for state in (cache.compressed, cache.index):
            if state is not None:
                reach = 2 * ratio if ratio == config.csa_ratio else ratio
                assert state.raw.shape[1] == reach + gamma + 2
                assert state.entries.shape[1] == MAX_LEN // ratio + 1
    for ring in golden_runner().caches().draft:
        assert ring.shape[1] == config.sliding_window + gamma + 1
