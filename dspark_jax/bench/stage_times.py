"""Seconds of every pipeline stage, each alone on one device, against the stage planner's prediction.

    python -m dspark_jax.bench.stage_times --out stage_times.json

The model has the layer shapes of a preset and about its ratio of layer kinds and draft stages, with fewer layers and random
weights. First single pieces are timed (the routed experts, one layer of every kind, a layer with the head and the drafter
behind it) and the rates of `CostModel` fitted to them. With these the planner cuts the model for every number of ranks, and
each rank's tick runs by itself with the code of the ring (`parallel.ring`), the last rank's head, sampling, commit and draft
included. So the fit has not seen the stages that it predicts. What ranks exchange is not timed.

Routers are random, so rows spread over the experts; requests are greedy and have a whole block to verify. Weights are made
on the device, one random matrix a leaf, scaled anew for every expert; those of one program are there at a time. Compilation
is most of the duration: one program by itself, which tunes the matrix products, then the others side by side.
"""

import argparse
import datetime
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dspark_jax.bench.stage_fit import Measured, errors, fit
from dspark_jax.bench.stage_programs import GROUPS, RUNS, Experts, Program, Setting, Stage, makers, measure, scaled
from dspark_jax.errors import ConfigError, DSparkError
from dspark_jax.parallel.planner import StagePlan
from dspark_jax.parallel.stage import Ranges
from dspark_jax.parallel.stage_cost import CostModel
from dspark_jax.presets import PRESETS, model_configs

_PAIR: Ranges = ((0, 1), (1, 2))


@dataclass(frozen=True)
class Piece:
    """A program, what a cost model predicts for it, and what the report says of it."""

    name: str
    program: Program
    cost: Callable[[CostModel], float]
    facts: dict[str, Any]


class Report:
    """Everything found so far, written anew after each addition."""

    def __init__(self, setting: Setting, out: Path | None):
        self.out, self.begin = out, time.perf_counter()
        device = jax.devices()[0]
        self.found: dict[str, Any] = {
            "command": shlex.join(["python", "-m", "dspark_jax.bench.stage_times", *sys.argv[1:]]),
            "xla_flags": os.environ.get("XLA_FLAGS", ""),
            "date": datetime.date.today().isoformat(),
            "device": device.device_kind,
            "jax": jax.__version__,
            "median_of": GROUPS,
            "runs_a_group": RUNS,
            "layers": setting.config.num_hidden_layers,
            "draft_stages": setting.draft.num_stages,
            "context": setting.context,
            "dtype": setting.dtype,
            "pieces": [],
            "stages": [],
        }

    def add(self, **parts: Any) -> None:
        self.found |= parts
        if self.out:
            self.out.write_text(json.dumps(self.found, indent=1) + "\n")

    def say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self.begin:5.1f} s] {text}", flush=True)


def stage_piece(setting: Setting, ranges: Ranges, rank: int, name: str, **facts: Any) -> Piece:
    """One rank of a cut."""

    def cost(model: CostModel) -> float:
        return setting.seconds(ranges, rank, model)

    facts |= {"rows": setting.rows, "pipe": len(ranges), "rank": rank, "layers": list(ranges[rank])}
    return Piece(name, Stage(setting, ranges, rank), cost, facts)


def pieces(setting: Setting, more: Sequence[int] = ()) -> list[Piece]:
    """What the cost model is made of, at the setting's requests; the parts that differ most by rows also at `more` requests.

    The first has most of the products that all the others have.
    """
    c, found = setting.config, list[Piece]()
    kinds = dict.fromkeys((ratio, i < c.num_hash_layers) for i, ratio in enumerate(c.compress_ratios))
    plain = [kind for kind in kinds if not kind[1]] or list(kinds)
    for requests in (setting.requests, *more):
        here = replace(setting, requests=requests)
        others = requests != setting.requests
        for stages in (1,) if others else (1, 2):
            pair = _pair(here, *plain[0], stages)
            name = f"{_kind(here, *plain[0])} layer, head, drafter of {stages}"
            found.append(stage_piece(pair, _PAIR, 1, name, draft_stages=stages))
        for kind in plain if others else kinds:
            found.append(stage_piece(_pair(here, *kind, 1), _PAIR, 0, f"{_kind(here, *kind)} layer", draft_stages=0))
        alone = partial(lambda load, model: model.experts(c, load), here.load)
        found.append(Piece("experts", Experts(here), alone, {"rows": here.rows}))
    return found


def _kind(setting: Setting, ratio: int, hashed: bool) -> str:
    kind = "window" if not ratio else "sparse" if ratio == setting.config.csa_ratio else "heavy"
    return f"hashed {kind}" if hashed else kind


