"""What one pipeline rank holds of a dense model and of its drafter, and how the whole model's parameters become that."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Float32, Int

from dspark_jax.config_dense import DenseConfig
from dspark_jax.config_drafter import DraftModelConfig, StandaloneConfig
from dspark_jax.decode.rows import Rows
from dspark_jax.drafters.draft_model import DraftModelDrafter
from dspark_jax.drafters.standalone import Standalone, StandaloneDrafter
from dspark_jax.models.layers import Linear, RMSNorm
from dspark_jax.models.qwen3 import DenseLayer, KeyValueCache, Qwen3
from dspark_jax.parallel.mesh import EXPERT, PIPE
from dspark_jax.parallel.parts import filled_up, rows_of_tap
from dspark_jax.parallel.stacking import Path
from dspark_jax.parallel.vocabulary import SplitEmbedding, SplitHead, split_logits
from dspark_kernels.precision import einsum

if TYPE_CHECKING:
    from dspark_jax.parallel.stage import PipelineSpec

EMBEDDING = -1  # id of the tap that is the embedding's output, on the first rank


class DenseStage(nnx.Module):
    """The layers of one rank, and the model's ends where they are this rank's: a `parts.Stage` with one residual stream.

    The first rank embeds. The last has the final norm, the output head and the whole drafter, and the embedding where that
    is also the head's or the drafter borrows it. Embedding and head are split over `expert`, all else is whole on every
    expert rank. A rank also owns the part of the drafter's `fc` that reads its layers.
    """

    def __init__(self, spec: "PipelineSpec", rank: int, *, rngs: nnx.Rngs):
        c, draft, (first, end) = spec.config, spec.draft, spec.ranges[rank]
        assert isinstance(c, DenseConfig) and isinstance(draft, StandaloneConfig | DraftModelConfig | None)
        last, d = rank == spec.pipe - 1, c.hidden_size
        self.layers = nnx.List([DenseLayer(c, rngs=rngs) for _ in range(first, end)])
        self.taps = nnx.Dict({_tap_name(i, first): Linear(d, d, rngs=rngs) for i in taps_of(spec, rank)})
        borrowed = isinstance(draft, StandaloneConfig) and not draft.own_embedding
        embeds = rank == 0 or (last and (c.tie_word_embeddings or borrowed))
        self.embed_tokens: Any = SplitEmbedding(spec.padded_vocab, d, EXPERT) if embeds else None
        self.norm: Any = RMSNorm(d, c.rms_norm_eps) if last else None
        whole = last and not c.tie_word_embeddings
        self.lm_head: Any = SplitHead(d, c.vocab_size, spec.padded_vocab, EXPERT) if whole else None
        self.draft: Any = _draft(spec, rngs) if last else None
        self.config, self.draft_config, self.dtype = c, draft, jnp.dtype(spec.dtype)

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def drafter(self) -> StandaloneDrafter | DraftModelDrafter | None:
        """The drafter that the last rank drives."""
        if self.draft is None:
            return None
        if isinstance(self.draft_config, DraftModelConfig):
            return DraftModelDrafter(self.draft, self.draft_config, self.vocab_size)
        return StandaloneDrafter(self, self.draft, projected=True)

    def init_cache(self, slots: int, max_len: int, block: int) -> tuple[KeyValueCache, ...]:
        """State of this rank's layers; see `decode.protocols.Target`."""
        return tuple(layer.self_attn.init_cache(slots, max_len, self.dtype) for layer in self.layers)

    def embed(self, token: Int[Array, "..."]) -> Float[Array, "... d"]:
        """Token vectors."""
        return self.embed_tokens(token.reshape(-1)).astype(self.dtype).reshape(*token.shape, -1)

    def embed_streams(self, token: Int[Array, "B"]) -> Float[Array, "B 1 d"]:
        """Token vectors as the one residual stream."""
        return self.embed(token)[:, None]

    def forward(
        self,
        rows: Rows,
        streams: Float[Array, "B 1 d"],
        context: Float32[Array, "B d"],
        cache: Sequence[KeyValueCache],
    ) -> tuple[Float[Array, "B 1 d"], Float32[Array, "B d"], tuple[KeyValueCache, ...], tuple[()]]:
        """This rank's layers: new stream, the context projection with this rank's share added, new state, and no choices."""
        x, states = streams[:, 0], []
        context = self._with_tap(context, "embedding", x)
        for j, layer in enumerate(self.layers):
            with jax.named_scope(f"layer_{j}"):
                x, state = layer(x, rows, cache[j])
            states.append(state)
            context = self._with_tap(context, str(j), x)
        return x[:, None], context, tuple(states), ()

    def _with_tap(self, context: Float32[Array, "B d"], name: str, x: Float[Array, "B d"]) -> Float32[Array, "B d"]:
        return context + self.taps[name](x, jnp.float32) if name in self.taps else context

    def hidden(self, streams: Float[Array, "B 1 d"]) -> Float[Array, "B d"]:
        """Rows for `logits` (last rank)."""
        return streams[:, 0]

    def logits(self, hidden: Float[Array, "... d"]) -> Float32[Array, "... V"]:
        """fp32 logits of hidden rows (last rank)."""
        return self.head(self.norm(hidden))

    def head(self, hidden: Float[Array, "... d"]) -> Float32[Array, "... V"]:
        """fp32 logits of rows behind a norm: the output head, which a drafter may borrow."""
        if self.lm_head is not None:
            return self.lm_head(hidden, jnp.float32)
        weight = self.embed_tokens.weight[...]
        return split_logits(hidden, lambda rows: einsum("nd,vd->nv", rows, weight), self.vocab_size, EXPERT)


