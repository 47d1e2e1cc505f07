"""Sampling parameters and the one function that turns raw logits into the distribution sampled from.

Plain decoding, drafting and verification all use `processed_logits`, so p and q mean the same thing everywhere:
temperature, then top-k (exactly k entries), then top-p (the smallest set whose mass reaches p).
"""

import dataclasses
import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from dspark_jax.errors import RequestError, raise_all

_UNOFFERED = (
    "best_of",
    "frequency_penalty",
    "guided_choice",
    "guided_decoding",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "length_penalty",
    "logit_bias",
    "logits_processors",
    "min_p",
    "min_tokens",
    "mirostat",
    "presence_penalty",
    "prompt_logprobs",
    "repetition_penalty",
    "response_format",
    "top_a",
    "typical_p",
    "use_beam_search",
)

# Most alternatives a token: what OpenAI's API (top_logprobs) and vLLM (max_logprobs) allow by default.
MAX_LOGPROBS = 20


def _is_int(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool | np.bool_)


def _is_real(value: Any) -> bool:
    return _is_int(value) or isinstance(value, float | np.floating)


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled.

    temperature: 0 is greedy; otherwise logits are divided by it. top_k: 0 is off. top_p: 1 is off.
    seed: fixes every random draw of the request, whatever else is in the batch. max_tokens: most tokens generated.
    stop_token_ids: generation ends after the first of these tokens.
    logprobs: None is off; N asks for the log-probability of every generated token and for the N <= 20 most probable
    tokens in its place (0: none), by the target's raw logits: log-softmax before temperature, top-k and top-p.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    max_tokens: int = 128
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None

    def faults(self, vocab_size: int | None = None) -> list[str]:
        """Everything wrong with the values, one sentence each; ids are checked where `vocab_size` is given."""
        found = []
        if not (_is_real(self.temperature) and math.isfinite(self.temperature) and self.temperature >= 0):
            found.append(f"temperature = {self.temperature!r}; expected a finite number >= 0 (0 is greedy)")
        if not (_is_int(self.top_k) and 0 <= self.top_k < 2**31):
            found.append(f"top_k = {self.top_k!r}; expected an integer >= 0 (0 turns it off)")
        if not (_is_real(self.top_p) and 0 < self.top_p <= 1):
            found.append(f"top_p = {self.top_p!r}; expected a number in (0, 1] (1 turns it off)")
        if not (_is_int(self.seed) and 0 <= self.seed < 2**32):
            found.append(f"seed = {self.seed!r}; expected an integer in [0, 2**32)")
        if not (_is_int(self.max_tokens) and 1 <= self.max_tokens < 2**31):
            found.append(f"max_tokens = {self.max_tokens!r}; expected an integer >= 1 and below 2**31")
        if not isinstance(self.stop_token_ids, tuple | list):
            found.append(f"stop_token_ids = {self.stop_token_ids!r}; expected a list of token ids")
        else:
            upper = math.inf if vocab_size is None else vocab_size
            bad = [i for i in self.stop_token_ids if not (_is_int(i) and 0 <= i < upper)]
            if bad:
                limit = "" if vocab_size is None else f" below the vocabulary size {vocab_size}"
                found.append(f"stop_token_ids holds {bad!r}; expected token ids >= 0{limit}")
        most = MAX_LOGPROBS if vocab_size is None else min(MAX_LOGPROBS, vocab_size)
        if self.logprobs is not None and not (_is_int(self.logprobs) and 0 <= self.logprobs <= most):
            found.append(f"logprobs = {self.logprobs!r}; expected None (off) or an integer in 0 … {most}")
        return found

    def validate(self, vocab_size: int) -> None:
        """Raises one RequestError that names every fault; does nothing when there is none."""
        raise_all(RequestError, "sampling parameters", self.faults(vocab_size))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SamplingParams":
        """Parameters from a mapping of names (a JSON request, say).

        Raises RequestError that names every parameter not offered, every unknown name and every impossible value.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        found, kept = [], {}
        for name, value in values.items():
            if name in known:
                kept[name] = tuple(value) if name == "stop_token_ids" and isinstance(value, list) else value
            elif name == "n":
                if not (_is_int(value) and value == 1):
                    found.append(f"n = {value!r} is not offered; send one request a sample, each with its own seed")
            elif name in _UNOFFERED:
                found.append(f"{name} = {value!r} is not offered; remove it (offered: {', '.join(known)})")
            else:
                near = difflib.get_close_matches(str(name), known, 1)
                hint = f"did you mean {near[0]}?" if near else f"offered: {', '.join(known)}"
                found.append(f"{name} = {value!r} is not a sampling parameter; {hint}")
        params = cls(**kept)
        raise_all(RequestError, "sampling parameters", found + params.faults())
        return params


@flax.struct.dataclass
class SamplingState:
    """Sampling parameters of R request slots on the device; every leaf has the leading axis R."""

    temperature: Float[Array, "R"]
    top_k: Int[Array, "R"]
    top_p: Float[Array, "R"]
    seed: UInt32[Array, "R"]

    @classmethod
    def from_params(cls, params: Sequence[SamplingParams]) -> "SamplingState":
        """One row for each of `params`, in order."""
        return cls(
            temperature=jnp.asarray(np.array([p.temperature for p in params], np.float32)),
            top_k=jnp.asarray(np.array([p.top_k for p in params], np.int32)),
            top_p=jnp.asarray(np.array([p.top_p for p in params], np.float32)),
            seed=jnp.asarray(np.array([p.seed for p in params], np.uint32)),
        )


def _ordered_keys(x: Float[Array, "... V"]) -> UInt32[Array, "... V"]:
    """Unsigned integers in the order of the floats; -0 and +0 share one key."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(0x80000000))


