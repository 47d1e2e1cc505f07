"""Log-probabilities of committed tokens and of their most probable alternatives.

They are those of the target's own distribution: log-softmax of its raw fp32 logits, before temperature, top-k and top-p
(vLLM's `raw_logprobs`, its default). Row j of a round predicts its token j, whether that is an accepted draft, the
residual's draw or the bonus, so speculative and plain decoding report the same numbers, up to rounding.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float32, Int


@struct.dataclass
class Logprobs:
    """Of every token of a round, 0 where none was committed; N alternatives, the most probable first."""

    token: Float32[Array, "R gamma+1"]
    top_id: Int[Array, "R gamma+1 N"]
    top: Float32[Array, "R gamma+1 N"]


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms of probabilities under the target's raw logits (temperature 1, nothing cut off).

    Attributes:
      logprob: of the generated token.
      top: (token id, its logprob) of the most probable tokens, the best first, as many as were asked for. The generated
        token is among them or not.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


def no_logprobs(slots: int, width: int, alternatives: int | None) -> Logprobs | None:
    """Of a tick that commits nothing; None where no request may ask (`alternatives` is None)."""
    if alternatives is None:
        return None
    shape = (slots, width, alternatives)
    return Logprobs(jnp.zeros(shape[:2], jnp.float32), jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32))


def committed_logprobs(
    logits: Float32[Array, "R gamma+1 V"],
    tokens: Int[Array, "R gamma+1"],
    count: Int[Array, "R"],
    alternatives: int | None,
) -> Logprobs | None:
    """Logprobs of the first `count` of `tokens`, token j by row j of the raw `logits`; equal logits by lower id first."""
    if alternatives is None:
        return None
    logits = logits.astype(jnp.float32)
    whole = jax.nn.logsumexp(logits, axis=-1)
    own = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0] - whole
    top, top_id = jax.lax.top_k(logits, alternatives)
    real = jnp.arange(tokens.shape[1]) < count[:, None]
    return Logprobs(
        token=jnp.where(real, own, 0),
        top_id=jnp.where(real[..., None], top_id, 0),
        top=jnp.where(real[..., None], top - whole[..., None], 0),
    )


def read_logprobs(
    host: Logprobs | None, at: tuple[Any, ...], count: int, asked: int | None
) -> tuple[TokenLogprobs, ...] | None:
    """The first `count` tokens of slot `at` as a request sees them; None if it has not asked. Numpy leaves."""
    if host is None or asked is None:
        return None
    token, ids, top = (x[at][:count].tolist() for x in (host.token, host.top_id, host.top))
    return tuple(
        TokenLogprobs(own, tuple(zip(i[:asked], t[:asked], strict=True))) for own, i, t in zip(token, ids, top, strict=True)
    )
