"""A target and a drafter that are look-up tables: every distribution is known, so decoding can be checked exactly.

They implement `decode.protocols` and run through the same decode code as real models. The tables are arrays, so both
classes are pytrees and may be arguments of a jitted function.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Float32, Int

from dspark_jax.decode.noise import DraftNoise, draft_gumbel
from dspark_jax.decode.protocols import Proposal
from dspark_jax.decode.rows import Rows
from dspark_jax.decode.sampling import SamplingState, processed_logits


def _representable(table: np.ndarray) -> np.ndarray:
    """The table with its row maxima at 0 and every entry a bf16 number, so that a draft can equal it exactly."""
    table = np.asarray(table, np.float32)
    shifted = table - table.max(axis=-1, keepdims=True)
    return np.asarray(jnp.asarray(shifted, jnp.bfloat16).astype(jnp.float32))


def _check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        if not (isinstance(value, int) and value >= 1):
            raise ValueError(f"{name} = {value!r}; expected an integer >= 1")


def _softmax(x: np.ndarray) -> np.ndarray:
    x = np.exp(np.asarray(x, np.float64) - np.max(x, axis=-1, keepdims=True))
    return x / x.sum(axis=-1, keepdims=True)


@struct.dataclass
class LookupTarget:
    """A Markov chain behind the `Target` protocol.

    table: log-probabilities (or logits) of the next token, [V, V] by the last token, or [V, V, V] by the last two
    (second to last first; in front of position 0 stands token 0). A chain of order 2 finds the earlier token in its
    cache, so rejected drafts that were not overwritten would show in its output.
    """

    table: Float[Array, "... V"]

    @classmethod
    def random(cls, vocab: int, order: int = 1, scale: float = 1.5, seed: int = 0) -> "LookupTarget":
        """Normal logits with standard deviation `scale`, rounded to bf16 so that a drafter can match them exactly."""
        _check_sizes(vocab=vocab, order=order)
        if order > 2:
            raise ValueError(f"order = {order!r}; expected 1 or 2, the tokens that a law depends on")
        table = np.random.default_rng(seed).normal(0, scale, (vocab,) * (order + 1))
        return cls(jnp.asarray(_representable(table)))

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return self.table.shape[-1]

    @property
    def order(self) -> int:
        """Tokens that a law depends on."""
        return self.table.ndim - 1

    def init_cache(self, slots: int, max_len: int, block: int) -> Int[Array, "R max_len"]:
        """Tokens by position; `block` is not needed, because a rejected position is simply written again."""
        del block
        return jnp.full((slots, max_len), -1, jnp.int32)

    def forward(
        self, rows: Rows, cache: Int[Array, "R max_len"]
    ) -> tuple[Float32[Array, "B V"], Float32[Array, "B V"], Int[Array, "R max_len"]]:
        """Hidden = the row's logits; context = its token as one-hot; padding rows give zeros."""
        outside = cache.shape[1]
        cache = cache.at[rows.slot, jnp.where(rows.valid, rows.position, outside)].set(rows.token, mode="drop")
        if self.order == 1:
            hidden = self.table[rows.token]
        else:
            before = cache[rows.slot, jnp.maximum(rows.position - 1, 0)]
            # A position that was never written gives NaN: a hole in the cache must not pass for a token.
            hidden = self.table[jnp.where(rows.position > 0, before, 0), rows.token]
            hidden = jnp.where(((rows.position > 0) & (before < 0))[:, None], jnp.nan, hidden)
        context = jax.nn.one_hot(rows.token, self.vocab_size)
        return jnp.where(rows.valid[:, None], hidden, 0.0), jnp.where(rows.valid[:, None], context, 0.0), cache

    def logits(self, hidden: Float[Array, "... V"]) -> Float32[Array, "... V"]:
        """The hidden row itself."""
        return hidden.astype(jnp.float32)

    def law(self, prefix: Sequence[int]) -> np.ndarray:
        """The distribution [V] behind `prefix`, in float64 (temperature 1, nothing truncated)."""
        last = [0] * self.order + [int(token) for token in prefix]
        return _softmax(np.asarray(self.table)[tuple(last[-self.order :])])


@struct.dataclass
class LookupContext:
    """The drafter's cache: how many context rows were written for each slot, and the last one's token."""

    length: Int[Array, "R"]
    token: Int[Array, "R"]


