"""Parity with the committed goldens of the PyTorch oracle, fp32: errors as a fraction of the largest expected value."""

import numpy as np
import pytest

from helpers.runner import MAX_LEN, SLOTS, golden, golden_runner, scaled_error

LIMIT = 1e-4
IDS = golden().arrays["ids"].tolist()
PROMPT = IDS[:-1]
STEPS = golden().arrays["draft_steps"].tolist()


def close(value, key: str, rows=slice(None)) -> None:
    error = scaled_error(value, golden().arrays[key][rows])
    assert error <= LIMIT, f"{key}: {error:.1e}"


def test_whole_sequence():
    logits, taps = golden_runner().sequence([PROMPT])
    close(logits[0], "target_logits")
    close(taps[0], "main_hidden")


LONG = pytest.mark.long  # one compilation each


@pytest.mark.parametrize("width", [*(pytest.param(n, marks=LONG) for n in (1, 3, 16)), 6, 44])
def test_chunks(width):
    """Slots: 0 plain chunks; 1 idle; 2 other tokens; 3 two calls late; 4 ragged chunks; 5 used before by another request."""
    runner = golden_runner()
    rng = np.random.default_rng(width)
    foreign = rng.integers(0, 63, MAX_LEN).tolist()
    text = [PROMPT, [], foreign[:60], PROMPT, PROMPT, PROMPT]
    start = [0] * SLOTS
    caches = runner.caches()
    *_, caches = runner.feed([[], [], [], [], [], foreign[-width:]], start, width, caches)
    results = {r: ([], []) for r in (0, 3, 4, 5)}
    for call in range(200):
        ready = [True, False, True, call >= 2, True, True]
        size = [width, 0, width, width, rng.integers(1, width + 1), width]
        parts = [text[r][start[r] : start[r] + size[r]] if ready[r] else [] for r in range(SLOTS)]
        if not any(parts):
            break
        logits, taps, caches = runner.feed(parts, start, width, caches)
        for r, (all_logits, all_taps) in results.items():
            all_logits.append(logits[r, : len(parts[r])])
            all_taps.append(taps[r, : len(parts[r])])
        start = [at + len(part) for at, part in zip(start, parts, strict=True)]
    for logits, taps in results.values():
        close(np.concatenate(logits), "target_logits")
        close(np.concatenate(taps), "main_hidden")


def check_drafts(drafted, slot: int, step: int) -> None:
    """Drafts behind context ids[: step + 1] and anchor ids[step + 1] against the goldens."""
    i = STEPS.index(step)
    tokens = golden().arrays["draft_tokens"][i]
    np.testing.assert_array_equal(drafted.tokens[slot], tokens)
    close(drafted.forced[slot], "draft_logits", i)
    close(drafted.confidence[slot], "draft_conf", i)
    close(drafted.forced_confidence[slot], "draft_conf", i)
    # The parallel pass alone: the goldens without the Markov bias of the tokens they drafted.
    weights = golden().weights
    last = golden().draft.num_stages - 1
    first, second = (weights[f"mtp.{last}.markov_head.{name}.weight"] for name in ("markov_w1", "markov_w2"))
    bias = first[[IDS[step + 1], *tokens[:-1]]] @ second.T
    assert scaled_error(drafted.base[slot], golden().arrays["draft_logits"][i] - bias) <= LIMIT
    # Greedy proposals are stored as one-hot distributions.
    kept = np.zeros_like(drafted.processed[slot], bool)
    kept[np.arange(len(tokens)), tokens] = True
    np.testing.assert_array_equal(drafted.processed[slot], np.where(kept, 0, -np.inf))


def test_drafts_with_the_whole_context_in_one_chunk():
    """The context may be longer than the drafter's ring: only its end is kept."""
    runner = golden_runner()
    for begin in range(0, len(STEPS), SLOTS):
        steps = STEPS[begin : begin + SLOTS]
        steps += STEPS[: SLOTS - len(steps)]
        *_, caches = runner.feed([IDS[: s + 1] for s in steps], [0] * SLOTS, 44, runner.caches())
        drafted = runner.draft([IDS[s + 1] for s in steps], [s + 1 for s in steps], caches)
        for slot, step in enumerate(steps):
            check_drafts(drafted, slot, step)


def test_drafts_at_every_step_of_a_growing_context():
    """One cache all the way. Slots: 0 chunks of three; 1 idle; 2 other tokens; 3 one and two; 4 two and one; 5 as 0."""
    runner = golden_runner()
    foreign = np.random.default_rng(1).integers(0, 63, MAX_LEN).tolist()
    text = [IDS, [], foreign, IDS, IDS, IDS]
    sizes = [(3, 0), (0, 0), (2, 1), (1, 2), (2, 1), (0, 3)]
    start, caches = [0] * SLOTS, runner.caches()
    done = 0
    while done < STEPS[-1] + 1:
        for half in (0, 1):
            parts = [text[r][start[r] : start[r] + sizes[r][half]] for r in range(SLOTS)]
            *_, caches = runner.feed(parts, start, 6, caches)
            start = [at + len(part) for at, part in zip(start, parts, strict=True)]
        done = start[0]
        if done - 1 not in STEPS:
            continue
        anchor = [text[r][done] if text[r] else 0 for r in range(SLOTS)]
        drafted = runner.draft(anchor, start, caches, active=[True, False, True, True, True, True])
        for slot in (0, 3, 4, 5):
            check_drafts(drafted, slot, done - 1)
    assert done - 1 == STEPS[-1]
