"""What one pipeline rank holds of a model, and how a whole model's parameters become the ranks' parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Float32, Int

from dspark_jax.config import DraftConfig, TargetConfig
from dspark_jax.config_dense import DenseConfig, ModelConfig
from dspark_jax.config_drafter import AnyDraftConfig
from dspark_jax.decode.rows import Rows
from dspark_jax.drafters.dspark import DSpark, DSparkDrafter
from dspark_jax.eplb.placement import PlacedLayer, Placement, expand_by_slot
from dspark_jax.errors import CheckpointError, ConfigError
from dspark_jax.models.attention import Attention, AttentionCache
from dspark_jax.models.block import Block
from dspark_jax.models.deepseek_v4 import tap
from dspark_jax.models.hyper_connection import HyperHead
from dspark_jax.models.layers import Linear, RMSNorm
from dspark_jax.models.moe import Routed
from dspark_jax.parallel.dense_stage import DenseParts
from dspark_jax.parallel.mesh import EXPERT, PIPE
from dspark_jax.parallel.parts import Parts, Stage, filled_up, own_shape, rows_of_tap
from dspark_jax.parallel.stacking import Path, Stacked, path_of
from dspark_jax.parallel.vocabulary import SplitEmbedding, SplitHead

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class PipelineSpec:
    """A model cut into stages.

    Attributes:
      config, draft: of the whole model; `draft` None serves the target alone.
      ranges: the half-open range of target layers of every rank, in order, without gaps. The drafter lives on the last.
      expert: ranks that experts, vocabulary and request rows are split over.
      dtype: of activations.
      placement: where the experts of all layers are, draft stages included; None has each once, in order.
    """

    config: ModelConfig
    draft: AnyDraftConfig | None
    ranges: Ranges
    expert: int
    dtype: Any = jnp.float32
    placement: Placement | None = None

    @property
    def pipe(self) -> int:
        """P, the number of ranks."""
        return len(self.ranges)

    @property
    def gamma(self) -> int:
        """Drafts of a block; 0 without a drafter."""
        return self.draft.block_size if self.draft else 0

    @property
    def context_width(self) -> int:
        """Channels of what the ranks hand the drafter of their layers; 0 where it reads tokens alone, or there is none."""
        return self.config.hidden_size if self.draft and self.draft.target_layer_ids else 0

    @property
    def expert_layers(self) -> tuple[tuple[int, ...], ...]:
        """For every rank the layers of its positions in the one namespace: its target layers, then draft stages. A dense
        model has none.
        """
        if not self.config.n_routed_experts:
            return ((),) * self.pipe
        base = self.config.num_hidden_layers
        stages = range(base, base + (self.draft.num_stages if self.draft else 0))
        target = [tuple(range(first, end)) for first, end in self.ranges]
        return (*target[:-1], (*target[-1], *stages))

    def placed(self, layer: int) -> PlacedLayer | None:
        """Slots of `layer` of the namespace."""
        return None if self.placement is None else PlacedLayer(self.placement, layer)

    @property
    def padded_vocab(self) -> int:
        """The vocabulary, filled up to a multiple of the expert ranks."""
        return -(-self.config.vocab_size // self.expert) * self.expert


class PipeStage(nnx.Module):
    """The layers of one rank, and the model's ends where they are this rank's.

    The first rank embeds. The last has the final norm and the output head, and if there is a drafter its stages and an
    own copy of the embedding. A rank also owns the part of the drafter's context projection that reads its layers.
    """

    def __init__(self, spec: PipelineSpec, rank: int, *, rngs: nnx.Rngs):
        c, draft, (first, end) = spec.config, spec.draft, spec.ranges[rank]
        assert isinstance(c, TargetConfig) and isinstance(draft, DraftConfig | None)
        last = rank == spec.pipe - 1
        attention = [Attention(c, c.compress_ratios[i], rngs=rngs) for i in range(first, end)]
        layers = zip(range(first, end), attention, strict=True)
        self.layers = nnx.List([Block(c, a, i < c.num_hash_layers, spec.placed(i), rngs=rngs) for i, a in layers])
        tapped = [i - first for i in (draft.target_layer_ids if draft else ()) if first <= i < end]
        codes = draft is not None and c.main_proj_codes(len(draft.target_layer_ids))
        options = {"fp8_inputs": c.fp8_inputs, "codes": codes, "wide": True}
        self.taps = nnx.Dict({str(j): Linear(c.hidden_size, c.hidden_size, rngs=rngs, **options) for j in tapped})
        embeds = rank == 0 or (last and draft is not None)
        self.embed: Any = SplitEmbedding(spec.padded_vocab, c.hidden_size, EXPERT) if embeds else None
        self.hc_head: Any = HyperHead(c) if last else None
        self.norm: Any = RMSNorm(c.hidden_size, c.rms_norm_eps) if last else None
        self.head: Any = SplitHead(c.hidden_size, c.vocab_size, spec.padded_vocab, EXPERT) if last else None
        self.draft: Any = DSpark(c, draft, spec.placement, rngs=rngs) if last and draft is not None else None
        if self.draft is not None:
            self.draft.mtp[0].main_proj = None  # its parts are the ranks' `taps`
        self.config, self.dtype, self.rank = c, jnp.dtype(spec.dtype), rank
        self.axis: str | None = EXPERT

    @property
    def vocab_size(self) -> int:
        """Channels of `logits`."""
        return self.config.vocab_size

    @property
    def drafter(self) -> DSparkDrafter | None:
        """The drafter that the last rank drives."""
        return None if self.draft is None else DSparkDrafter(self, self.draft, projected=True)

    def init_cache(self, slots: int, max_len: int, block: int) -> tuple[AttentionCache, ...]:
        """State of this rank's layers; see `decode.protocols.Target`."""
        return tuple(layer.attn.init_cache(slots, max_len, block, self.dtype) for layer in self.layers)

    def embed_streams(self, token: Int[Array, "B"]) -> Float[Array, "B n d"]:
        """Token vectors, copied to every residual stream."""
        x = self.embed(token).astype(self.dtype)
        return jnp.broadcast_to(x[:, None, :], (x.shape[0], self.config.hc_mult, x.shape[-1]))

    def forward(
        self,
        rows: Rows,
        streams: Float[Array, "B n d"],
        context: Float32[Array, "B d"],
        cache: Sequence[AttentionCache],
    ) -> tuple[Float[Array, "B n d"], Float32[Array, "B d"], tuple[AttentionCache, ...], tuple[Routed, ...]]:
        """This rank's layers: new streams, the context projection with this rank's share added, new state, and what each
        layer's router chose.
        """
        states, choices = [], []
        for j, layer in enumerate(self.layers):
            with jax.named_scope(f"layer_{j}"):
                streams, state, routed = layer(
                    streams, rows.token, rows.valid, lambda x, layer=layer, j=j: layer.attn(x, rows, cache[j]), self.axis
                )
            states.append(state)
            choices.append(routed)
            if str(j) in self.taps:
                context = context + self.taps[str(j)](tap(streams), jnp.float32)
        return streams, context, tuple(states), tuple(choices)

    def hidden(self, streams: Float[Array, "B n d"]) -> Float[Array, "B d"]:
        """Rows for `logits` (last rank)."""
        return self.hc_head(streams)

    def logits(self, hidden: Float[Array, "... d"]) -> Float32[Array, "... V"]:
        """fp32 logits of hidden rows (last rank)."""
        return self.head(self.norm(hidden), jnp.float32)


