"""What a decoding tick costs a pipeline rank: seconds out of bytes read, products, and launches.

A decoding tick reads nearly every weight once for a few rows, so bytes over the read bandwidth dominate. Products run
beside the reading: both together take little more than the longer one (`CostModel.overlap`). Launches are added. What all
ranks pay alike (the hop, the dispatch) is left out: it cannot move a cut. So are the expert collectives, which every
layer and stage has.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import NamedTuple

from dspark_jax.config import DraftConfig, TargetConfig
from dspark_jax.errors import ConfigError, raise_all
from dspark_jax.parallel import leaves
from dspark_jax.parallel.leaves import ITEM_SIZE, Leaf


@dataclass(frozen=True)
class Workload:
    """One decoding tick of one microbatch.

    Attributes:
      rows: target rows of the tick over all expert ranks, `gamma + 1` a request.
      context: positions in front of the rows; also the capacity of the caches.
      expert: ranks that experts, vocabulary and requests are split over.
      chunk, stops: sizes of the item, see `ring.RingConfig`.
      dtype: of weights and activations.
      num_slots: expert slots of a layer under a placement, which take memory; None is one an expert. Costs stay those of
        the experts: replicas share an expert's rows.
    """

    rows: int
    context: int
    expert: int = 1
    chunk: int = 64
    stops: int = 8
    dtype: str = "bfloat16"
    num_slots: int | None = None

    @property
    def item_size(self) -> int:
        """Bytes of a weight or an activation."""
        return ITEM_SIZE[self.dtype]

    def local_slots(self, gamma: int) -> int:
        """Requests of the microbatch on one expert rank."""
        return math.ceil(math.ceil(self.rows / (gamma + 1)) / self.expert)


class Work(NamedTuple):
    """Bytes read or written, and floating-point operations, of one device."""

    bytes: float
    flops: float


class _Rows(NamedTuple):
    """Rows of a pass: of all expert ranks together, of one, and those of all that choose their experts independently."""

    all: int
    local: int
    routed: float


@dataclass(frozen=True)
class CostModel:
    """Rates of one device; the defaults are one H200's (jax 0.11.2).

    The launch was measured by itself, all else is fitted to the pieces and stages of `bench.stage_times` (V4-Flash's shapes,
    24 to 384 rows, with the kernels), see docs/pipeline.md. Launch counts stand for whatever takes the same time whatever the
    rows.

    Attributes:
      read_bandwidth: bytes/s (a skinny bf16 product [8, 4096] × [4096, 65536] reaches 4.0e12 to 4.2e12).
      matmul_rate: flop/s of the products (a bf16 product 8192³ reaches 766e12).
      overlap: exponent p in (reading^p + computing^p)^(1/p): 1 is the sum of both times, a large one the longer of them.
      launch: seconds that a small product takes beyond its bytes (7 us in all, of which 2 are an 8 MB weight's).
      layer_launches: of a layer: products, routing with its top-k, norms and mixing.
      compressor_launches: two products and the pooling.
      indexer_launches: four products, its compressor, top-k and the gather of the chosen entries.
      head_launches: collapse, norm, product; then verification with its search for the thresholds of top-k and top-p.
      step_launches: of one step of the sequential head: bias, law with the same search, noise, argmax.
      logit_passes: times that sampling reads or writes a row's fp32 logits.
      head_passes: times that attention reads or writes a row's fp32 heads, scores and rotations included.
      block_spread: how far a block's rows behind the anchor choose experts of their own in the draft stages: 0 all the same,
        1 independently. They enter with the same token, and with random weights they hardly part.
      grouped_experts: only the experts that rows visit are read and computed, as by the kernel of `dspark_kernels.expert_mlp`;
        False: all experts on all rows, as by its reference.
    """

    read_bandwidth: float = 3.86e12
    matmul_rate: float = 700e12
    overlap: float = 13
    launch: float = 5e-6
    layer_launches: float = 11
    compressor_launches: float = 21
    indexer_launches: float = 2
    head_launches: float = 36
    step_launches: float = 33
    logit_passes: float = 2.1
    head_passes: float = 43
    block_spread: float = 0.22
    grouped_experts: bool = True

    def __post_init__(self) -> None:
        faults = []
        for name in (f.name for f in fields(self) if f.type is float):
            value, positive = getattr(self, name), name in ("read_bandwidth", "matmul_rate", "overlap")
            if not (math.isfinite(value) and value >= 0 and (value or not positive)):
                faults.append(f"{name} is {value!r}; expected a number {'above' if positive else 'of at least'} 0")
        raise_all(ConfigError, "cost model", faults)

    def seconds(self, work: Iterable[Work], launches: float) -> float:
        """Of all `work` together, and its launches."""
        parts = list(work)
        reading, computing = sum(w.bytes for w in parts), sum(w.flops for w in parts)
        shorter, longer = sorted((reading / self.read_bandwidth, computing / self.matmul_rate))
        both = longer * (1 + (shorter / longer) ** self.overlap) ** (1 / self.overlap) if longer else 0.0
        return both + launches * self.launch

    def layer(self, c: TargetConfig, draft: DraftConfig | None, index: int, load: Workload) -> float:
        """Seconds of target layer `index`, its tap's projection included."""
        gamma, ratio = draft.block_size if draft else 0, c.compress_ratios[index]
        slots = load.local_slots(gamma)
        rows = _rows(load)
        launches = self.layer_launches
        if ratio:
            launches += self.compressor_launches
        if ratio == c.csa_ratio:
            launches += self.indexer_launches
        weights = self._weights(c, leaves.layer(c, draft, index, 0), rows, load)
        return self.seconds([weights, self._attention(c, ratio, rows.local, slots, load)], launches)

    def experts(self, c: TargetConfig, load: Workload) -> float:
        """Seconds of the routed experts of one layer alone."""
        found = [leaf for leaf in leaves.block(c, "", 0, False) if leaf.role == "experts"]
        return self.seconds([self._weights(c, found, _rows(load), load)], 0)

    def head(self, c: TargetConfig, draft: DraftConfig | None, load: Workload) -> float:
        """Seconds from the last layer to the verdict on the drafts."""
        rows = _rows(load)
        weights = self._weights(c, leaves.head(c, load.expert), rows, load)
        return self.seconds([weights, self._sampling(c, rows.local)], self.head_launches)

    def drafter(self, c: TargetConfig, draft: DraftConfig, load: Workload) -> float:
        """Seconds of context write, draft stages, second pass through the output head, and the steps of drafting."""
        gamma = draft.block_size
        slots = load.local_slots(gamma)
        routed = slots * load.expert * (1 + self.block_spread * (gamma - 1))
        rows = _Rows(slots * load.expert * gamma, slots * gamma, routed)
        steps = list(leaves.sequential_head(c, draft, "")) if draft.head != "none" else []
        stages = set(leaves.drafter(c, draft, 0)) - set(leaves.sequential_head(c, draft, _last(draft)))
        context = Leaf("wkv", (c.hidden_size, c.head_dim))  # the context rows pass it besides the block's own
        work = [self._weights(c, stages, rows, load), self._weights(c, leaves.head(c, load.expert), rows, load)]
        work += [self._attention(c, 0, rows.local, slots, load)] * draft.num_stages
        work += [self._weights(c, [context], _Rows(load.rows, slots * (gamma + 1), load.rows), load)] * draft.num_stages
        work += [self._weights(c, steps, _Rows(slots * load.expert, slots, slots * load.expert), load)] * gamma
        work.append(self._sampling(c, rows.local))
        launches = self.layer_launches * draft.num_stages + self.head_launches + self.step_launches * gamma
        return self.seconds(work, launches)

    def _sampling(self, c: TargetConfig, rows: int) -> Work:
        return Work(self.logit_passes * rows * c.vocab_size * 4, 0)

    def _weights(self, c: TargetConfig, found: Iterable[Leaf], rows: _Rows, load: Workload) -> Work:
        """Weights read and multiplied with."""
        read = flops = 0.0
        for leaf in found:
            size = leaf.bytes(load.item_size, load.expert)
            if leaf.role == "table":
                read += rows.local * leaf.shape[-1] * 4
            elif leaf.role == "experts":
                active, visits = float(c.n_routed_experts), float(c.n_routed_experts)
                if self.grouped_experts:
                    active, visits = active_experts(c, rows.routed), c.num_experts_per_tok
                read += size * active / c.n_routed_experts
                flops += 2 * rows.all * leaf.size * leaf.numbers * visits / c.n_routed_experts / load.expert
            else:
                read += size
                flops += 2 * (rows.all / load.expert if leaf.split else rows.local) * leaf.size * leaf.numbers
        return Work(read, flops)

    def _attention(self, c: TargetConfig, ratio: int, rows: int, slots: int, load: Workload) -> Work:
        """State read by `slots` requests, and the products with it."""
        window = min(c.sliding_window, load.context)
        item, entries = load.item_size, load.context // ratio if ratio else 0
        read = float(slots * window * c.head_dim * item)
        flops, seen = 0.0, entries
        if ratio:
            # A tick reads the uncompressed rows of the groups that it may close.
            channels, reach = (4, 2 * ratio) if ratio == c.csa_ratio else (2, ratio)
            widths = c.head_dim + (c.index_head_dim if ratio == c.csa_ratio else 0)
            read += slots * reach * channels * widths * 4
        if ratio == c.csa_ratio:
            seen = min(entries, c.index_topk)
            read += slots * entries * c.index_head_dim * item + rows * seen * c.head_dim * item
            flops += 2 * rows * entries * c.index_n_heads * c.index_head_dim
        else:
            read += slots * entries * c.head_dim * item
        flops += 4 * rows * c.num_attention_heads * c.head_dim * (window + seen)
        read += self.head_passes * rows * c.num_attention_heads * c.head_dim * 4
        return Work(read, flops)


def _last(draft: DraftConfig) -> str:
    return f"layers.{draft.num_stages - 1}.markov_head"


def _rows(load: Workload) -> _Rows:
    return _Rows(load.rows, math.ceil(load.rows / load.expert), load.rows)


def active_experts(c: TargetConfig, rows: float) -> float:
    """Expected number of experts that `rows` rows visit, each choosing `num_experts_per_tok` of them evenly."""
    return c.n_routed_experts * (1 - (1 - c.num_experts_per_tok / c.n_routed_experts) ** rows)
