"""Shapes of what every pipeline rank holds, in closed form: no model is built and JAX is not imported.

The names and shapes are those of `stage.PipeStage`, which the tests compare them with.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from dspark_jax.config import DraftConfig, TargetConfig
from dspark_jax.config_dense import ModelConfig
from dspark_kernels.formats import block_shapes

Ranges = tuple[tuple[int, int], ...]
ITEM_SIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Leaf:
    """One array of a rank.

    Attributes:
      name: names the layer position, not the layer; ranks share a leaf of one name, shape and kind.
      kind: "weight" has the model's dtype; "fp32", "int" (32 bits) and "byte" have the same in every model.
      role: "matrix" is read whole by every tick, "experts" [experts, in, out] where rows visit them, "table" by row.
      split: divided over the expert ranks.
      numbers: weights that an element stands for in products: 2 for fp4 codes, 0 for scales.
    """

    name: str
    shape: tuple[int, ...]
    kind: Literal["weight", "fp32", "int", "byte"] = "weight"
    role: Literal["matrix", "experts", "table"] = "matrix"
    split: bool = False
    numbers: int = 1

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def bytes(self, item_size: int, expert: int) -> int:
        """Of one device; `item_size` is that of the model's dtype, `expert` the number of expert ranks."""
        total = self.size * {"weight": item_size, "byte": 1}.get(self.kind, 4)
        return total // expert if self.split else total


def _fp32(name: str, *shape: int) -> Leaf:
    return Leaf(name, shape, "fp32")


def _linear(c: TargetConfig, name: str, inputs: int, outputs: int, kept: bool | None = None) -> Iterator[Leaf]:
    """A linear map that is fp8 in published files; `kept` says whether it is codes here, by default the configuration does."""
    if not (c.linear_weights == "fp8" if kept is None else kept):
        yield Leaf(f"{name}.weight", (inputs, outputs))
        return
    codes, scale = block_shapes("fp8", inputs, outputs)
    yield Leaf(f"{name}.weight", codes, "byte")
    yield Leaf(f"{name}.scale", scale, "byte", numbers=0)


def _compressor(c: TargetConfig, name: str, ratio: int, width: int) -> Iterator[Leaf]:
    channels = width * (2 if ratio == c.csa_ratio else 1)
    yield Leaf(f"{name}.wkv.weight", (c.hidden_size, channels))
    yield Leaf(f"{name}.wgate.weight", (c.hidden_size, channels))
    yield _fp32(f"{name}.ape", ratio, channels)
    yield Leaf(f"{name}.norm.weight", (width,))


def _attention(c: TargetConfig, name: str, ratio: int) -> Iterator[Leaf]:
    d, heads = c.hidden_size, c.num_attention_heads
    yield from _linear(c, f"{name}.wq_a", d, c.q_lora_rank)
    yield Leaf(f"{name}.q_norm.weight", (c.q_lora_rank,))
    yield from _linear(c, f"{name}.wq_b", c.q_lora_rank, heads * c.head_dim)
    yield from _linear(c, f"{name}.wkv", d, c.head_dim)
    yield Leaf(f"{name}.kv_norm.weight", (c.head_dim,))
    codes, scale = block_shapes("fp8", c.group_width, c.o_lora_rank)
    yield Leaf(f"{name}.wo_a", (c.o_groups, *codes), "byte" if c.wo_a_codes else "weight")
    if c.wo_a_codes:
        yield Leaf(f"{name}.wo_a_scale", (c.o_groups, *scale), "byte", numbers=0)
    yield from _linear(c, f"{name}.wo_b", c.o_groups * c.o_lora_rank, d)
    yield _fp32(f"{name}.attn_sink", heads)
    if ratio:
        yield from _compressor(c, f"{name}.compressor", ratio, c.head_dim)
    if ratio == c.csa_ratio:
        yield from _linear(c, f"{name}.indexer.wq_b", c.q_lora_rank, c.index_n_heads * c.index_head_dim)
        yield Leaf(f"{name}.indexer.weights_proj.weight", (d, c.index_n_heads))
        yield from _compressor(c, f"{name}.indexer.compressor", ratio, c.index_head_dim)


