"""Conversations that a target writes: what a separate drafter learns from (paper section 4, training data)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from flax import nnx

from dspark_jax.errors import ConfigError, raise_all
from dspark_jax.train.regenerate import temperatures
from dspark_jax.train.rollout import Continuations, Prompts, Rollout

_PATIENCE = 1000  # prompts in a row that are too long
_BARREN = 4  # batches in a row without an answer


class Conversations(NamedTuple):
    """Prompts with the target's answers, one a row.

    Attributes:
      token: int32 [N, length], zeros behind the answer.
      prompt: int32 [N], tokens of the prompt.
      count: int32 [N], tokens of prompt and answer.
    """

    token: np.ndarray
    prompt: np.ndarray
    count: np.ndarray

    def save(self, path: Path) -> None:
        """Writes an npz file; a file under this name is always whole."""
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part.npz")
        np.savez(part, **self._asdict())
        part.replace(path)

    @classmethod
    def read(cls, path: Path) -> "Conversations":
        """What `save` has written."""
        with np.load(path) as arrays:
            return cls(**{name: arrays[name] for name in cls._fields})


def answers(
    rollout: Rollout,
    states: tuple[nnx.State, ...],
    prompts: Iterator[Sequence[int]],
    *,
    values: tuple[float, ...],
    seed: int,
    wanted: int,
    report: Callable[[dict[str, int]], None] | None = None,
) -> Conversations:
    """At most `wanted` conversations, in batches of one compiled program; those with an answer of one token are left out.

    The host makes a batch's prompts while the device works on the batch in front of it.

    Args:
      rollout: of the target; prompts longer than its `prompt` are left out.
      states: the target's parameters, as `rollout` takes them.
      prompts: token ids; as many are taken as are needed.
      values: temperatures, in turn.
      seed: of the draws; batch i is a function of (seed, i), the prompts and the parameters.
      report: gets the numbers of conversations and of prompts left out so far, after every batch.

    Raises ConfigError where no prompt, or none of so many in a row, is short enough.
    """
    found: list[Conversations] = []
    left_out = 0

    def batches() -> Iterator[tuple[Prompts, int]]:
        nonlocal left_out
        too_long = 0
        while True:
            batch: list[Sequence[int]] = []
            while len(batch) < rollout.slots and (prompt := next(prompts, None)) is not None:
                if 0 < len(prompt) <= rollout.prompt:
                    batch.append(prompt)
                    too_long = 0
                    continue
                left_out += 1
                too_long += 1
                if too_long >= _PATIENCE:  # prompts may have no end
                    break
            if not batch:
                return
            token, length = np.zeros((rollout.slots, rollout.prompt), np.int32), np.ones(rollout.slots, np.int32)
            for i, prompt in enumerate(batch):
                token[i, : len(prompt)], length[i] = prompt, len(prompt)
            yield Prompts(token, length), len(batch)

    def dispatched() -> Iterator[tuple[Prompts, int, Continuations]]:
        waiting = None
        for index, (batch, size) in enumerate(batches()):
            seeds = np.random.default_rng([seed, index]).integers(0, 2**32, rollout.slots, dtype=np.uint32)
            new = rollout(states, batch, temperatures(rollout.slots, values), seeds)
            if waiting is not None:
                yield waiting
            waiting = batch, size, new
        if waiting is not None:
            yield waiting

    total = barren = 0
    for (token, length), size, new in dispatched():
        count = np.asarray(new.count)
        both = np.zeros((rollout.slots, rollout.prompt + rollout.new), np.int32)
        for i, (n, m, drawn) in enumerate(zip(length, count, np.asarray(new.token), strict=True)):
            both[i, :n], both[i, n : n + m] = token[i, :n], drawn[:m]
        kept = np.flatnonzero((count > 1) & (np.arange(rollout.slots) < size))
        found.append(Conversations(both[kept], length[kept], length[kept] + count[kept]))
        total, barren = total + len(kept), 0 if len(kept) else barren + 1
        if report is not None:
            report({"conversations": min(total, wanted), "left_out": left_out})
        if total >= wanted or barren >= _BARREN:
            break
    if not total:
        raise ConfigError(
            f"training data: no prompt of at most {rollout.prompt} tokens has an answer, and {left_out} are longer; allow"
            " longer prompts"
        )
    return Conversations(*(np.concatenate(parts)[:wanted] for parts in zip(*found, strict=True)))


@dataclass(frozen=True)
class ConversationStream:
    """Batches of conversations in an order that is shuffled anew every epoch; a function of (seed, step).

    `batch` conversations a step; `length` is what the training loop counts a sequence as.
    """

    data: Conversations
    batch: int
    seed: int

    def __post_init__(self) -> None:
        faults = []
        if not 1 <= self.batch <= len(self.data.token):
            faults.append(f"batch is {self.batch}; expected 1 … {len(self.data.token)}, the conversations that there are")
        raise_all(ConfigError, "training data", faults)

    @property
    def length(self) -> int:
        return self.data.token.shape[1]

    def at(self, step: int) -> Conversations:
        """The batch of `step`."""
        each = len(self.data.token) // self.batch
        epoch, place = divmod(step, each)
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.data.token))
        rows = order[place * self.batch : (place + 1) * self.batch]
        return Conversations(*(part[rows] for part in self.data))