def _largest_threshold(keys: UInt32[Array, "... V"], weights: Array, goal: Array) -> UInt32[Array, "... 1"]:
    """The largest t such that the weights of the entries with key >= t sum to at least `goal` ([..., 1]); else 0.

    Sixteen passes fix two bits each. The sums fall as t grows (rounding is monotone), so each pass only has to count
    how many of its three candidates still reach the goal.
    """

    def narrow(step: Array, found: Array) -> Array:
        shift = jnp.uint32(30) - 2 * step.astype(jnp.uint32)
        digit = jnp.zeros_like(found)
        for candidate in (1, 2, 3):
            bound = found | (jnp.uint32(candidate) << shift)
            total = jnp.sum(jnp.where(keys >= bound, weights, 0), axis=-1, keepdims=True, dtype=weights.dtype)
            digit += (total >= goal).astype(jnp.uint32)
        return found | (digit << shift)

    return jax.lax.fori_loop(0, 16, narrow, jnp.zeros_like(keys[..., :1]))


def _first(tied: Array, count: Int[Array, "... 1"]) -> Array:
    """The first `count` true entries of `tied` along the last axis."""
    return tied & (jnp.cumsum(tied.astype(jnp.int32), axis=-1) <= count)


def _top_k_mask(keys: UInt32[Array, "... V"], k: Int[Array, "... 1"]) -> Array:
    """True for exactly k entries of each row (k in 1..V), ties to the lowest index."""
    bound = _largest_threshold(keys, jnp.int32(1), k)
    above = keys > bound
    return above | _first(keys == bound, k - jnp.sum(above, axis=-1, keepdims=True, dtype=jnp.int32))


def _top_p_mask(keys: UInt32[Array, "... V"], weights: Float[Array, "... V"], p: Float[Array, "... 1"]) -> Array:
    """True for the smallest set, taken from the top, whose share of the weights reaches p; ties to the lowest index."""
    goal = p * jnp.sum(weights, axis=-1, keepdims=True)
    bound = _largest_threshold(keys, weights, goal)
    above, tied = keys > bound, keys == bound
    # Equal keys may differ in weight only by having been removed (weight 0) by top-k.
    tied &= weights > 0
    missing = goal - jnp.sum(jnp.where(above, weights, 0), axis=-1, keepdims=True)
    share = jnp.max(jnp.where(tied, weights, 0), axis=-1, keepdims=True)
    needed = jnp.clip(jnp.ceil(missing / share), 1, keys.shape[-1])
    return above | _first(tied, needed.astype(jnp.int32))


def processed_logits(
    logits: Float[Array, "... V"],
    temperature: Float[Array, "..."],
    top_k: Int[Array, "..."],
    top_p: Float[Array, "..."],
) -> Float[Array, "... V"]:
    """Logits whose softmax is the distribution to sample from; -inf outside the kept set, 0 at the maximum.

    The parameters have the shape of `logits` without its last axis. Temperature 0 keeps the first argmax alone. Rows
    are independent: a NaN stays in its row. Thresholds are found by bisection over integer keys, not by sorting, and
    the work is skipped where no row asks for it.
    """
    logits = logits.astype(jnp.float32)
    vocab = logits.shape[-1]
    greedy = (temperature <= 0)[..., None]
    use_k = ((top_k > 0) & (top_k < vocab))[..., None] & ~greedy
    use_p = (top_p < 1)[..., None] & ~greedy

    # Subtracting the maximum first keeps tiny temperatures finite.
    peak = jnp.max(logits, axis=-1, keepdims=True)
    peak = jnp.where(jnp.isneginf(peak), 0.0, peak)
    scaled = (logits - peak) / jnp.where(greedy, 1.0, temperature[..., None])

    def keep_top_k(x: Array) -> Array:
        mask = _top_k_mask(_ordered_keys(logits), jnp.where(use_k, top_k[..., None], vocab))
        return jnp.where(mask | ~use_k, x, -jnp.inf)

    def keep_top_p(x: Array) -> Array:
        mask = _top_p_mask(_ordered_keys(logits), jnp.exp(x), top_p[..., None])
        return jnp.where(mask | ~use_p, x, -jnp.inf)

    # Keys come from the raw logits: division may merge neighbours, and the order must not depend on that.
    scaled = jax.lax.cond(jnp.any(use_k), keep_top_k, lambda x: x, scaled)
    scaled = jax.lax.cond(jnp.any(use_p), keep_top_p, lambda x: x, scaled)

    best = jnp.argmax(logits, axis=-1)[..., None]
    one_hot = jnp.where(jnp.arange(vocab) == best, 0.0, -jnp.inf)
    return jnp.where(greedy, one_hot, scaled)
