"""The stage planner: which contiguous range of target layers each pipeline rank gets, at what cost and memory.

Every rank works in every tick, so a tick takes as long as its slowest rank. The last rank also has the output head and
the drafter, and gets fewer layers for them. Everything follows from the configurations: no weights, no devices.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dspark_jax.config_dense import DenseConfig, ModelConfig
from dspark_jax.config_drafter import AnyDraftConfig
from dspark_jax.errors import ConfigError, raise_all
from dspark_jax.parallel.dense_cost import DenseCosts
from dspark_jax.parallel.leaves import ITEM_SIZE, Ranges
from dspark_jax.parallel.stage_cost import CostModel, Workload
from dspark_jax.parallel.stage_memory import StageMemory, stage_memory

TIE = 1e-9  # relative difference of costs below which rounding decides


class RankCost(NamedTuple):
    """Predicted seconds of a rank in one decoding tick, by part."""

    layers: float
    head: float
    drafter: float

    @property
    def total(self) -> float:
        """All three together, in seconds."""
        return self.layers + self.head + self.drafter


@dataclass(frozen=True)
class StagePlan:
    """A cut of the model into stages.

    Attributes:
      ranges: half-open range of target layers of every rank.
      draft_stages: of the drafter, which lives on the last rank behind its layers.
      load: the tick that was costed.
      costs: of every rank.
      memory: of a device.
    """

    ranges: Ranges
    draft_stages: int
    load: Workload
    costs: tuple[RankCost, ...]
    memory: StageMemory

    @property
    def pipe(self) -> int:
        """P, the number of ranks."""
        return len(self.ranges)

    @property
    def positions(self) -> tuple[int, ...]:
        """Layer positions that each rank uses, draft stages included; the memory of the most is paid by all."""
        counts = [end - first for first, end in self.ranges]
        return (*counts[:-1], counts[-1] + self.draft_stages)

    @property
    def share(self) -> tuple[float, ...]:
        """Each rank's part of the work."""
        whole = sum(cost.total for cost in self.costs)
        return tuple(cost.total / whole for cost in self.costs)

    @property
    def tick_seconds(self) -> float:
        """The slowest rank's."""
        return max(cost.total for cost in self.costs)

    @property
    def balance(self) -> float:
        """Mean over maximum of the ranks' seconds: the part of a tick that a rank works on average, at most 1."""
        return sum(cost.total for cost in self.costs) / self.pipe / self.tick_seconds

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON; times in seconds, memory in bytes."""
        parts = zip(self.ranges, self.positions, self.costs, self.share, strict=True)
        ranks = [
            {"first": first, "end": end, "positions": positions, **cost._asdict(), "total": cost.total, "share": share}
            for (first, end), positions, cost, share in parts
        ]
        return {
            "pipe": self.pipe,
            "expert": self.load.expert,
            "rows": self.load.rows,
            "context": self.load.context,
            "chunk": self.load.chunk,
            "dtype": self.load.dtype,
            "draft_stages": self.draft_stages,
            "ranks": ranks,
            "tick_seconds": self.tick_seconds,
            "balance": self.balance,
            "memory": self.memory.as_dict(),
        }


def plan_stages(
    config: ModelConfig,
    draft: AnyDraftConfig | None,
    pipe: int,
    *,
    rows: int,
    context: int,
    expert: int = 1,
    chunk: int = 64,
    stops: int = 8,
    dtype: str = "bfloat16",
    num_slots: int | None = None,
    costs: CostModel | None = None,
) -> StagePlan:
    """The cut whose slowest rank is fastest; of equal ones the one with the evenest positions, then the first.

    Args:
      config, draft: the model; `draft` None plans the target alone.
      pipe, expert: ranks of the mesh's axes.
      rows: target rows of a microbatch's tick over all expert ranks, `gamma + 1` a request.
      context: positions in front of them, and capacity of a request slot.
      chunk, stops: prompt tokens of a tick and slot, stop tokens of a request.
      dtype: of weights and activations: float32, bfloat16 or float16.
      num_slots: expert slots of a layer; by default one an expert.
      costs: rates of the device, by default an H200's.

    Raises:
      ConfigError: listing all that makes the stages impossible.
    """
    load = Workload(rows, context, expert, chunk, stops, dtype, num_slots)
    raise_all(ConfigError, "stages", [*_pipe_faults(config, pipe), *_faults(config, draft, load)])
    table = _CostTable(config, draft, load, costs or CostModel())
    layers, extra = config.num_hidden_layers, draft.num_stages if draft else 0

    def cost(rank: int, first: int, end: int) -> float:
        return table.rank(first, end, rank == pipe - 1).total

    limit = _best_cut(layers, pipe, cost, max)[0] * (1 + TIE)

    def unevenness(rank: int, first: int, end: int) -> float:
        positions = end - first + (extra if rank == pipe - 1 else 0)
        return positions**2 if cost(rank, first, end) <= limit else math.inf

    ends = _best_cut(layers, pipe, unevenness, lambda a, b: a + b)[1]
    return _plan(config, draft, tuple(zip((0, *ends[:-1]), ends, strict=True)), load, table)


def given_stages(
    config: ModelConfig,
    draft: AnyDraftConfig | None,
    stages: str | Sequence[tuple[int, int]],
    pipe: int | None = None,
    *,
    rows: int,
    context: int,
    expert: int = 1,
    chunk: int = 64,
    stops: int = 8,
    dtype: str = "bfloat16",
    num_slots: int | None = None,
    costs: CostModel | None = None,
) -> StagePlan:
    """The plan of a cut that the user has chosen.

    Args:
      stages: first and last layer of every rank, "0-20,21-42"; or the ranks' layer counts, "21,22"; or half-open ranges
        [(0, 21), (21, 43)].
      pipe: pipe ranks that `stages` must name; None accepts any number.

    The other arguments are those of `plan_stages`.

    Raises:
      ConfigError: listing all that makes the stages impossible.
    """
    load = Workload(rows, context, expert, chunk, stops, dtype, num_slots)
    layers = config.num_hidden_layers
    ranges, faults = parse_stages(stages, layers) if isinstance(stages, str) else (tuple(stages), [])
    if not faults:
        faults = _range_faults(ranges, layers)
    if pipe is not None:
        faults += _pipe_faults(config, pipe)
        if ranges and pipe != len(ranges):
            faults.append(f"{len(ranges)} stages given for {pipe} pipe ranks; expected one a rank")
    raise_all(ConfigError, "stages", [*faults, *_faults(config, draft, load)])
    return _plan(config, draft, ranges, load, _CostTable(config, draft, load, costs or CostModel()))


def parse_stages(text: str, layers: int) -> tuple[Ranges, list[str]]:
    """Half-open ranges out of "0-20,21-42" or "21,22", and what is wrong with the text or with the counts.

    The ranges' own contradictions are not looked for.
    """
    words = [word.strip() for word in text.split(",")]
    counts = [int(word) for word in words if re.fullmatch(r"\d+", word, re.ASCII)]
    spans = [re.fullmatch(r"(\d+)\s*-\s*(\d+)", word, re.ASCII) for word in words]
    if len(counts) == len(words):
        faults = [f"rank {rank} has no layer; expected at least one" for rank, n in enumerate(counts) if n < 1]
        if sum(counts) != layers:
            faults.append(f"the layer counts {counts} sum to {sum(counts)}; the model has {layers} layers")
        edges = [sum(counts[:rank]) for rank in range(len(counts) + 1)]
        return tuple(zip(edges[:-1], edges[1:], strict=True)), faults
    if all(spans):
        return tuple((int(s[1]), int(s[2]) + 1) for s in spans if s), []
    odd = [word for word, span in zip(words, spans, strict=True) if not span]
    if counts:
        return (), [f"{text!r} mixes layer ranges and layer counts; expected either 0-20,21-42 or 21,22"]
    return (), [f"{word!r} is no range of layers; expected first-last as in 0-20,21-42, or a count" for word in odd]


def _range_faults(ranges: Ranges, layers: int) -> list[str]:
    faults = []
    after = 0
    for rank, (first, end) in enumerate(ranges):
        if end <= first:
            faults.append(f"rank {rank} ({_span(first, end)}) has no layer; expected at least one")
            continue
        if first < 0 or end > layers:
            faults.append(f"rank {rank} ({_span(first, end)}) is out of range; the model has layers 0-{layers - 1}")
        if first > after:
            faults.append(f"{layer_names(after, first)} in front of rank {rank} {_are(after, first)} on no rank")
        elif 0 <= first < after:
            faults.append(f"rank {rank} begins at layer {first}, but layers up to {after - 1} are on ranks before it")
        after = max(after, end)
    if after < layers:
        faults.append(f"{layer_names(after, layers)} behind the last rank {_are(after, layers)} on no rank")
    return faults


def layer_names(first: int, end: int) -> str:
    """Layers first … end - 1 as text: "layers 0-20", "layer 21"."""
    return f"layer {first}" if end - first == 1 else f"layers {_span(first, end)}"


def _are(first: int, end: int) -> str:
    return "is" if end - first == 1 else "are"


def _span(first: int, end: int) -> str:
    return f"{first}-{end - 1}"


def _pipe_faults(config: ModelConfig, pipe: int) -> list[str]:
    if pipe < 1:
        return [f"pipe is {pipe}; expected at least 1"]
    if pipe > config.num_hidden_layers:
        return [f"{pipe} pipe ranks for {config.num_hidden_layers} layers; expected at most one rank a layer"]
    return []


def _faults(config: ModelConfig, draft: AnyDraftConfig | None, load: Workload) -> list[str]:
    separate: Any = config  # a drafter refuses a target of another family
    faults = list(draft.faults(separate)) if draft else []
    slots, experts = load.num_slots, config.n_routed_experts
    if slots is not None and not experts:
        faults.append(f"num_slots is {slots}; a dense model has no experts: leave it out")
    elif slots is not None and (load.expert < 1 or slots < experts or slots % load.expert):
        faults.append(
            f"num_slots is {slots}; expected at least {experts}, the routed experts, and a multiple of expert ="
            f" {load.expert}"
        )
    if slots is None and (load.expert < 1 or experts % load.expert):
        faults.append(
            f"expert is {load.expert}; expected a divisor of the model's {config.n_routed_experts} routed experts"
        )
    for name in ("rows", "chunk", "stops"):
        if getattr(load, name) < 1:
            faults.append(f"{name} is {getattr(load, name)}; expected at least 1")
    if not 2 <= load.context <= config.max_position_embeddings:
        faults.append(f"context is {load.context}; expected 2 … {config.max_position_embeddings}")
    if load.dtype not in ITEM_SIZE:
        faults.append(f"dtype is {load.dtype!r}; expected {', '.join(ITEM_SIZE)}")
    return faults


class _CostTable:
    """Costs of all layers and of the last rank's ends."""

    def __init__(self, config: ModelConfig, draft: AnyDraftConfig | None, load: Workload, model: CostModel):
        drafter: Any = draft  # of the target's family, or it was refused
        # Layers of one kind cost the same to the bit, so that ties are ties.
        layers = range(config.num_hidden_layers)
        if isinstance(config, DenseConfig):
            dense = DenseCosts(model, config, drafter, load)
            self.layers, self.head, self.drafter = [dense.layer(i) for i in layers], dense.head(), dense.drafter()
            return
        self.layers = [model.layer(config, drafter, i, load) for i in layers]
        self.head = model.head(config, drafter, load)
        self.drafter = model.drafter(config, drafter, load) if draft else 0.0

    def rank(self, first: int, end: int, last: bool) -> RankCost:
        layers = math.fsum(self.layers[first:end])
        return RankCost(layers, self.head, self.drafter) if last else RankCost(layers, 0.0, 0.0)


def _best_cut(
    layers: int,
    pipe: int,
    score: Callable[[int, int, int], float],
    join: Callable[[float, float], float],
) -> tuple[float, tuple[int, ...]]:
    """The least joined score of `pipe` stages that cover all layers, and the stages' ends; the first of equal ones.

    `score(rank, first, end)` is a stage's; `join` is max or a sum, so the best cut of a prefix stays best.
    """
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for rank in range(pipe):
        behind = pipe - rank - 1  # ranks that still need a layer
        ends = range(rank + 1, layers - behind + 1) if behind else [layers]
        best = {
            end: min(
                (join(value, score(rank, first, end)), (*cuts, end))
                for first, (value, cuts) in best.items()
                if first < end
            )
            for end in ends
        }
    return best[layers]


def _plan(
    config: ModelConfig, draft: AnyDraftConfig | None, ranges: Ranges, load: Workload, table: _CostTable
) -> StagePlan:
    last = len(ranges) - 1
    return StagePlan(
        ranges=ranges,
        draft_stages=draft.num_stages if draft else 0,
        load=load,
        costs=tuple(table.rank(*r, rank == last) for rank, r in enumerate(ranges)),
        memory=stage_memory(config, draft, ranges, load),
    )