class V4Parts:
    """`parts.Parts` of a DeepSeek-V4-style model with its embedded drafter."""

    def __init__(self, spec: PipelineSpec):
        self.spec = spec

    def stage(self, rank: int, rngs: nnx.Rngs) -> PipeStage:
        """See `parts.Parts`."""
        return PipeStage(self.spec, rank, rngs=rngs)

    def name(self, rank: int, path: Path) -> Path:
        """Draft stages are the positions behind the last rank's layers."""
        first, end = self.spec.ranges[rank]
        if path[:2] == ("draft", "mtp"):
            return ("layers", end - first + int(path[2]), *path[3:])
        return path

    def origin(self, rank: int, path: Path) -> Path:
        """See `parts.Parts`."""
        if path[0] == "taps":
            return ("draft", "mtp", 0, "main_proj", *path[2:])
        if path[0] == "layers":
            return ("target", "layers", self.spec.ranges[rank][0] + int(path[1]), *path[2:])
        return path if path[0] == "draft" else ("target", *path)

    def taken(self, rank: int, path: Path, value: np.ndarray) -> np.ndarray:
        """Experts by slot, if they are placed."""
        spec = self.spec
        if path[0] == "taps":
            ids = spec.draft.target_layer_ids if spec.draft else ()
            return rows_of_tap(value, ids, spec.ranges[rank][0] + int(path[1]), value.shape[0] // len(ids))
        if path[0] in ("embed", "head"):
            return filled_up(value, 0 if path[0] == "embed" else 1, spec.padded_vocab)
        placed = spec.placed(self.layer_of(rank, path)) if "experts" in path else None
        return expand_by_slot(value, placed.tables.slot_to_expert) if placed else value

    def partition(self, path: Path) -> PartitionSpec:
        """See `parts.Parts`."""
        if "experts" in path or path[0] == "embed":
            return PartitionSpec(PIPE, EXPERT)
        return PartitionSpec(PIPE, None, EXPERT) if path[0] == "head" else PartitionSpec(PIPE)

    def layer_of(self, rank: int, path: Path) -> int:
        """Layer of the namespace that a leaf of a rank's block belongs to."""
        if path[0] == "draft":
            return self.spec.config.num_hidden_layers + int(path[2])
        return self.spec.ranges[rank][0] + int(path[1])


class Pipeline:
    """The stages of a model and the layout of their parameters.

    Args:
      spec: how the model is cut.
      params: parameters of the whole model, `nnx.split(SpeculativeLM)[1]` or a `DenseLM`'s, as arrays or shapes.

    Attributes:
      spec: as given.
      whole: shapes of `params`.
      params: layout of the ranks' parameters.

    Raises CheckpointError if `params` lack what a rank needs, ConfigError if `spec` does not fit the model.
    """

    def __init__(self, spec: PipelineSpec, params: nnx.State):
        self.spec = spec
        self.parts: Parts = DenseParts(spec) if isinstance(spec.config, DenseConfig) else V4Parts(spec)
        check_ranges(spec.ranges, spec.config.num_hidden_layers)
        # Shapes alone: the parameters themselves must not stay on the host for as long as the pipeline lives.
        self.whole: nnx.State = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
        self._whole = {path_of(p): x for p, x in jax.tree_util.tree_flatten_with_path(self.whole)[0]}
        stages = [nnx.eval_shape(lambda rank=rank: self.parts.stage(rank, nnx.Rngs(0))) for rank in range(spec.pipe)]
        split = [nnx.split(stage) for stage in stages]
        self._graphs = [graph for graph, _ in split]
        shapes = [
            jax.tree_util.tree_map_with_path(lambda p, x, rank=rank: own_shape(x, self._origin(rank, path_of(p))), state)
            for rank, (_, state) in enumerate(split)
        ]
        self.params = Stacked(shapes, self.parts.name)

    def stage(self, leaves: dict[str, Any], rank: int) -> Stage:
        """The module of `rank` over its leaves."""
        return nnx.merge(self._graphs[rank], self.params.take(leaves, rank))

    def place(self, params: nnx.State, mesh: Mesh) -> dict[str, jax.Array]:
        """The parameters on the mesh, leaf by leaf."""
        whole = {path_of(p): x for p, x in jax.tree_util.tree_flatten_with_path(params)[0]}

        def source(rank: int, path: Path) -> np.ndarray:
            return self.parts.taken(rank, path, np.asarray(_leaf(whole, self.parts.origin(rank, path))))

        return self.params.place(source, lambda path: NamedSharding(mesh, self.parts.partition(path)))

    def layer_of(self, rank: int, path: Path) -> int:
        """Layer of the namespace that a leaf of experts belongs to."""
        assert isinstance(self.parts, V4Parts)
        return self.parts.layer_of(rank, path)

    def abstract(self, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and shardings of what `place` gives, to compile for."""
        return {
            key: jax.ShapeDtypeStruct((self.spec.pipe, *x.shape), x.dtype, sharding=NamedSharding(mesh, self.specs[key]))
            for key, x in self.params.shapes.items()
        }

    @cached_property
    def specs(self) -> dict[str, PartitionSpec]:
        """Partition of the parameters by key."""
        owners = {key: path for paths in self.params.paths for key, path in paths.items()}
        return {key: self.parts.partition(owners[key]) for key in self.params.shapes}

    def _origin(self, rank: int, path: Path) -> Any:
        return _leaf(self._whole, self.parts.origin(rank, path))


def _leaf(whole: Mapping[Path, Any], path: Path) -> Any:
    if path not in whole:
        what = "draft stages" if path[0] == "draft" else "target"
        raise CheckpointError(f"the model lacks {'.'.join(map(str, path))}, which its {what} need on this mesh")
    return whole[path]


def check_ranges(ranges: Ranges, layers: int) -> None:
    """Raises ConfigError unless the ranges cover [0, layers) in order, each with at least one layer."""
    edges = [first for first, _ in ranges] + [layers]
    sound = edges[0] == 0 and all(end == after and first < end for (first, end), after in zip(ranges, edges[1:], strict=True))
    if not sound:
        raise ConfigError(
            f"stages {[list(r) for r in ranges]}: expected consecutive half-open ranges [first, end) that cover [0, {layers}),"
            " each with at least one layer"
        )
