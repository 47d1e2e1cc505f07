"""Bits per byte on the held-out texts from two models that need no gradient: what a trained model has to beat.

    python -m dspark_jax.train.baselines --corpus .corpus

prints JSON: `xz` (LZMA at its strongest setting, the held-out file alone) and `ngram` (interpolated modified
Kneser-Ney over the model's own tokens, Chen and Goodman 1999, "An empirical study of smoothing techniques for language
modeling", fitted on the training tokens).
"""

import argparse
import json
import lzma
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dspark_jax.errors import ConfigError, raise_all

BOS = 0


def bits_per_byte(log2_probabilities: np.ndarray, num_bytes: int) -> float:
    """Total code length of a text over its size: `-sum(log2 p) / num_bytes`.

    `log2_probabilities` f64[tokens] holds log2 of the probability that the model gave each token of the text, the end
    of a document included and its start (which is given) left out; `num_bytes` is the UTF-8 size of the same text.
    Raises ConfigError when a value is no probability or the text is empty.
    """
    faults: list[str] = []
    if num_bytes <= 0:
        faults.append(f"num_bytes={num_bytes}: expected the positive UTF-8 size of the text")
    if not np.all(np.isfinite(log2_probabilities)) or np.any(np.asarray(log2_probabilities) > 1e-6):
        faults.append("log2_probabilities: expected finite values <= 0; the model is not normalised or gave a token 0")
    raise_all(ConfigError, "bits_per_byte", faults)
    return float(-np.sum(log2_probabilities, dtype=np.float64) / num_bytes)


def xz_bits_per_byte(data: bytes) -> float:
    """Bits per byte of `xz -9e` on this text alone."""
    if not data:
        raise ConfigError("xz_bits_per_byte: data is empty; expected the bytes of a text")
    return 8.0 * len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)) / len(data)


@dataclass(frozen=True)
class _Level:
    """n-grams of one length: key = tokens as digits in base V; `discounted` and `backoff` are shares of the context."""

    keys: np.ndarray  # u64[n-grams], sorted
    discounted: np.ndarray  # f32[n-grams]: (count - discount) / count of the context
    contexts: np.ndarray  # u64[contexts], sorted
    backoff: np.ndarray  # f32[contexts]: discounted mass / count of the context, the weight of the shorter context


