"""Text from the target itself in large batches: prompts of many lengths in, continuations out, one compiled program."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float32, Int, UInt32

from dspark_jax.decode import round as decode_round
from dspark_jax.decode.sampling import SamplingState
from dspark_jax.decode.state import WorkItem
from dspark_jax.errors import ConfigError, raise_all


class Prompts(NamedTuple):
    """Ragged prompts, padded with zeros: tokens int32 [S, P], of which the first `length` int32 [S] are real."""

    token: np.ndarray
    length: np.ndarray


class Continuations(NamedTuple):
    """Tokens behind each prompt; `count` of them are real, an end-of-sequence token (then the last one) included."""

    token: Int[Array, "S N"]
    count: Int[Array, "S"]


@dataclass(frozen=True)
class PromptSource:
    """Prompts out of a token stream of documents (bos + tokens + eos): half begin a document, half begin inside one.

    Every prompt starts with bos, has `low` to `high` tokens (bos counted) and holds no end of a document; documents
    that are too short for `low` give none. The draw is a function of (seed, index).
    """

    tokens: np.ndarray
    low: int
    high: int
    bos: int
    seed: int

    def __post_init__(self) -> None:
        if not 2 <= self.low <= self.high:
            raise ConfigError(f"prompts: low = {self.low}, high = {self.high}; expected 2 <= low <= high")
        starts = np.flatnonzero(np.asarray(self.tokens) == self.bos)
        sizes = np.diff(np.append(starts, len(self.tokens))) - 1  # eos is no part of a prompt
        fits = sizes >= self.low
        if not fits.any():
            raise ConfigError(f"prompts: no document of the stream has {self.low} tokens behind a bos ({self.bos})")
        object.__setattr__(self, "_starts", starts[fits])
        object.__setattr__(self, "_sizes", sizes[fits])

    def draw(self, count: int, index: int) -> Prompts:
        """`count` prompts, the same ones for the same `index`."""
        starts, sizes = getattr(self, "_starts"), getattr(self, "_sizes")  # noqa: B009
        rng = np.random.default_rng([self.seed, index])
        length = rng.integers(self.low, self.high + 1, count)
        # A document start from any document; an inner one from a document in proportion to its size.
        inside = rng.random(count) < 0.5
        spread = np.searchsorted(np.cumsum(sizes), rng.integers(0, sizes.sum(), count), side="right")
        document = np.where(inside, spread, rng.integers(0, len(starts), count))
        length = np.minimum(length, sizes[document])
        cut = np.where(inside, (rng.random(count) * (sizes[document] - length + 1)).astype(np.int64), 0)
        column = np.arange(self.high)
        place = starts[document, None] + cut[:, None] + column
        token = np.asarray(self.tokens)[np.minimum(place, len(self.tokens) - 1)].astype(np.int32)
        token[:, 0] = self.bos
        return Prompts(np.where(column < length[:, None], token, 0).astype(np.int32), length.astype(np.int32))


class Rollout:
    """Plain decoding of `slots` prompts of at most `prompt` tokens for `new` tokens each, all on the device.

    One prefill tick and a loop of rounds in one jitted program, the same code that serves requests. A slot that drew
    `eos` idles until the others are done.

    Args:
      graph: static half of the target, split into any number of states.
      slots, prompt, new: the static shape.
      eos: token, or tokens, that end a continuation.
    """

    def __init__(self, graph: nnx.GraphDef, slots: int, prompt: int, new: int, eos: int | tuple[int, ...]):
        faults = [
            f"{name} is {value}; expected at least {least}"
            for name, value, least in (("slots", slots, 1), ("prompt", prompt, 1), ("new", new, 2))
            if value < least
        ]
        raise_all(ConfigError, "rollout", faults)
        self.graph, self.slots, self.prompt, self.new = graph, slots, prompt, new
        self.eos = (eos,) if isinstance(eos, int) else eos
        self._program = jax.jit(self._run)

    def __call__(
        self, states: tuple[nnx.State, ...], prompts: Prompts, temperature: np.ndarray, seed: np.ndarray
    ) -> Continuations:
        """Continues `prompts` [slots, prompt] with `temperature` f32[slots] (0: greedy) and `seed` u32[slots]."""
        if prompts.token.shape != (self.slots, self.prompt):
            raise ConfigError(
                f"rollout: prompts have shape {prompts.token.shape}; expected {(self.slots, self.prompt)}"
                " (the program is compiled for one shape: draw that many, with high = prompt)"
            )
        return self._program(states, *prompts, np.asarray(temperature, np.float32), np.asarray(seed, np.uint32))

    def _run(
        self,
        states: tuple[nnx.State, ...],
        token: Int[Array, "S P"],
        length: Int[Array, "S"],
        temperature: Float32[Array, "S"],
        seed: UInt32[Array, "S"],
    ) -> Continuations:
        target = nnx.merge(self.graph, *states)
        max_len = self.prompt + self.new + 1
        state = decode_round.init_state(target, None, self.slots, max_len, stops=len(self.eos))
        zero = jnp.zeros((self.slots,), jnp.int32)
        sampling = SamplingState(
            temperature=temperature, top_k=zero, top_p=jnp.ones((self.slots,), jnp.float32), seed=seed
        )
        requests = replace(
            state.requests,
            max_tokens=jnp.full_like(zero, self.new),
            stop=jnp.broadcast_to(jnp.asarray(self.eos, jnp.int32), (self.slots, len(self.eos))),
            sampling=sampling,
        )
        item = WorkItem(token=token, start=zero, count=length, verify=zero, final=jnp.ones((self.slots,), bool))
        state, first = decode_round.tick(target, None, replace(state, requests=requests), item, max_len)
        _, rest = decode_round.rounds(target, None, state, max_len, self.new - 1)
        tokens = jnp.concatenate([first.token, rest.token[..., 0].T], axis=1)
        return Continuations(tokens, first.count + jnp.sum(rest.count, axis=0))


def join(prompt: Int[Array, "S P"], length: Int[Array, "S"], new: Continuations) -> Int[Array, "S P+N+1"]:
    """Each prompt with its continuation behind it, zeros behind that (at least one, so that every token has a label).
    """
    width = prompt.shape[1] + new.token.shape[1] + 1
    column = jnp.arange(width)
    behind = column - length[:, None]
    own = jnp.pad(prompt, ((0, 0), (0, width - prompt.shape[1])))
    drawn = jnp.take_along_axis(new.token, jnp.clip(behind, 0, new.token.shape[1] - 1), axis=1)
    return jnp.where(behind < 0, own, jnp.where(behind < new.count[:, None], drawn, 0))


def distinct_ngrams(new: Continuations, n: int = 4, texts: int = 50, tokens: int = 128) -> float:
    """Share of different n-grams among all of the first `tokens` tokens of the first `texts` continuations."""
    token, count = (np.asarray(x) for x in jax.device_get(new))
    grams = [
        tuple(row[i : i + n]) for row, c in zip(token[:texts, :tokens].tolist(), count[:texts], strict=True)
        for i in range(min(int(c), tokens) - n + 1)
    ]  # fmt: skip
    return len(set(grams)) / max(len(grams), 1)
