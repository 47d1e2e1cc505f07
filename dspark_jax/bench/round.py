"""A decoding round and a plain step of the ring's program, against the time that reading their bytes takes.

    dspark-jax bench round --model v4-flash --layers 4 --batch 1,8,64 --context 1024 --out round.json
    dspark-jax bench round --model qwen3-4b --temperature 0 --deepspec DeepSpec --out round.json

The model has the shapes of a configuration, its first layers and all its draft stages, and random weights, made once on the
device and shared by all programs. Requests begin behind an empty context; their first tokens and seeds differ, so that rows
spread over the experts. Whole blocks are verified; how many random drafts are accepted means nothing, unless acceptance is
drawn from recorded rounds (`bench.synthetic`). A plain step is the same target without the drafter, at one row a request.

The floor is what must be read: the weights of the experts that rows visit, all other weights once, the head once a pass
(verification and draft), the sequential head's second matrix once a draft, and the caches; over the read rate of a skinny
product measured in the same run. Activations, logits and products are not in it. How many experts rows visit is counted with
--count-experts, and otherwise what `CostModel` expects. On a CPU there are times only.

Before all that, other programs do the same work on the device, each in a process of its own (`bench.peers`).
"""

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from dspark_jax.bench.dense_round import DENSE_SHAPES, dense_bytes
from dspark_jax.bench.peers import Times, check_deepspec, measure_peers, peers_of
from dspark_jax.bench.records import merge, record
from dspark_jax.bench.round_programs import Measured, Program, Subject, bytes_of, first_line, make_programs, measure, say
from dspark_jax.config import DraftConfig, TargetConfig
from dspark_jax.config_dense import DenseConfig
from dspark_jax.config_drafter import StandaloneConfig
from dspark_jax.decode.rounds_file import read_rounds
from dspark_jax.errors import ConfigError, raise_all
from dspark_jax.parallel import leaves
from dspark_jax.parallel.leaves import ITEM_SIZE
from dspark_jax.parallel.stage_cost import CostModel, Workload, active_experts
from dspark_jax.presets import model_configs
from dspark_kernels.timing import read_ceiling

SHOWN = 10  # kernels
# What the configuration has for every value of --weights.
WEIGHTS: dict[str, dict[str, Any]] = {
    "dequantised": {},
    "quantised": {"expert_weights": "fp4"},
    "quantised-all": {"expert_weights": "fp4", "linear_weights": "fp8"},
}


@dataclass(frozen=True)
class Settings:
    """What is measured.

    Attributes:
      model: preset, "qwen3-4b", shipped model, or folder with config.json; weights are random.
      batches: requests side by side, ascending.
      layers: the first so many of the target; None is all.
      context: positions in front of a request.
      dtype: of weights and activations; None is float32 on a CPU and bfloat16 elsewhere.
      weights: of `WEIGHTS`: "quantised" has fp4 experts, "quantised-all" also fp8 codes of the linear maps that published
        files hold so.
      recorded: file of recorded rounds, from which acceptance is drawn.
      count_experts: count the experts that rows visit, in programs of their own, for the floor.
      temperature: of all requests; 0 is greedy.
      peers: other programs to time, of `peers.NAMES`, where they can be imported.
      deepspec: folder of a DeepSpec checkout, a peer of dense models.
    """

    model: str
    batches: tuple[int, ...]
    layers: int | None = None
    context: int = 512
    dtype: str | None = None
    weights: str = "dequantised"
    recorded: Path | None = None
    count_experts: bool = False
    temperature: float = 1.0
    peers: tuple[str, ...] = ()
    deepspec: Path | None = None


