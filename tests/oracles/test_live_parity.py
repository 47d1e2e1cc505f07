"""Parity with files that PyTorch wrote a moment ago: random configurations by the oracle, and transformers' own model.

A file costs two compiled programs, steps and drafts: all ways to cut a text are slots of one call of prompt width, with fewer
valid rows where they take smaller pieces. Errors are fractions of the largest expected value.
"""

import functools
import json
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from dspark_jax.config import target_from_hf
from helpers.goldens import Golden, build_model, configs, load_golden
from helpers.runner import Drafted, Runner, padded, scaled_error

FILES = Path(__file__).resolve().parents[2] / ".cache" / "oracles"
LIMIT = 1e-4
RANDOM = range(6)
# What each slot does with the text.
WHOLE, CHUNKS, SINGLE, SPECULATING = range(4)
SLOTS = 4

pytestmark = pytest.mark.oracle
# Each program runs a few dozen times over a few rows: what matters is the time that its compilation takes.
QUICK = {"xla_backend_optimization_level": 0}


def quick(runner: Runner) -> Runner:
    runner._step, runner._draft, runner._sequence = (
        jax.jit(f, compiler_options=QUICK) for f in (runner._step_pure, runner._draft_pure, runner._sequence_pure)
    )
    return runner


def file(name: str) -> Path:
    path = FILES / name
    assert path.is_file(), f"{path} is missing; `make oracles` writes it"
    return path


@functools.cache
def case(index: int) -> tuple[Golden, Runner]:
    golden = load_golden(file(f"random_{index}.npz"))
    return golden, quick(Runner(golden.model(), SLOTS, len(golden.arrays["ids"]) + golden.draft.block_size))


class Walk:
    """One text through the four slots, each in its own pieces, until all of them have processed it.

    The speculating slot's pieces are blocks of `gamma + 1` rows whose last drafts are wrong: the accepted length goes through
    0 … gamma, and the next block begins behind it.
    """

    def __init__(self, runner: Runner, ids: list[int], vocab: int, rng: np.random.Generator):
        self.runner, self.ids, self.vocab, self.rng = runner, ids, vocab, rng
        self.size = len(ids) - 1  # the last token is an anchor only
        self.done, self.rounds = [0] * SLOTS, 0
        self.accepted: set[int] = set()
        self.caches = runner.caches()
        self.logits, self.taps = ([[] for _ in range(SLOTS)] for _ in range(2))

    def piece(self, slot: int) -> tuple[list[int], int]:
        """The slot's next tokens, and how many of them are committed."""
        start, left = self.done[slot], self.size - self.done[slot]
        if slot != SPECULATING:
            count = min(left, {WHOLE: left, CHUNKS: int(self.rng.integers(1, 8)), SINGLE: 1}[slot])
            return self.ids[start : start + count], count
        width = min(left, self.runner.gamma + 1)
        kept = min(width, 1 + self.rounds % (self.runner.gamma + 1))
        self.rounds += 1
        wrong = [(t + 1 + j) % self.vocab for j, t in enumerate(self.ids[start + kept : start + width])]
        if width == self.runner.gamma + 1:
            self.accepted.add(kept - 1)
        return self.ids[start : start + kept] + wrong, kept

    def calls(self) -> Iterator[list[int]]:
        """Runs call after call, and names the slots that moved."""
        while min(self.done) < self.size:
            pieces = [self.piece(r) if self.done[r] < self.size else ([], 0) for r in range(SLOTS)]
            kept = [count for _, count in pieces]
            rows = [tokens for tokens, _ in pieces]
            keep = (np.arange(self.size) < np.array(kept)[:, None]).reshape(-1)
            *out, self.caches = self.runner.step(padded(rows, self.done, self.size), self.caches, keep)
            logits, taps = (np.asarray(x).reshape(SLOTS, self.size, -1) for x in out)
            for r, count in enumerate(kept):
                self.logits[r].append(logits[r, :count])
                self.taps[r].append(taps[r, :count])
            self.done = [at + count for at, count in zip(self.done, kept, strict=True)]
            yield [r for r, count in enumerate(kept) if count]


