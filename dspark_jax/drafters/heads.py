"""Sequential heads of DSpark (paper section 3.2, eqs. 4-7): a low-rank bias from the tokens drafted so far, and a
confidence.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int

from dspark_jax.config import HeadKind
from dspark_jax.models.layers import Embedding, Linear


class MarkovHead(nnx.Module):
    """Bias from the previous token alone: `W2 W1[x]` (eq. 5). `markov_w2` is stored (rank, vocabulary).

    `drafts`: the drafted vocabulary, where it is not that of the tokens in front.
    """

    def __init__(self, hidden: int, vocab: int, rank: int, drafts: int | None = None, *, rngs: nnx.Rngs):
        self.markov_w1 = Embedding(vocab, rank, rngs=rngs, std=0.01)
        self.markov_w2 = Linear(rank, vocab if drafts is None else drafts, rngs=rngs, std=0.01)
        self.rank = rank

    def start(self, rows: int) -> Float32[Array, "B s"]:
        """The state in front of the first draft."""
        return jnp.zeros((rows, 0), jnp.float32)

    def embed(self, token: Int[Array, "B"]) -> Float[Array, "B r"]:
        """`W1[x]`."""
        return self.markov_w1(token)

    def feature(
        self, state: Float32[Array, "B s"], embedded: Float[Array, "B r"], hidden: Float[Array, "B d"]
    ) -> tuple[Float32[Array, "B s"], Float[Array, "B r"]]:
        """New state and the rank-r feature whose product with W2 is the bias."""
        return state, embedded

    def bias(self, feature: Float[Array, "B r"]) -> Float32[Array, "B V"]:
        """What is added to the logits, fp32: `W2` times the feature."""
        return self.markov_w2(feature, jnp.float32)


class GatedHead(MarkovHead):
    """`W2 (sigmoid(W_g [h; W1[x]]) * W1[x])`: the hidden row decides how much the previous token counts."""

    def __init__(self, hidden: int, vocab: int, rank: int, drafts: int | None = None, *, rngs: nnx.Rngs):
        super().__init__(hidden, vocab, rank, drafts, rngs=rngs)
        self.gate_proj = Linear(hidden + rank, rank, rngs=rngs)
        self.gate_bias = nnx.Param(jnp.zeros((rank,)))

    def feature(self, state, embedded, hidden):
        gate = self.gate_proj(jnp.concatenate([hidden, embedded], -1), jnp.float32) + self.gate_bias[...].astype(
            jnp.float32
        )
        return state, (jax.nn.sigmoid(gate) * embedded.astype(jnp.float32)).astype(embedded.dtype)


class RNNHead(MarkovHead):
    """A gated recurrence over the drafted tokens (eq. 6): `z = [s; W1[x]; h]` gives gate, candidate and output."""

    def __init__(self, hidden: int, vocab: int, rank: int, drafts: int | None = None, *, rngs: nnx.Rngs):
        super().__init__(hidden, vocab, rank, drafts, rngs=rngs)
        self.joint_proj = Linear(2 * rank + hidden, 3 * rank, rngs=rngs)
        self.joint_bias = nnx.Param(jnp.zeros((3 * rank,)))

    def start(self, rows):
        """A state of zeros, of the head's rank."""
        return jnp.zeros((rows, self.rank), jnp.float32)

    def feature(self, state, embedded, hidden):
        joint = jnp.concatenate([state.astype(embedded.dtype), embedded, hidden], -1)
        out = self.joint_proj(joint, jnp.float32) + self.joint_bias[...].astype(jnp.float32)
        gate, candidate, output = jnp.split(out, 3, axis=-1)
        gate = jax.nn.sigmoid(gate)
        return gate * state + (1 - gate) * jnp.tanh(candidate), jnp.tanh(output).astype(embedded.dtype)


class NoHead(nnx.Module):
    """No sequential head: block positions are drafted independently (the DFlash form)."""

    def start(self, rows: int) -> Float32[Array, "B s"]:
        """No state: of width 0."""
        return jnp.zeros((rows, 0), jnp.float32)


class ConfidenceHead(nnx.Module):
    """Logit of P(draft k survives | the drafts before it did) from `[h_k; W1[x_{k-1}]]`, fp32 (eq. 7).

    With as many `inputs` as h_k has channels it reads that alone. Standalone drafters have a `bias`, embedded ones do not.
    """

    def __init__(self, inputs: int, *, bias: bool = False, rngs: nnx.Rngs):
        self.proj = Linear(inputs, 1, rngs=rngs, std=0.01)
        self.proj_bias = nnx.Param(jnp.zeros((1,))) if bias else None

    def __call__(self, hidden: Float[Array, "... d"], embedded: Float[Array, "... r"]) -> Float32[Array, "..."]:
        # Not a product with a one-column matrix: on CPU its rounding depends on a row's place.
        weight = self.proj.weight[...][:, 0].astype(jnp.float32)
        joint = jnp.concatenate([hidden, embedded.astype(hidden.dtype)], -1)[..., : weight.shape[0]].astype(jnp.float32)
        logit = jnp.sum(joint * weight, axis=-1)
        return logit if self.proj_bias is None else logit + self.proj_bias[...].astype(jnp.float32)


def forced_logits(
    head: MarkovHead | NoHead,
    confidence_head: ConfidenceHead | None,
    base: Float32[Array, "N gamma V"],
    hidden: Float[Array, "N gamma d"],
    previous: Int[Array, "N gamma"],
) -> tuple[Float32[Array, "N gamma V"], Float32[Array, "N gamma"]]:
    """Logits and confidence logits when draft k follows token `previous[:, k]` (training)."""
    embedded = hidden[..., :0]
    if isinstance(head, MarkovHead):
        embedded = head.embed(previous).astype(hidden.dtype)
        state, features = head.start(hidden.shape[0]), []
        for k in range(hidden.shape[1]):
            state, feature = head.feature(state, embedded[:, k], hidden[:, k])
            features.append(feature)
        base = base + head.bias(jnp.stack(features, axis=1))
    return base, confidence_head(hidden, embedded) if confidence_head else jnp.zeros(previous.shape)


def sequential_head(
    kind: HeadKind, rank: int, hidden: int, vocab: int, drafts: int | None = None, *, rngs: nnx.Rngs
) -> MarkovHead | NoHead:
    """The head of a kind; arguments as of `MarkovHead`."""
    if kind == "none":
        return NoHead()
    return {"markov": MarkovHead, "gated": GatedHead, "rnn": RNNHead}[kind](hidden, vocab, rank, drafts, rngs=rngs)
