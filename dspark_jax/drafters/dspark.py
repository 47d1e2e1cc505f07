"""DSpark embedded in a V4-style target: MoE stages that draft a block in one pass (paper section 3; `mtp.*` keys).

Each stage is a block of the target's own shape with a window of context keys made from the target's tapped layers.
The block's rows see each other in both directions.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int

from dspark_jax.config import DraftConfig, TargetConfig
from dspark_jax.decode.noise import DraftNoise, draft_gumbel
from dspark_jax.decode.protocols import Proposal
from dspark_jax.decode.rows import Rows
from dspark_jax.decode.sampling import SamplingState
from dspark_jax.drafters.draw_kernel import draw
from dspark_jax.drafters.heads import ConfidenceHead, forced_logits, sequential_head
from dspark_jax.eplb.placement import PlacedLayer, Placement
from dspark_jax.models.attention import Projections, sink_attention
from dspark_jax.models.block import Block
from dspark_jax.models.cache import ring_history, ring_write, zero_where
from dspark_jax.models.hyper_connection import HyperHead
from dspark_jax.models.layers import Linear, RMSNorm
from dspark_jax.models.moe import Routed
from dspark_jax.models.numerics import INPUT_GROUP, fp8_rounded


class Ends(Protocol):
    """What the stages borrow from the target: its embedding and its output head."""

    dtype: Any
    axis: str | None
    head: Any

    def embed_streams(self, token: Int[Array, "..."]) -> Float[Array, "... n d"]:
        """Embeddings of tokens, once for each of the n residual streams."""
        ...


class Stage(Block):
    """One draft stage. The first also projects the taps; the last also owns the heads."""

    def __init__(
        self, config: TargetConfig, draft: DraftConfig, index: int, placed: PlacedLayer | None = None, *, rngs: nnx.Rngs
    ):
        super().__init__(config, Projections(config, False, rngs=rngs), False, placed, rngs=rngs)
        d = config.hidden_size
        first, last = index == 0, index == draft.num_stages - 1
        # Any: which of these a stage has depends on its place, and the checkpoint's key names follow the attribute names.
        taps = len(draft.target_layer_ids)
        options = {"codes": config.main_proj_codes(taps), "wide": True}
        self.main_proj: Any = Linear(taps * d, d, rngs=rngs, **options) if first else None
        self.main_norm: Any = RMSNorm(d, config.rms_norm_eps) if first else None
        self.norm: Any = RMSNorm(d, config.rms_norm_eps) if last else None
        self.hc_head: Any = HyperHead(config) if last else None
        head = (draft.head, draft.markov_rank, d, config.vocab_size)
        self.markov_head: Any = sequential_head(*head, rngs=rngs) if last else None
        rank = 0 if draft.head == "none" else draft.markov_rank
        self.confidence_head: Any = ConfidenceHead(d + rank, rngs=rngs) if last else None


class DSpark(nnx.Module):
    """The stages of one checkpoint. The target's embedding and head are shared, so methods take the target.

    Stage i is layer `num_hidden_layers + i` of the target's `placement`, which the stages inherit.
    """

    def __init__(
        self, config: TargetConfig, draft: DraftConfig, placement: Placement | None = None, *, rngs: nnx.Rngs
    ):
        base = config.num_hidden_layers
        placed = [PlacedLayer(placement, base + i) if placement else None for i in range(draft.num_stages)]
        self.mtp = nnx.List([Stage(config, draft, i, at, rngs=rngs) for i, at in enumerate(placed)])
        self.config, self.draft = config, draft

    def context_kv(self, context: Float[Array, "B m*d"], position: Int[Array, "B"]) -> list[Float[Array, "B c"]]:
        """Context keys of every stage from concatenated taps (eqs. 2 and 3). The norm is applied once, after the
        projection.
        """
        if self.config.fp8_inputs:  # tap by tap, as pipeline ranks do
            taps = context.reshape(*context.shape[:-1], -1, self.config.hidden_size)
            context = fp8_rounded(taps, INPUT_GROUP).reshape(context.shape)
        return self.projected_kv(self.mtp[0].main_proj(context), position)

    def projected_kv(self, projected: Float[Array, "B d"], position: Int[Array, "B"]) -> list[Float[Array, "B c"]]:
        """The same from taps that are projected and summed, but not normed."""
        main = self.mtp[0].main_norm(projected)
        return [stage.attn.key_value(main, position) for stage in self.mtp]

    def block(
        self,
        target: Ends,
        anchor: Int[Array, "N"],
        position: Int[Array, "N"],
        active: Bool[Array, "N"],
        history: Sequence[Float[Array, "N W c"]],
        history_visible: Bool[Array, "N W"],
    ) -> tuple[Float[Array, "N gamma d"], tuple[Routed, ...]]:
        """Hidden rows (before the final norm) of the block `[anchor, noise × (gamma - 1)]`, anchor at `position`, and what
        each stage's router chose.

        `history[s]` are stage s's context keys in front of the anchor; keys that are not visible must be finite.
        """
        gamma = self.draft.block_size
        n = anchor.shape[0]
        ids = jnp.full((n, gamma), self.draft.noise_token_id, anchor.dtype).at[:, 0].set(anchor)
        at = (position[:, None] + jnp.arange(gamma)).reshape(-1)
        valid = jnp.repeat(active, gamma)
        streams = target.embed_streams(ids.reshape(-1))
        visible = jnp.concatenate([history_visible, jnp.ones((n, gamma), bool)], axis=1)
        visible = jnp.broadcast_to(visible[:, None], (n, gamma, visible.shape[1]))
        choices = []
        for s, stage in enumerate(self.mtp):

            def attend(x, stage=stage, s=s):
                _, query = stage.attn.query(x, at)
                own = stage.attn.key_value(x, at).reshape(n, gamma, -1)
                keys = jnp.concatenate([history[s].astype(own.dtype), own], axis=1)
                heads, _ = sink_attention(
                    query.reshape(n, gamma, *query.shape[1:]), keys[:, None], visible, None, stage.attn.attn_sink[...]
                )
                return stage.attn.output(heads.reshape(n * gamma, *heads.shape[2:]), at), None

            with jax.named_scope(f"stage_{s}"):
                streams, _, routed = stage(streams, ids.reshape(-1), valid, attend, target.axis)
            choices.append(routed)
        return self.mtp[-1].hc_head(streams).reshape(n, gamma, -1), tuple(choices)

    def base_logits(self, target: Ends, hidden: Float[Array, "... d"]) -> Float32[Array, "... V"]:
        """Logits of the parallel pass, by the target's head behind the last stage's norm."""
        return target.head(self.mtp[-1].norm(hidden), jnp.float32)

    def forced(
        self, target: Ends, hidden: Float[Array, "N gamma d"], previous: Int[Array, "N gamma"]
    ) -> tuple[Float32[Array, "N gamma V"], Float32[Array, "N gamma"]]:
        """Logits and confidence logits when row k follows token `previous[:, k]` (training; slot 0 follows the
        anchor).
        """
        last = self.mtp[-1]
        return forced_logits(last.markov_head, last.confidence_head, self.base_logits(target, hidden), hidden, previous)

    def sample(
        self,
        target: Ends,
        hidden: Float[Array, "R gamma d"],
        anchor: Int[Array, "R"],
        position: Int[Array, "R"],
        sampling: SamplingState,
        draft_noise: DraftNoise = draft_gumbel,
    ) -> Proposal:
        """Draws the block left to right, see `draw_block`."""
        last = self.mtp[-1]
        base = self.base_logits(target, hidden)
        return draw(last.markov_head, last.confidence_head, base, hidden, anchor, position, sampling, draft_noise)


class DSparkDrafter:
    """`decode.protocols.Drafter` over a target and its embedded stages; built inside the traced program.

    `projected`: context rows are the sum of the projected taps (a pipeline's ranks each add their own), not the taps.

    Attributes:
      choices: what the stages' routers chose in the last `propose` of the program that is being traced.
    """

    def __init__(self, target: Ends, stages: DSpark, projected: bool = False):
        self.target, self.stages, self.projected = target, stages, projected
        self.choices: tuple[Routed, ...] = ()

    @property
    def block_size(self) -> int:
        """Drafts of a block, gamma."""
        return self.stages.draft.block_size

    def init_cache(self, slots: int, max_len: int) -> tuple[Float[Array, "R n c"], ...]:
        """One ring of `W + gamma` context keys a stage, and its trash slot."""
        c = self.stages.config
        shape = (slots, c.sliding_window + self.block_size + 1, c.head_dim)
        return tuple(jnp.zeros(shape, self.target.dtype) for _ in self.stages.mtp)

    def write_context(self, context: Float[Array, "B m*d"], rows: Rows, keep: Bool[Array, "B"], cache):
        """Writes keys of the kept context rows into each stage's ring; see `decode.protocols.Drafter`."""
        keys_of = self.stages.projected_kv if self.projected else self.stages.context_kv
        keys = keys_of(context, rows.position)
        keep = rows.to_lanes(keep) & rows.lane_valid
        return tuple(
            ring_write(ring, zero_where(rows.to_lanes(k), ~keep), rows, keep)
            for ring, k in zip(cache, keys, strict=True)
        )

    def propose(
        self,
        anchor: Int[Array, "R"],
        position: Int[Array, "R"],
        active: Bool[Array, "R"],
        sampling: SamplingState,
        cache,
        draft_noise: DraftNoise = draft_gumbel,
    ) -> Proposal:
        """All stages in one pass over the block, then the head from left to right; see `decode.protocols.Drafter`."""
        window = self.stages.config.sliding_window
        history = [ring_history(ring, position, window) for ring in cache]
        visible = (position[:, None] - window + jnp.arange(window)) >= 0
        hidden, self.choices = self.stages.block(self.target, anchor, position, active, history, visible)
        return self.stages.sample(self.target, hidden, anchor, position, sampling, draft_noise)