def close(value, expected, what: str) -> None:
    error = scaled_error(value, expected)
    assert error <= LIMIT, f"{what}: {error:.1e}"


def check_draft(golden: Golden, drafted: Drafted, slot: int, step: int) -> None:
    i = golden.arrays["draft_steps"].tolist().index(step)
    what = f"slot {slot} behind {step}: "
    np.testing.assert_array_equal(drafted.tokens[slot], golden.arrays["draft_tokens"][i], err_msg=what)
    close(drafted.forced[slot], golden.arrays["draft_logits"][i], what + "draft logits")
    close(drafted.confidence[slot], golden.arrays["draft_conf"][i], what + "confidence")


@pytest.mark.parametrize("index", RANDOM)
def test_random_configurations(index: int):
    """Target and drafts: the whole prompt, in chunks, token by token, and after rejections at every accepted length."""
    golden, runner = case(index)
    ids, steps = golden.arrays["ids"].tolist(), set(golden.arrays["draft_steps"].tolist())
    walk = Walk(runner, ids, golden.config.vocab_size, np.random.default_rng(index))
    drafts = [0] * SLOTS
    for moved in walk.calls():
        due = [r for r in moved if walk.done[r] - 1 in steps]
        if due:
            active = [r in due for r in range(SLOTS)]
            drafted = runner.draft([ids[n] for n in walk.done], walk.done, walk.caches, active=active)
            for r in due:
                check_draft(golden, drafted, r, walk.done[r] - 1)
                drafts[r] += 1
    for r in range(SLOTS):
        close(np.concatenate(walk.logits[r]), golden.arrays["target_logits"], f"slot {r}: logits")
        close(np.concatenate(walk.taps[r]), golden.arrays["main_hidden"], f"slot {r}: taps")
    assert drafts[WHOLE] == 1 and drafts[SINGLE] == len(steps) and min(drafts[CHUNKS], drafts[SPECULATING]) >= 2
    assert walk.accepted == set(range(runner.gamma + 1))


@pytest.fixture(scope="module")
def transformers() -> tuple[dict[str, np.ndarray], Runner]:
    """transformers' model read from its published configuration and keys: the first text in three slots, the second in one."""
    with np.load(file("transformers_v4.npz")) as archive:
        data = dict(archive)
    config = target_from_hf(json.loads(str(data["config"])))
    weights = {key[2:]: value for key, value in data.items() if key.startswith("P/")}
    return data, quick(Runner(build_model(config, None, weights), SLOTS, data["ids"].shape[1]))


def test_transformers(transformers):
    data, runner = transformers
    texts = [data["ids"][r].tolist() for r in (0, 0, 0, 1)]
    length = len(texts[0])
    rng = np.random.default_rng(0)
    done, caches, made = [0] * SLOTS, runner.caches(), [[] for _ in range(SLOTS)]
    while min(done) < length:
        sizes = [length, int(rng.integers(1, 8)), 1, length]
        parts = [text[at : at + size] for text, at, size in zip(texts, done, sizes, strict=True)]
        logits, _, caches = runner.feed(parts, done, length, caches)
        for r, part in enumerate(parts):
            made[r].append(logits[r, : len(part)])
        done = [at + len(part) for at, part in zip(done, parts, strict=True)]
    for r, source in enumerate((0, 0, 0, 1)):
        close(np.concatenate(made[r]), data["logits"][source], f"slot {r}")


def test_transformers_whole_sequence(transformers):
    """The pass that training uses, without any state."""
    data, runner = transformers
    close(runner.sequence(data["ids"])[0], data["logits"], "logits")


def test_both_readings_of_the_configuration_agree(transformers):
    """config.json's own form, and the oracle's fields by which the random files are read."""
    data, runner = transformers
    assert configs(json.loads(str(data["cfg"])), max_len=1024)[0] == runner.config