def subject(settings: Settings, cpu: bool | None = None) -> Subject:
    """The model and its sizes; `cpu` says what it runs on, by default JAX's first device.

    Raises DSparkError for a model that is not there or has no drafter, and naming every impossible size.
    """
    dense = settings.model in DENSE_SHAPES
    config, draft = DENSE_SHAPES[settings.model]() if dense else model_configs(settings.model)
    if draft is None:
        raise ConfigError(f"--model {settings.model} has no drafter; choose one with dspark_* in its config.json")
    cpu = jax.devices()[0].platform == "cpu" if cpu is None else cpu
    dtype = settings.dtype or ("float32" if cpu else "bfloat16")
    whole = config.num_hidden_layers
    layers = whole if settings.layers is None else settings.layers
    faults = []
    if dense:
        others = {
            "--layers": layers != whole,
            f"--weights {settings.weights}": settings.weights != "dequantised",
            "--recorded": settings.recorded,
            "--count-experts": settings.count_experts,
        }
        faults += [f"{name} is for DeepSeek-V4-style models; leave it out" for name, given in others.items() if given]
    elif not 1 <= layers <= whole:
        faults.append(f"--layers is {layers}; expected 1 … {whole}, the model's")
    if dtype not in ITEM_SIZE:
        faults.append(f"--dtype is {dtype!r}; expected {', '.join(ITEM_SIZE)}")
    if settings.context < 1:
        faults.append(f"--context is {settings.context}; expected at least 1")
    if not 0 <= settings.temperature < math.inf:
        faults.append(f"--temperature is {settings.temperature}; expected a finite number >= 0 (0 is greedy)")
    elif settings.recorded and not settings.temperature:
        faults.append("--temperature is 0 with --recorded; expected more: recorded acceptance is drawn")
    raise_all(ConfigError, "bench round", faults)
    rounds = None if settings.recorded is None else read_rounds(settings.recorded)
    if isinstance(config, TargetConfig):
        assert isinstance(draft, DraftConfig)
        config, draft = first_layers(config, draft, layers)
        config = replace(config, **WEIGHTS[settings.weights])
    count = "" if layers == whole else f" {layers} layers"
    greedy = ", greedy" if settings.temperature == 0 else ""
    kept = {"quantised-all": "fp4 experts, fp8 linear maps, ", "quantised": "fp4 experts, "}.get(settings.weights, "")
    name = f"{settings.model}{count}, {kept}{dtype}, context {settings.context}{greedy}"
    found = Subject(name, config, draft, dtype, settings.context, rounds, 1 if cpu else 4, settings.temperature)
    most = config.max_position_embeddings
    if found.capacity > most:
        raise ConfigError(
            f"--context is {settings.context}; expected at most {most - found.capacity + settings.context}: the model has"
            f" {most} positions, and {found.capacity - settings.context} are needed behind the context"
        )
    return found


def first_layers(config: TargetConfig, draft: DraftConfig, layers: int) -> tuple[TargetConfig, DraftConfig]:
    """The model's first layers, whose last ones are tapped, and its whole drafter."""
    target = replace(
        config,
        num_hidden_layers=layers,
        compress_ratios=config.compress_ratios[:layers],
        num_hash_layers=min(layers, config.num_hash_layers),
    )
    taps = tuple(range(max(layers - len(draft.target_layer_ids), 0), layers))
    return target, replace(draft, target_layer_ids=taps)


def floor_us(what: Subject, requests: int, drafting: bool, rate: float, visited: Sequence[float] | None = None) -> float:
    """Microseconds of reading, at `rate` bytes/s, what a round or a plain step must read (see the module).

    Args:
      visited: experts that rows visit, by target layer and then draft stage; by default what `CostModel` expects.
    """
    if isinstance(what.config, DenseConfig):
        assert isinstance(what.draft, StandaloneConfig)
        parts = dense_bytes(what.config, what.draft if drafting else None, what.dtype, requests, what.context)
        return 1e6 * sum(parts.values()) / rate
    assert isinstance(what.draft, DraftConfig)
    costs = replace(
        CostModel(), read_bandwidth=rate, matmul_rate=1e30, launch=0, logit_passes=0, head_passes=0, grouped_experts=True
    )
    if visited is not None:
        costs = replace(costs, block_spread=1)
    c, draft = what.config, what.draft if drafting else None
    gamma = what.draft.block_size
    rows = requests * (gamma + 1 if draft else 1)
    load = Workload(rows, what.context, chunk=1, dtype=what.dtype)
    seconds = sum(costs.layer(c, draft, i, load) for i in range(c.num_hidden_layers)) + costs.head(c, draft, load)
    seconds += costs.drafter(c, draft, load) if draft else 0
    if visited is not None:
        stages = what.draft.num_stages if draft else 0
        expected = c.num_hidden_layers * active_experts(c, rows) + stages * active_experts(c, requests * gamma)
        one = sum(x.bytes(load.item_size, 1) for x in leaves.block(c, "", 0, False) if x.role == "experts") / c.n_routed_experts
        seconds += one * (sum(visited) - expected) / rate
    return 1e6 * seconds


