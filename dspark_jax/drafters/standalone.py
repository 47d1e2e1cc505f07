"""DSpark and DFlash drafters with weights of their own on a dense target (paper section 3; DeepSpec's key names).

Every layer makes keys and values from the target's tapped layers; the rows of a block see all of them in front of the anchor,
and each other in both directions.
"""

from typing import Any, Protocol

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int

from dspark_jax.config_drafter import StandaloneConfig
from dspark_jax.decode.noise import DraftNoise, draft_gumbel
from dspark_jax.decode.protocols import Proposal
from dspark_jax.decode.rows import Rows
from dspark_jax.decode.sampling import SamplingState
from dspark_jax.drafters.dense_block import through_layers, visible_context
from dspark_jax.drafters.draw import Widen
from dspark_jax.drafters.draw_kernel import draw
from dspark_jax.drafters.heads import ConfidenceHead, sequential_head
from dspark_jax.models.layers import Embedding, Linear, RMSNorm
from dspark_jax.models.qwen3 import DenseLayer, KeyValueCache


class DenseEnds(Protocol):
    """What a drafter may borrow of a dense target, or of its last pipeline rank."""

    dtype: Any

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        ...

    def embed(self, token: Int[Array, "..."]) -> Float[Array, "... d"]:
        """Embeddings of tokens."""
        ...

    def head(self, hidden: Float[Array, "... d"]) -> Float32[Array, "... V"]:
        """fp32 logits of rows behind a norm."""
        ...


class Standalone(nnx.Module):
    """The drafter's weights. Module paths are the published files' key names (`layers.N.self_attn.q_proj.weight` …)."""

    def __init__(self, config: StandaloneConfig, *, rngs: nnx.Rngs):
        c = config.layers
        d, heads = c.hidden_size, config.draft_vocab_size
        # Any: which of these there are depends on the files, and the key names follow the attribute names.
        self.embed_tokens: Any = Embedding(c.vocab_size, d, rngs=rngs) if config.own_embedding else None
        self.fc: Any = Linear(len(config.target_layer_ids) * d, d, rngs=rngs)
        self.hidden_norm = RMSNorm(d, c.rms_norm_eps)
        self.layers = nnx.List([DenseLayer(c, rngs=rngs) for _ in range(c.num_hidden_layers)])
        self.norm = RMSNorm(d, c.rms_norm_eps)
        self.lm_head: Any = Linear(d, heads, rngs=rngs) if config.own_head else None
        # From a draft id to the target's token: what is to be added.
        self.d2t: Any = nnx.Param(jnp.zeros((heads,), jnp.int32)) if config.mapped else None
        self.markov_head = sequential_head(config.head, config.markov_rank, d, c.vocab_size, heads, rngs=rngs)
        read = {"markov": d + config.markov_rank, "hidden": d, "none": 0}[config.confidence]
        self.confidence_head: Any = ConfidenceHead(read, bias=True, rngs=rngs) if read else None
        self.config = config

    def context(self, taps: Float[Array, "... m*d"]) -> Float[Array, "... d"]:
        """What all layers make keys and values of (eq. 2)."""
        return self.hidden_norm(self.fc(taps))

    def embed(self, target: DenseEnds, token: Int[Array, "..."]) -> Float[Array, "... d"]:
        """Rows of the drafter's embedding, or of the target's."""
        return target.embed(token) if self.embed_tokens is None else self.embed_tokens(token).astype(target.dtype)

    def base_logits(self, target: DenseEnds, hidden: Float[Array, "... d"]) -> Float32[Array, "... D"]:
        """Logits of the parallel pass over the drafted vocabulary, from rows behind the norm."""
        return target.head(hidden) if self.lm_head is None else self.lm_head(hidden, jnp.float32)

    def widen(self, vocab: int) -> Widen | None:
        """From logits over the drafted vocabulary to those over the target's; None where they are one."""
        drafts = self.config.draft_vocab_size
        if self.d2t is None:
            return None if drafts == vocab else lambda row: row[..., :vocab]  # a padded vocabulary
        token = jnp.arange(drafts) + self.d2t[...]
        place = jnp.full((vocab,), drafts, jnp.int32).at[token].set(jnp.arange(drafts, dtype=jnp.int32))
        return lambda row: jnp.pad(row, ((0, 0), (0, 1)), constant_values=-jnp.inf)[:, place]


class StandaloneDrafter:
    """`decode.protocols.Drafter` over a target and its drafter's weights; built inside the traced program.

    `projected`: context rows are the sum of the projected taps (a pipeline's ranks each add their own), not the taps.
    """

    choices = ()  # it has no routers

    def __init__(self, target: DenseEnds, model: Standalone, projected: bool = False):
        self.target, self.model, self.projected = target, model, projected

    @property
    def block_size(self) -> int:
        """Drafts of a block, gamma."""
        return self.model.config.block_size

    def init_cache(self, slots: int, max_len: int) -> tuple[KeyValueCache, ...]:
        """Context keys and values of every layer, by position."""
        return tuple(layer.self_attn.init_cache(slots, max_len, self.target.dtype) for layer in self.model.layers)

    def write_context(self, context: Float[Array, "B m*d"], rows: Rows, keep: Bool[Array, "B"], cache):
        """Writes every layer's keys and values of the kept context rows; see `decode.protocols.Drafter`."""
        if self.projected:
            fused = self.model.hidden_norm(context.astype(self.target.dtype))
        else:
            fused = self.model.context(context)
        keep = rows.to_lanes(keep) & rows.lane_valid
        written = []
        for layer, state in zip(self.model.layers, cache, strict=True):
            key, value = layer.self_attn.key_value(fused, rows.position)
            written.append(state.write(rows.to_lanes(key), rows.to_lanes(value), rows, keep))
        return tuple(written)

    def hidden(
        self, anchor: Int[Array, "R"], position: Int[Array, "R"], cache: tuple[KeyValueCache, ...]
    ) -> Float[Array, "R gamma d"]:
        """Rows behind the norm, one a draft, of the block `[anchor, mask, …]`."""
        config = self.model.config
        width = config.block_rows
        ids = jnp.full((anchor.shape[0], width), config.mask_token_id, anchor.dtype).at[:, 0].set(anchor)
        seen = [[visible_context(state, position, width)] for state in cache]
        rows = self.model.embed(self.target, ids)
        at = position[:, None] + jnp.arange(width)
        rows, _ = through_layers(self.model.layers, rows, at, seen, jnp.ones((width, width), bool))
        return self.model.norm(rows[:, width - config.block_size :])

    def propose(
        self,
        anchor: Int[Array, "R"],
        position: Int[Array, "R"],
        active: Bool[Array, "R"],
        sampling: SamplingState,
        cache: tuple[KeyValueCache, ...],
        draft_noise: DraftNoise = draft_gumbel,
    ) -> Proposal:
        """One pass over the block, then the head from left to right; see `decode.protocols.Drafter`."""
        m = self.model
        hidden = self.hidden(anchor, position, cache)
        base = m.base_logits(self.target, hidden)
        widen = m.widen(self.target.vocab_size)
        return draw(
            m.markov_head, m.confidence_head, base, hidden, anchor, position, sampling, draft_noise, widen
        )  # fmt: skip