def _draft(spec: "PipelineSpec", rngs: nnx.Rngs) -> Standalone | Qwen3 | None:
    """The drafter's weights, of which the parts of `fc` are the ranks' `taps`."""
    draft = spec.draft
    if isinstance(draft, DraftModelConfig):
        return Qwen3(draft.model, dtype=spec.dtype, rngs=rngs)
    if not isinstance(draft, StandaloneConfig):
        return None
    found = Standalone(draft, rngs=rngs)
    found.fc = None
    return found


def taps_of(spec: "PipelineSpec", rank: int) -> list[int]:
    """Ids of the target layers on this rank that the drafter reads; the embedding is the first rank's."""
    first, end = spec.ranges[rank]
    ids = spec.draft.target_layer_ids if spec.draft else ()
    return [i for i in ids if first <= i < end or (rank == 0 and i == EMBEDDING)]


def _tap_name(layer: int, first: int) -> str:
    return "embedding" if layer == EMBEDDING else str(layer - first)


class DenseParts:
    """`parts.Parts` of a dense model with a drafter of its own files, or without one."""

    def __init__(self, spec: "PipelineSpec"):
        self.spec = spec

    def stage(self, rank: int, rngs: nnx.Rngs) -> DenseStage:
        return DenseStage(self.spec, rank, rngs=rngs)

    def name(self, rank: int, path: Path) -> Path:
        """The drafter's layers are the positions behind the last rank's."""
        first, end = self.spec.ranges[rank]
        start = 2 if path[:2] == ("draft", "layers") else 3 if path[:3] == ("draft", "model", "layers") else 0
        return ("layers", end - first + int(path[start]), *path[start + 1 :]) if start else path

    def origin(self, rank: int, path: Path) -> Path:
        if path[0] == "taps":
            return ("draft", "fc", "weight")
        if path[0] == "layers":
            return ("target", "model", "layers", self.spec.ranges[rank][0] + int(path[1]), *path[2:])
        if path[0] in ("embed_tokens", "norm"):
            return ("target", "model", *path)
        return path if path[0] == "draft" else ("target", *path)

    def taken(self, rank: int, path: Path, value: np.ndarray) -> np.ndarray:
        spec = self.spec
        if path[0] == "taps":
            layer = EMBEDDING if path[1] == "embedding" else spec.ranges[rank][0] + int(path[1])
            return rows_of_tap(value, spec.draft.target_layer_ids if spec.draft else (), layer, spec.config.hidden_size)
        if path[0] in ("embed_tokens", "lm_head"):
            return filled_up(value, 0 if path[0] == "embed_tokens" else 1, spec.padded_vocab)
        return value

    def partition(self, path: Path) -> PartitionSpec:
        if path[0] == "embed_tokens":
            return PartitionSpec(PIPE, EXPERT)
        return PartitionSpec(PIPE, None, EXPERT) if path[0] == "lm_head" else PartitionSpec(PIPE)