def _pair(setting: Setting, ratio: int, hashed: bool, stages: int) -> Setting:
    """Two layers of a kind, for two ranks, the last of which also has the head and so many draft stages."""
    target = replace(setting.config, num_hidden_layers=2, compress_ratios=(ratio,) * 2, num_hash_layers=2 * hashed)
    return replace(setting, config=target, draft=replace(setting.draft, num_stages=stages, target_layer_ids=(1,)))


def compile_all(found: Sequence[Piece], report: Report) -> list[Piece]:
    """Compiles the first by itself and then the others side by side; returns those that could be compiled."""
    threads = min(16, os.cpu_count() or 1)

    def compiled(piece: Piece) -> bool:
        try:
            seconds = piece.program.compile()
        except jax.errors.JaxRuntimeError as error:
            report.say(f"{_label(piece)}: cannot be compiled: {error}")
            return False
        temporaries = piece.program.temporaries / 1e9
        report.say(f"{_label(piece)}: compiled in {seconds:.1f} s, temporaries {temporaries:.2f} GB")
        return True

    done = [compiled(piece) for piece in found[:1]]
    with ThreadPoolExecutor(threads) as pool:
        leaves = [pool.submit(make) for make in makers(p.program for p in found)]
        done += pool.map(compiled, found[1:])
        for leaf in leaves:
            leaf.result()
    return [piece for piece, sound in zip(found, done, strict=True) if sound]


def _label(piece: Piece) -> str:
    return f"{piece.name} ({piece.facts['rows']} rows)"


def time_all(found: Sequence[Piece], part: str, report: Report, costs: CostModel) -> list[Measured]:
    """Times one piece after the other; lines go to `part` of the report, with what `costs` predict."""
    measured = []
    for piece in compile_all(found, report):
        try:
            groups, finite = measure(piece.program)
        except jax.errors.JaxRuntimeError as error:
            report.say(f"{_label(piece)}: cannot be run: {error}")
            continue
        seconds, predicted = float(np.median(groups)), piece.cost(costs)
        line = {"name": piece.name, **piece.facts, "seconds": seconds, "predicted": predicted, "finite": finite}
        line |= {"groups": groups, "temporaries": piece.program.temporaries}
        report.add(**{part: [*report.found[part], line]})
        report.say(
            f"{_label(piece)}: measured {1e3 * seconds:.3f} ms, predicted {1e3 * predicted:.3f} ms"
            f" ({predicted / seconds - 1:+.1%}){'' if finite else ', NOT FINITE'}"
        )
        measured.append(Measured(piece.cost, seconds))
    return measured


def fit_pieces(setting: Setting, more: Sequence[int], base: CostModel, report: Report) -> CostModel:
    """Rates fitted to the pieces; `base` where none could be measured."""
    measured = time_all(pieces(setting, more), "pieces", report, base)
    if not measured:
        return base
    costs = fit(measured, base)
    worst = errors(measured, costs)
    names = [_label_of(line) for line in report.found["pieces"]]
    report.add(fitted=asdict(costs), fit_errors=dict(zip(names, worst, strict=True)))
    report.say("fitted: " + ", ".join(f"{k}={v:.4g}" for k, v in asdict(costs).items()))
    report.say("its errors: " + ", ".join(f"{name} {e:+.1%}" for name, e in zip(names, worst, strict=True)))
    return costs


def _label_of(line: dict[str, Any]) -> str:
    return f"{line['name']} ({line['rows']} rows)"


