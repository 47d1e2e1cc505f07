"""From a model and the options of `Engine` to a ring whose weights are still to be placed; everything is checked on the way."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from dspark_jax.api import LM
from dspark_jax.checkpoint.reader import Weights
from dspark_jax.config import Numerics, TargetConfig
from dspark_jax.decode.schedule import bucket_sizes
from dspark_jax.decode.schedule_source import ScheduleSource, fingerprint_of
from dspark_jax.decode.verify import verify_faults
from dspark_jax.eplb.collect import ExpertCounter
from dspark_jax.eplb.validation import PlacementSource, resolve_placement
from dspark_jax.errors import ConfigError, described, raise_all
from dspark_jax.parallel.mesh import EXPERT, PIPE
from dspark_jax.parallel.planner import StagePlan, given_stages, plan_stages
from dspark_jax.parallel.ring import Ring, RingConfig
from dspark_jax.parallel.stage import PipelineSpec, Ranges
from dspark_jax.serve.model import NO_EXPERTS, ReadModel, expert_layers, read_model
from dspark_jax.serve.scheduler import slot_counts


class Built(NamedTuple):
    """What an engine is made of.

    Attributes:
      model: whose parameters are to be placed.
      counter: of rows by expert, where they are counted.
    """

    model: ReadModel
    plan: StagePlan
    ring: Ring
    schedule: ScheduleSource | None
    counter: ExpertCounter | None


def build(
    model: str | Path | LM,
    mesh: Mesh,
    *,
    stages: str | Ranges | None,
    slots: int | None,
    dtype: Any,
    weights: Weights,
    numerics: Numerics,
    max_len: int | None,
    chunk: int,
    rounds_per_call: int,
    speculate: bool,
    drafter: str | Path | None,
    draft_tokens: int | None,
    max_logprobs: int | None,
    placement: PlacementSource | None,
    count_experts: tuple[int, int] | None,
    scheduler: ScheduleSource | None,
    buckets: Sequence[int] | None,
    verify: str,
) -> Built:
    """Arguments and errors as of `Engine`; `scheduler` was read already, so that a bad file is refused before the weights are
    looked at, on every process.
    """
    pipe, expert = mesh.shape[PIPE], mesh.shape[EXPERT]
    per_batch, faults = slot_counts(8 * pipe * expert if slots is None else slots, pipe, expert)
    if max_len is not None and not isinstance(max_len, int | np.integer):
        faults = [*faults, f"max_len is {max_len!r}; expected a number of positions"]
    faults = [*faults, *_type_faults(chunk, rounds_per_call, max_logprobs, speculate, buckets, count_experts, stages)]
    raise_all(ConfigError, "engine", [*faults, *verify_faults(verify)])
    placed = None if placement is None else resolve_placement(placement, expert_layers(model, speculate), expert)
    read = read_model(model, mesh, dtype, weights, numerics, drafter, draft_tokens)
    config, draft = read.config, read.draft if speculate else None
    limit = config.max_position_embeddings
    max_len = int(min(limit, 4096) if max_len is None else max_len)
    # The ring refuses wrong sizes by their names here; the plan only needs possible ones.
    load: dict[str, Any] = {
        "rows": per_batch * (draft.block_size + 1 if draft else 1),
        "context": min(max(max_len, 2), limit),
        "expert": expert,
        "chunk": max(chunk, 1),
        "dtype": read.dtype.name,
        "num_slots": placed.num_slots if placed else None,
    }
    if stages is None:
        plan = plan_stages(config, draft, pipe, **load)
    else:
        plan = given_stages(config, draft, stages, pipe, **load)
    spec = PipelineSpec(config, draft, plan.ranges, expert, read.dtype, placed)
    counter = None if count_experts is None else _expert_counter(spec, count_experts)
    if scheduler is not None:
        here = fingerprint_of(config, draft, read.dtype, mesh, ranges=plan.ranges, placement=placed)
        scheduler.check(draft, here, read.params)
        if buckets is None and scheduler.buckets is not None:  # a table may go further than this engine's rows
            buckets = bucket_sizes(per_batch // expert, spec.gamma, scheduler.buckets)
    sizes = RingConfig(
        per_batch, max_len, chunk, rounds_per_call, logprobs=max_logprobs, count_experts=count_experts is not None,
        schedule=scheduler and scheduler.schedule(per_batch // expert, spec.gamma),
        buckets=None if buckets is None else tuple(buckets), verify=verify,
    )  # fmt: skip
    return Built(read, plan, Ring(spec, read.params, mesh, sizes), scheduler, counter)


def _type_faults(
    chunk: Any, rounds_per_call: Any, max_logprobs: Any, speculate: Any, buckets: Any, window: Any, stages: Any
) -> list[str]:
    """Wrong types of what the ring and the planner calculate with."""

    def whole(value: Any) -> bool:
        return isinstance(value, int | np.integer) and not isinstance(value, bool)

    def numbers(value: Any) -> bool:
        return isinstance(value, Sequence | np.ndarray) and all(whole(n) for n in value)

    def ranges(value: Any) -> bool:
        return isinstance(value, Sequence) and all(numbers(pair) and len(pair) == 2 for pair in value)

    counted = {"chunk": chunk, "rounds_per_call": rounds_per_call, "max_logprobs": 0 if max_logprobs is None else max_logprobs}
    faults = [f"{name} is {described(value)}; expected an integer" for name, value in counted.items() if not whole(value)]
    if not isinstance(speculate, bool | np.bool_):
        faults.append(f"speculate is {described(speculate)}; expected True or False")
    if buckets is not None and not numbers(buckets):
        faults.append(f"buckets is {described(buckets)}; expected a list of numbers of rows")
    if window is not None and not (numbers(window) and len(window) == 2):
        faults.append(f"count_experts is {described(window)}; expected the first iteration and the first not to count")
    if stages is not None and not isinstance(stages, str) and not ranges(stages):
        faults.append(f'stages is {described(stages)}; expected "0-20,21-42", "21,22" or [(0, 21), (21, 43)]')
    return faults


def _expert_counter(spec: PipelineSpec, window: tuple[int, int]) -> ExpertCounter:
    c = spec.config
    if not isinstance(c, TargetConfig):
        raise ConfigError(f"engine: the model {NO_EXPERTS}")
    return ExpertCounter(spec.expert_layers, spec.expert, c.n_routed_experts, c.num_experts_per_tok, window)