def _experts(c: TargetConfig, name: str, hashed: bool) -> Iterator[Leaf]:
    d, e, f = c.hidden_size, c.n_routed_experts, c.moe_intermediate_size
    shared = f * c.n_shared_experts
    yield Leaf(f"{name}.gate.weight", (d, e))
    if hashed:
        yield Leaf(f"{name}.gate.tid2eid", (c.vocab_size, c.num_experts_per_tok), "int", "table")
    else:
        yield _fp32(f"{name}.gate.bias", e)
    for part, shape in (("w1", (d, f)), ("w3", (d, f)), ("w2", (f, d))):
        here = f"{name}.experts.{part}"
        if c.expert_weights == "dense":
            yield Leaf(here, (e, *shape), role="experts", split=True)
            continue
        codes, scale = block_shapes(c.expert_weights, *shape)
        yield Leaf(here, (e, *codes), "byte", "experts", True, 2 if c.expert_weights == "fp4" else 1)
        yield Leaf(f"{here}_scale", (e, *scale), "byte", "experts", True, 0)
    for part, shape in (("w1", (d, shared)), ("w3", (d, shared)), ("w2", (shared, d))):
        yield from _linear(c, f"{name}.shared_experts.{part}", *shape)


def block(c: TargetConfig, name: str, ratio: int, hashed: bool) -> Iterator[Leaf]:
    """A target layer or, with ratio 0 and not hashed, what a draft stage has in common with one."""
    mix = (2 + c.hc_mult) * c.hc_mult
    yield from _attention(c, f"{name}.attn", ratio)
    yield from _experts(c, f"{name}.ffn", hashed)
    for part in ("attn", "ffn"):
        yield Leaf(f"{name}.{part}_norm.weight", (c.hidden_size,))
        yield _fp32(f"{name}.hc_{part}.fn", c.hc_mult * c.hidden_size, mix)
        yield _fp32(f"{name}.hc_{part}.base", mix)
        yield _fp32(f"{name}.hc_{part}.scale", 3)


def _hyper_head(c: TargetConfig, name: str) -> Iterator[Leaf]:
    yield _fp32(f"{name}.fn", c.hc_mult * c.hidden_size, c.hc_mult)
    yield _fp32(f"{name}.base", c.hc_mult)
    yield _fp32(f"{name}.scale", 1)


def layer(c: TargetConfig, draft: DraftConfig | None, index: int, position: int) -> Iterator[Leaf]:
    """Target layer `index` at `position` of its rank, and the context projection of its tap."""
    yield from block(c, f"layers.{position}", c.compress_ratios[index], index < c.num_hash_layers)
    if draft and index in draft.target_layer_ids:
        kept = c.main_proj_codes(len(draft.target_layer_ids))
        yield from _linear(c, f"taps.{position}", c.hidden_size, c.hidden_size, kept)


def head(c: TargetConfig, expert: int) -> Iterator[Leaf]:
    """The end of the target, on the last rank."""
    yield from _hyper_head(c, "hc_head")
    yield Leaf("norm.weight", (c.hidden_size,))
    yield Leaf("head.weight", (c.hidden_size, padded_vocab(c, expert)), split=True)


def embedding(c: TargetConfig, expert: int) -> Leaf:
    """Of the first rank, and of the last one if it drafts."""
    return Leaf("embed.weight", (padded_vocab(c, expert), c.hidden_size), role="table", split=True)


