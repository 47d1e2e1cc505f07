"""Batches of token sequences. What a step sees is a function of (seed, step), so a resumed run reads the same data."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dspark_jax.errors import ConfigError


class Batches(Protocol):
    """What the training loop reads: arrays of `batch` sequences, a function of the step and `seed`; tokens are int32
    [batch, length + 1].
    """

    @property
    def length(self) -> int: ...

    @property
    def batch(self) -> int: ...

    @property
    def seed(self) -> int: ...

    def at(self, step: int) -> Any: ...


@dataclass(frozen=True)
class TokenStream:
    """Sequences of `length + 1` tokens cut from one long stream, in an order shuffled anew every epoch.

    Cuts are shifted by a random offset each epoch, so that a document is not always cut at the same places.
    """

    tokens: np.ndarray
    length: int
    batch: int
    seed: int

    def __post_init__(self) -> None:
        if len(self.tokens) < (self.batch + 2) * (self.length + 1):
            raise ConfigError(
                f"training data: {len(self.tokens)} tokens are fewer than one batch of"
                f" {self.batch} × {self.length + 1}; use more text or a smaller batch"
            )

    @property
    def steps_per_epoch(self) -> int:
        return (len(self.tokens) // (self.length + 1) - 1) // self.batch

    def at(self, step: int) -> np.ndarray:
        """int32 [batch, length + 1]: the batch of `step`."""
        epoch, index = divmod(step, self.steps_per_epoch)
        order, offset = self._epoch(epoch)
        picked = order[index * self.batch : (index + 1) * self.batch]
        starts = picked.astype(np.int64) * (self.length + 1) + offset
        return self.tokens[starts[:, None] + np.arange(self.length + 1)].astype(np.int32)

    def _epoch(self, epoch: int) -> tuple[np.ndarray, int]:
        cached = getattr(self, "_cache", None)
        if cached is None or cached[0] != epoch:
            rng = np.random.default_rng([self.seed, epoch])
            count = len(self.tokens) // (self.length + 1) - 1
            cached = (epoch, rng.permutation(count), int(rng.integers(self.length + 1)))
            object.__setattr__(self, "_cache", cached)
        return cached[1], cached[2]

    def __iter__(self) -> Iterator[np.ndarray]:
        step = 0
        while True:
            yield self.at(step)
            step += 1


@dataclass(frozen=True)
class MixedStream:
    """Batches whose first rows come from one stream and the others from a second one, every step in the same shares."""

    first: TokenStream
    second: TokenStream

    def __post_init__(self) -> None:
        if self.first.length != self.second.length:
            raise ConfigError(
                f"mixed data: lengths are {self.first.length} and {self.second.length}; expected equal ones"
            )

    @property
    def length(self) -> int:
        return self.first.length

    @property
    def batch(self) -> int:
        return self.first.batch + self.second.batch

    @property
    def seed(self) -> int:
        return self.first.seed

    def at(self, step: int) -> np.ndarray:
        """int32 [batch, length + 1]: the batch of `step`."""
        return np.concatenate([self.first.at(step), self.second.at(step)])


def mix(first: np.ndarray, second: np.ndarray, share: float, length: int, batch: int, seed: int) -> Batches:
    """Batches of two token streams with `share` of the rows (rounded) from the second; one stream alone at 0 and 1."""
    if not 0 <= share <= 1:
        raise ConfigError(f"mixed data: share is {share}; expected 0 to 1")
    rows = round(share * batch)
    if rows in (0, batch):
        return TokenStream(second if rows else first, length, batch, seed)
    return MixedStream(TokenStream(first, length, batch - rows, seed), TokenStream(second, length, rows, seed))


def load_tokens(path: Path, vocab_size: int) -> np.ndarray:
    """A stream of token ids from a .npy file of uint16 or int32, memory mapped."""
    if not path.is_file():
        raise ConfigError(f"training data: {path} does not exist; build it with `python -m dspark_jax.train.corpus`")
    tokens = np.load(path, mmap_mode="r")
    if tokens.ndim != 1 or tokens.dtype.kind not in "ui":
        raise ConfigError(
            f"training data: {path} holds {tokens.dtype} of shape {tokens.shape}; expected one axis of token ids"
        )
    top = int(tokens[: 1 << 22].max())
    if top >= vocab_size:
        raise ConfigError(f"training data: {path} holds token id {top}; the model's vocabulary has {vocab_size}")
    return tokens