def _unique(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sorted distinct keys and their counts; sorts `keys` in place."""
    keys.sort()
    first = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
    return keys[first], np.diff(np.append(first, keys.size))


def _level(keys: np.ndarray, counts: np.ndarray, vocab_size: int) -> _Level:
    ones, twos, threes, fours = (np.count_nonzero(counts == value) for value in (1, 2, 3, 4))
    discount = np.array([0.0, 0.75, 0.75, 0.75])
    if min(ones, twos, threes, fours) > 0:  # the estimate of Chen and Goodman, from the counts of counts
        rate = ones / (ones + 2 * twos)
        estimate = [1 - 2 * rate * twos / ones, 2 - 3 * rate * threes / twos, 3 - 4 * rate * fours / threes]
        discount[1:] = np.clip(estimate, 0.05, [0.95, 1.95, 2.95])
    taken = discount[np.minimum(counts, 3)]
    context = keys // np.uint64(vocab_size)
    first = np.flatnonzero(np.concatenate([[True], context[1:] != context[:-1]]))
    totals = np.add.reduceat(counts, first).astype(np.float64)
    mass = np.add.reduceat(taken, first)
    per_ngram = np.repeat(totals, np.diff(np.append(first, keys.size)))
    return _Level(keys, ((counts - taken) / per_ngram).astype(np.float32), context[first], (mass / totals).astype("f4"))


def _look_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray, default: float) -> np.ndarray:
    place = np.minimum(np.searchsorted(keys, wanted), keys.size - 1)
    return np.where(keys[place] == wanted, values[place].astype(np.float64), default)


class NgramModel:
    """Interpolated modified Kneser-Ney model of token n-grams with exact (not hashed) counts.

    p_n(w | c) = (count(c w) - D) / count(c) + backoff(c) * p_(n-1)(w | shorter c), down to the uniform 1 / V, so that
    every conditional distribution sums to 1. Below the highest order, count(c w) is the number of different tokens seen
    before it. Memory while fitting: about 40 bytes a training token.
    """

    def __init__(self, tokens: np.ndarray, vocab_size: int, order: int = 5):
        faults: list[str] = []
        if order < 1 or vocab_size < 2 or vocab_size**order > 2**64:
            faults.append(f"order={order}, vocab_size={vocab_size}: expected order >= 1 and vocab_size**order <= 2**64")
        if tokens.size < max(order, 1):
            faults.append(f"tokens: {tokens.size} of them; expected at least order={order}")
        elif int(tokens.max()) >= vocab_size:
            faults.append(f"tokens: largest id {int(tokens.max())}; expected less than vocab_size={vocab_size}")
        raise_all(ConfigError, "NgramModel", faults)
        self.vocab_size, self.order = vocab_size, order
        levels: list[_Level] = []
        keys, counts = _unique(self._keys(tokens, order))
        for length in range(order, 0, -1):
            levels.append(_level(keys, counts, vocab_size))
            if length > 1:
                keys, counts = _unique(keys % np.uint64(vocab_size ** (length - 1)))
        self.levels = levels[::-1]  # levels[n - 1] holds the n-grams

    def _keys(self, tokens: np.ndarray, length: int) -> np.ndarray:
        """Keys u64[tokens - length + 1] of every n-gram of this length."""
        keys = np.zeros(tokens.size - length + 1, np.uint64)
        for offset in range(length):
            keys *= np.uint64(self.vocab_size)
            keys += tokens[offset : offset + keys.size].astype(np.uint64)
        return keys

    def log2_probabilities(self, tokens: np.ndarray) -> np.ndarray:
        """log2 p of each token i32[n] given up to `order - 1` tokens before it -> f64[n]."""
        chance = np.full(tokens.size, 1.0 / self.vocab_size)
        for length, level in enumerate(self.levels[: tokens.size], 1):
            keys = self._keys(tokens, length)
            found = _look_up(level.keys, level.discounted, keys, 0.0)
            weight = _look_up(level.contexts, level.backoff, keys // np.uint64(self.vocab_size), 1.0)
            chance[length - 1 :] = found + weight * chance[length - 1 :]
        return np.log2(chance)

    def distribution(self, context: np.ndarray) -> np.ndarray:
        """p of every token after `context` i32[n] -> f64[V]; only the last `order - 1` tokens matter."""
        context = np.asarray(context)[-(self.order - 1) :] if self.order > 1 else np.zeros(0, np.int64)
        rows = [np.append(context, token) for token in range(self.vocab_size)]
        return np.array([2.0 ** self.log2_probabilities(row)[-1] for row in rows])


def measure(corpus: Path, order: int = 5, max_tokens: int = 40_000_000) -> dict[str, dict[str, float]]:
    """Bits per byte of both baselines on both held-out texts of a folder that `dspark_jax.train.corpus` wrote."""
    names = ["train.npy", "meta.json", *(f"valid_{kind}.{end}" for kind in ("code", "prose") for end in ("npy", "txt"))]
    missing = [name for name in names if not (corpus / name).is_file()]
    raise_all(ConfigError, f"corpus {corpus}", [f"{name} is missing; rebuild the corpus" for name in missing])
    meta = json.loads((corpus / "meta.json").read_text())
    train = np.load(corpus / "train.npy", mmap_mode="r")[:max_tokens]
    model = NgramModel(train, int(meta["vocab_size"]), order)
    result: dict[str, dict[str, float]] = {}
    for kind in ("code", "prose"):
        text = (corpus / f"valid_{kind}.txt").read_bytes()
        tokens = np.load(corpus / f"valid_{kind}.npy")
        scores = model.log2_probabilities(tokens)[tokens != BOS]  # the start of a document is given
        result[kind] = {"xz": round(xz_bits_per_byte(text), 4), "ngram": round(bits_per_byte(scores, len(text)), 4)}
    return result


def main(argv: list[str] | None = None) -> int:
    """The command line; see the module's text. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m dspark_jax.train.baselines", description="Bits per byte to beat.")
    parser.add_argument("--corpus", type=Path, default=Path(".corpus"), help="folder of dspark_jax.train.corpus")
    parser.add_argument("--order", type=int, default=5, help="longest n-gram")
    parser.add_argument("--max-tokens", type=int, default=40_000_000, help="training tokens that are counted")
    options = parser.parse_args(argv)
    started = time.monotonic()
    try:
        result = measure(options.corpus, options.order, options.max_tokens)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    settings = {"order": options.order, "max_tokens": options.max_tokens, "seconds": round(time.monotonic() - started)}
    print(json.dumps({"bits_per_byte": result, "ngram": settings}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