def drafter(c: TargetConfig, draft: DraftConfig, position: int) -> Iterator[Leaf]:
    """The draft stages from layer position `position` on, and the heads of the last one."""
    d = c.hidden_size
    for stage in range(draft.num_stages):
        yield from block(c, f"layers.{position + stage}", 0, False)
    yield Leaf(f"layers.{position}.main_norm.weight", (d,))
    last, rank = f"layers.{position + draft.num_stages - 1}", 0 if draft.head == "none" else draft.markov_rank
    yield Leaf(f"{last}.norm.weight", (d,))
    yield from _hyper_head(c, f"{last}.hc_head")
    yield Leaf(f"{last}.confidence_head.proj.weight", (d + rank, 1))
    if rank:
        yield from sequential_head(c, draft, f"{last}.markov_head")


def sequential_head(c: TargetConfig, draft: DraftConfig, name: str) -> Iterator[Leaf]:
    """What every step of drafting reads; replicated over the expert ranks."""
    d, rank = c.hidden_size, draft.markov_rank
    yield Leaf(f"{name}.markov_w1.weight", (c.vocab_size, rank), role="table")
    yield Leaf(f"{name}.markov_w2.weight", (rank, c.vocab_size))
    if draft.head == "gated":
        yield Leaf(f"{name}.gate_proj.weight", (d + rank, rank))
        yield _fp32(f"{name}.gate_bias", rank)
    if draft.head == "rnn":
        yield Leaf(f"{name}.joint_proj.weight", (2 * rank + d, 3 * rank))
        yield _fp32(f"{name}.joint_bias", 3 * rank)


def rank_leaves(
    c: TargetConfig, draft: DraftConfig | None, ranges: Ranges, expert: int, rank: int, num_slots: int | None = None
) -> set[Leaf]:
    """Everything that `rank` holds; `num_slots` expert slots a layer, by default one an expert."""
    first, end = ranges[rank]
    last = rank == len(ranges) - 1
    found = {leaf for i in range(first, end) for leaf in layer(c, draft, i, i - first)}
    if rank == 0 or (last and draft):
        found.add(embedding(c, expert))
    if last:
        found.update(head(c, expert))
        if draft:
            found.update(drafter(c, draft, end - first))
    slots = c.n_routed_experts if num_slots is None else num_slots
    return {replace(leaf, shape=(slots, *leaf.shape[1:])) if leaf.role == "experts" else leaf for leaf in found}


def layer_cache(c: TargetConfig, ratio: int, name: str, max_len: int, gamma: int) -> Iterator[Leaf]:
    """State of one request slot in a target layer ("weight" is the dtype of activations here)."""
    tick = gamma + 1
    yield Leaf(f"{name}.window", (c.sliding_window + tick, c.head_dim))
    if ratio:
        yield from _compressor_cache(c, f"{name}.compressed", ratio, c.head_dim, max_len, tick)
    if ratio == c.csa_ratio:
        yield from _compressor_cache(c, f"{name}.index", ratio, c.index_head_dim, max_len, tick)


def _compressor_cache(c: TargetConfig, name: str, ratio: int, width: int, max_len: int, tick: int) -> Iterator[Leaf]:
    groups = 2 if ratio == c.csa_ratio else 1
    yield _fp32(f"{name}.raw", groups * ratio + tick + 1, 2 * groups * width)
    yield Leaf(f"{name}.entries", (max_len // ratio + 1, width))


def rank_cache(c: TargetConfig, draft: DraftConfig | None, ranges: Ranges, rank: int, max_len: int) -> set[Leaf]:
    """State of one request slot on `rank`, without the slots' axis."""
    first, end = ranges[rank]
    gamma = draft.block_size if draft else 0
    found = {
        leaf
        for i in range(first, end)
        for leaf in layer_cache(c, c.compress_ratios[i], f"0.{i - first}", max_len, gamma)
    }
    if draft and rank == len(ranges) - 1:
        shape = (c.sliding_window + gamma + 1, c.head_dim)
        found.update(Leaf(f"1.{stage}", shape) for stage in range(draft.num_stages))
    return found


def padded_vocab(c: ModelConfig, expert: int) -> int:
    """The vocabulary, filled up to a multiple of the expert ranks."""
    return -(-c.vocab_size // expert) * expert