def run(settings: Settings, out: Path | None = None) -> tuple[list[dict[str, Any]], int]:
    """The records of all programs that could be run, also written to `out` one by one; and how many could not be.

    Raises DSparkError for bad input, before any device work.
    """
    check_deepspec(settings.deepspec)
    peers: Times = {}
    if settings.peers:
        # JAX takes most of the device's memory when it is first asked for its devices: peers come before.
        what = subject(settings, cpu=False)
        sizes = (settings.batches, settings.context, settings.temperature, settings.deepspec)
        peers = measure_peers(peers_of(settings.peers, what.config, what.draft, *sizes), say)
    what = subject(settings)
    device = jax.devices()[0]
    found = list[dict[str, Any]]()
    made = make_programs(what, settings.batches, settings.count_experts)
    rate = None if device.platform == "cpu" else read_ceiling()
    if rate is None:
        say("on a CPU there are times only: no floor, device time, launches and peak memory")
    for program in made:
        try:
            one = measure(program, what)
        except jax.errors.JaxRuntimeError as error:
            say(f"{program.name}: not measured: {first_line(error)}")
            for _, timer in program.timers():
                timer.free()
            continue
        found.append(_record(what, program, one, rate, peers))
        show(found[-1])
        if out is not None:
            merge(out, found[-1:])
    return found, 2 * len(settings.batches) - len(found)


def _record(what: Subject, program: Program, one: Measured, rate: float | None, peers: Times) -> dict[str, Any]:
    device = jax.devices()[0]
    floor = None if rate is None else floor_us(what, program.requests, program.drafting, rate, one.visited)
    ceiling = None if rate is None else f"{rate / 1e12:.2f} TB/s"
    found = record("round", f"{what.name}, {program.name}", device.device_kind, one.tick_us, floor, ceiling)
    profile, stats = one.profile, device.memory_stats() or {}
    return found | {
        "peers": dict(peers.get((program.requests, program.drafting), {})),
        "busy_us": profile and round(profile.busy_us, 2),
        "launches": profile and round(profile.launches, 1),
        "kernels": profile and [[k.name, round(k.us, 2), round(k.launches, 1)] for k in profile.kernels[:SHOWN]],
        "visited_experts": one.visited and [round(x, 1) for x in one.visited],
        "tokens_per_round": round(one.tokens, 3),
        "memory": {
            "weights": bytes_of(program.timer.params),
            "state": one.state,
            "temporaries": program.timer.temporaries,
            "peak": stats.get("peak_bytes_in_use"),
        },
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def show(one: dict[str, Any]) -> None:
    """The kernels and the memory of a case, on stderr."""
    say(f"{one['case']}: {one['time_us']:.0f} us, {one['tokens_per_round']:.2f} tokens of a request")
    if one["kernels"] is not None:
        say(f"  kernels busy {one['busy_us']:.0f} us, {one['launches']:.0f} launches; the most expensive, of a tick:")
        for name, us, launches in one["kernels"]:
            print(f"  {us:10.1f} us {launches:7.1f} x  {name[:100]}", file=sys.stderr, flush=True)
    memory = one["memory"]
    gb = {name: "-" if value is None else f"{value / 1e9:.3f}" for name, value in memory.items()}
    say(f"  GB: weights {gb['weights']}, state {gb['state']}, temporaries {gb['temporaries']}, peak so far {gb['peak']}")
