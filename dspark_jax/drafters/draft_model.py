"""A dense model as drafter: token after token, or as PARD all in one pass (dspark_serving.md, section 1.4)."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.config_drafter import DraftModelConfig
from dspark_jax.decode.noise import DraftNoise, draft_gumbel
from dspark_jax.decode.protocols import Proposal
from dspark_jax.decode.rows import Rows
from dspark_jax.decode.sampling import SamplingState
from dspark_jax.drafters.dense_block import through_layers, visible_context
from dspark_jax.drafters.draw import draw_block
from dspark_jax.drafters.heads import NoHead
from dspark_jax.models.qwen3 import Keys, KeyValueCache, Qwen3


class DraftModelDrafter:
    """`decode.protocols.Drafter` over a model of its own, which reads tokens and nothing of the target.

    `vocab` is the target's vocabulary, of which the model's own may be a padded one.
    """

    choices = ()  # it has no routers

    def __init__(self, model: Qwen3, config: DraftModelConfig, vocab: int):
        self.model, self.config, self.vocab = model, config, vocab

    @property
    def block_size(self) -> int:
        """Drafts of a block, gamma."""
        return self.config.block_size

    def init_cache(self, slots: int, max_len: int) -> tuple[KeyValueCache, ...]:
        """The model's own state."""
        return self.model.init_cache(slots, max_len, self.block_size + 1)

    def write_context(self, context: Float[Array, "B 0"], rows: Rows, keep: Bool[Array, "B"], cache):
        """Reads the rows' tokens. Rows that are not kept are stored too: what stands behind the anchor is not looked at."""
        return self.model.forward(rows, cache)[2]

    def propose(
        self,
        anchor: Int[Array, "R"],
        position: Int[Array, "R"],
        active: Bool[Array, "R"],
        sampling: SamplingState,
        cache: tuple[KeyValueCache, ...],
        draft_noise: DraftNoise = draft_gumbel,
    ) -> Proposal:
        """One pass over the block where there is a mask token, else a pass a draft; see `decode.protocols.Drafter`."""
        mask = self.config.mask_token_id
        if mask is None:
            return self._one_by_one(anchor, position, sampling, cache, draft_noise)
        width = self.block_size
        ids = jnp.full((anchor.shape[0], width), mask, anchor.dtype).at[:, 0].set(anchor)
        seen = [[visible_context(state, position, width)] for state in cache]
        own = jnp.tril(jnp.ones((width, width), bool))
        at = position[:, None] + jnp.arange(width)
        hidden, _ = through_layers(self.model.model.layers, self.model.embed(ids), at, seen, own)
        base = self.model.logits(hidden)[..., : self.vocab]
        return draw_block(NoHead(), None, base, hidden, anchor, position, sampling, draft_noise)

    def _one_by_one(self, anchor, position, sampling: SamplingState, cache, draft_noise: DraftNoise) -> Proposal:
        context = [visible_context(state, position, 1) for state in cache]
        earlier: list[Keys] | None = None
        token, drafts = anchor, []
        for k in range(self.block_size):
            seen = [[c] if earlier is None else [c, earlier[i]] for i, c in enumerate(context)]
            rows = self.model.embed(token)[:, None]
            at = position[:, None] + k
            hidden, own = through_layers(self.model.model.layers, rows, at, seen, jnp.ones((1, 1), bool))
            earlier = own if earlier is None else [_joined(*pair) for pair in zip(earlier, own, strict=True)]
            base = self.model.logits(hidden)[..., : self.vocab]

            def noise(seed, position, _, vocab, k=k):
                return draft_noise(seed, position, k, vocab)

            drafts.append(draw_block(NoHead(), None, base, hidden, token, position, sampling, noise))
            token = drafts[-1].tokens[:, 0]
        return Proposal(*(jnp.concatenate(parts, axis=1) for parts in zip(*map(_parts, drafts), strict=True)))


def _joined(first: Keys, second: Keys) -> Keys:
    return Keys(*(jnp.concatenate(pair, axis=2) for pair in zip(first, second, strict=True)))


def _parts(p: Proposal) -> tuple:
    return p.tokens, p.logits, p.confidence