@struct.dataclass
class LookupDrafter:
    """A drafter with one table for each block position behind the `Drafter` protocol.

    table: logits [gamma, V, V] of draft j by the token before it (for j = 0 the anchor).
    confidence_table: confidence logits [gamma, V] of draft j, also by the token before it.
    """

    table: Float[Array, "gamma V V"]
    confidence_table: Float[Array, "gamma V"]

    @classmethod
    def random(cls, vocab: int, block_size: int, scale: float = 1.5, seed: int = 1) -> "LookupDrafter":
        """Tables of normal logits; the confidences say nothing (0)."""
        _check_sizes(vocab=vocab, block_size=block_size)
        table = np.random.default_rng(seed).normal(0, scale, (block_size, vocab, vocab))
        return cls(jnp.asarray(_representable(table)), jnp.zeros((block_size, vocab), jnp.float32))

    @classmethod
    def acceptance_curve(cls, target: LookupTarget, rates: Sequence[float]) -> "LookupDrafter":
        """A drafter whose draft j is accepted with probability `rates[j]`, given that those before it were.

        Each proposal mixes the target's law with its least likely token so that sum min(p, q) is the rate, whatever
        the token before. It holds at temperature 1 without truncation; rounding to bf16 moves a rate by less than
        1e-3, and `conditional_acceptance` gives the exact values. The confidences are the logits of these values.
        A rate of 1 is exact where the target's table holds bf16 numbers (`LookupTarget.random`).

        Raises:
          ValueError: the target is not of order 1, or a rate is above 1 or so low that no law reaches it.
        """
        if target.order != 1:
            raise ValueError(f"target of order {target.order}; expected order 1, since drafts see one token back")
        logits = np.asarray(target.table, np.float64)
        p = _softmax(logits)
        least = p.min(axis=-1).max()
        bad = [rate for rate in rates if not least <= rate <= 1]
        if not len(rates) or bad:
            raise ValueError(f"rates = {list(rates)!r}; expected one or more in [{least:.4f}, 1] for this target")
        worst = np.eye(p.shape[-1])[p.argmin(axis=-1)]
        table = np.empty((len(rates), *p.shape), np.float32)
        for j, rate in enumerate(rates):
            if rate == 1:
                table[j] = _representable(logits)
                continue
            share = (1 - rate) / (1 - p.min(axis=-1, keepdims=True))
            # Rounding to bf16 shifts the rate a little; of the shares nearby, take the one that lands closest.
            best = np.full(len(p), np.inf)
            for shift in np.linspace(-0.01, 0.01, 201):
                mix = np.clip(share + shift, 0, 1)
                with np.errstate(divide="ignore"):
                    candidate = _representable(np.log((1 - mix) * p + mix * worst))
                error = np.abs(np.minimum(p, _softmax(candidate)).sum(-1) - rate)
                table[j][error < best] = candidate[error < best]
                best = np.minimum(best, error)
        rate = np.minimum(p, _softmax(table)).sum(axis=-1)
        with np.errstate(divide="ignore"):
            confidence = np.clip(np.log(rate) - np.log1p(-np.minimum(rate, 1)), -30, 30)
        return cls(jnp.asarray(table), jnp.asarray(confidence, jnp.float32))

    @property
    def block_size(self) -> int:
        """Drafts of a block, gamma."""
        return self.table.shape[0]

    def conditional_acceptance(self, target: LookupTarget) -> np.ndarray:
        """P(draft j accepted | token before it) [gamma, V] at temperature 1: sum min(p, q) of the rounded proposals."""
        return np.minimum(_softmax(np.asarray(target.table)), _softmax(_representable(np.asarray(self.table)))).sum(-1)

    def init_cache(self, slots: int, max_len: int) -> LookupContext:
        """An empty context of every slot."""
        del max_len
        return LookupContext(jnp.zeros((slots,), jnp.int32), jnp.zeros((slots,), jnp.int32))

    def write_context(
        self, context: Float[Array, "B V"], rows: Rows, keep: Bool[Array, "B"], cache: LookupContext
    ) -> LookupContext:
        """Remembers the length and the last token of the context: the caller can check that nothing is missing."""
        kept = rows.to_lanes(keep & rows.valid)
        count = jnp.sum(kept, axis=1, dtype=jnp.int32)
        token = jnp.argmax(rows.to_lanes(context), axis=-1).astype(jnp.int32)
        last = jnp.take_along_axis(token, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
        return LookupContext(
            length=jnp.where(count > 0, rows.start + count, cache.length),
            token=jnp.where(count > 0, last, cache.token),
        )

    def propose(
        self,
        anchor: Int[Array, "R"],
        position: Int[Array, "R"],
        active: Bool[Array, "R"],
        sampling: SamplingState,
        cache: LookupContext,
        draft_noise: DraftNoise = draft_gumbel,
    ) -> Proposal:
        """Draws the block left to right from the tables, with the request's temperature, top-k and top-p."""
        del active, cache
        previous, tokens, kept, confidence = anchor, [], [], []
        for j in range(self.block_size):
            confidence.append(self.confidence_table[j, previous])
            logits = processed_logits(
                self.table[j, previous], sampling.temperature, sampling.top_k, sampling.top_p
            ).astype(jnp.bfloat16)
            noise = draft_noise(sampling.seed, position, j, self.table.shape[-1])
            previous = jnp.argmax(logits.astype(jnp.float32) + noise, axis=-1).astype(anchor.dtype)
            tokens.append(previous)
            kept.append(logits)
        return Proposal(jnp.stack(tokens, 1), jnp.stack(kept, 1), jnp.stack(confidence, 1))