def cut_summary(plan: StagePlan, default: StagePlan, lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Balance of one cut, measured and predicted, and how far the predictions are off: as they are, and all multiplied by
    one common factor that makes their sum right. `default` is the same cut at the costs that were given.
    """
    seconds = np.array([line["seconds"] for line in lines])
    ranks = [line["rank"] for line in lines]
    found: dict[str, Any] = {
        "pipe": plan.pipe,
        "ranges": [list(r) for r in plan.ranges],
        "complete": len(ranks) == plan.pipe,
        "balance": float(seconds.mean() / seconds.max()),
    }
    for name, one in (("fitted", plan), ("given", default)):
        predicted = np.array([one.costs[rank].total for rank in ranks])
        factor = seconds.sum() / predicted.sum()
        found[name] = {
            "seconds": predicted.tolist(),
            "balance": float(predicted.mean() / predicted.max()),
            "error": (predicted / seconds - 1).tolist(),
            "factor": float(factor),
            "error_scaled": (predicted * factor / seconds - 1).tolist(),
        }
    return found


def run(
    setting: Setting,
    pipes: Sequence[int],
    more: Sequence[int] = (),
    base: CostModel | None = None,
    out: Path | None = None,
    fitting: bool = True,
) -> dict[str, Any]:
    """Pieces, fit, and all stages of the cuts for `pipes` ranks; returns the report.

    Args:
      more: further numbers of requests at which pieces are timed.
      base: costs to begin with, by default `CostModel()`.
      out: file that is written anew after every measurement.
      fitting: False times no pieces, and cuts by `base`.

    Raises:
      ConfigError: a cut is impossible.
    """
    base = base or CostModel()
    report = Report(setting, out)
    for pipe in pipes:
        setting.plan(pipe, base)
    report.add(costs=asdict(base), cuts=[])
    costs = fit_pieces(setting, more, base, report) if fitting else base
    plans = {pipe: setting.plan(pipe, costs) for pipe in pipes}
    stages = [
        stage_piece(setting, plan.ranges, rank, f"{pipe} ranks, rank {rank}, layers {first}-{end - 1}")
        for pipe, plan in plans.items()
        for rank, (first, end) in enumerate(plan.ranges)
    ]
    time_all(stages, "stages", report, costs)
    for pipe, plan in plans.items():
        lines = [line for line in report.found["stages"] if line["pipe"] == pipe]
        if lines:
            cut = cut_summary(plan, setting.plan(plan.ranges, base), lines)
            report.add(cuts=[*report.found["cuts"], cut])
            _show(cut, lines, report)
    return report.found


def _show(cut: dict[str, Any], lines: Sequence[dict[str, Any]], report: Report) -> None:
    report.say(f"{cut['pipe']} ranks {cut['ranges']}: mean over max measured {cut['balance']:.3f}")
    for name in ("fitted", "given"):
        one = cut[name]
        print(f"  {name} costs: mean over max {one['balance']:.3f}, common factor {one['factor']:.3f}", flush=True)
        for line, seconds, error, rest in zip(lines, one["seconds"], one["error"], one["error_scaled"], strict=True):
            print(
                f"    rank {line['rank']} layers {line['layers'][0]}-{line['layers'][1] - 1}: predicted {1e3 * seconds:.3f} ms,"
                f" measured {1e3 * line['seconds']:.3f} ms: {error:+.1%}, scaled {rest:+.1%}",
                flush=True,
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 2 on bad input, 1 if a stage could not be timed."""
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m dspark_jax.bench.stage_times", description=about)
    parser.add_argument("--model", default="v4-flash", help="preset, shipped model, or folder with config.json (v4-flash)")
    parser.add_argument("--layers", type=int, help="target layers; 14 for a preset, otherwise all")
    parser.add_argument("--pipes", default="2,4", help="numbers of pipe ranks (2,4)")
    parser.add_argument("--requests", default="16,64", help="of a microbatch; pieces are also timed at further numbers (16,64)")
    parser.add_argument("--context", type=int, default=4096, help="positions of a request (4096)")
    parser.add_argument("--dtype", default="bfloat16", help="of weights and activations (bfloat16)")
    parser.add_argument("--no-fit", action="store_true", help="cut by the default costs, without timing pieces")
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args(argv)
    try:
        pipes, requests = (_counts(name, getattr(args, name)) for name in ("pipes", "requests"))
        setting = _setting(args, requests[0])
        found = run(setting, pipes, requests[1:], out=args.out, fitting=not args.no_fit)
    except DSparkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0 if len(found["stages"]) == sum(pipes) else 1


def _counts(name: str, text: str) -> list[int]:
    words = text.split(",")
    if not all(word.strip().isascii() and word.strip().isdigit() and int(word) > 0 for word in words):
        raise ConfigError(f"--{name} is {text!r}; expected positive integers with commas between them")
    return [int(word) for word in words]


def _setting(args: argparse.Namespace, requests: int) -> Setting:
    config, draft = model_configs(args.model)
    if draft is None:
        raise ConfigError(f"--model {args.model} has no drafter; expected one with dspark_* in its config.json")
    layers = args.layers
    if layers is None and args.model in PRESETS:
        layers = min(14, config.num_hidden_layers)
    if layers is not None:
        if not 5 <= layers <= config.num_hidden_layers:
            raise ConfigError(f"--layers is {layers}; expected 5 … {config.num_hidden_layers}, the model's")
        config, draft = scaled(config, draft, layers)
    least = 2 * (draft.block_size + 1)
    if args.context < least:
        raise ConfigError(f"--context is {args.context}; expected at least {least}, two blocks")
    return Setting(config, draft, requests, args.context, args.dtype)


if __name__ == "__main__":
    raise SystemExit(main())
