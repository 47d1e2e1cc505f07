"""Decoding speed over the number of requests side by side: plain, fixed lengths, and every scheduler.

    dspark-jax bench load --prompts prompts.jsonl --concurrency 64 --out load.json --plots .
    python -m dspark_jax.bench.load --shape v4-flash --layers 6 --recorded rounds.npz --concurrency 1,4,16,64 --out load.json

Every competitor decodes the same prompts with the same seeds on the ring itself, all slots running all the time, and only
decoding rounds are timed: prompts, the host's bookkeeping and text are not in the figures (`bench serve` has them). At each
concurrency two programs are compiled, one without the drafter and one that holds all competitors (`bench.contest`); the
step times that schedulers need are measured first, in the same program. Figures are medians of interleaved repeats.

With --shape the model has the layer shapes of a preset, fewer layers, and random weights. Its drafts mean nothing, so which of
them are accepted, and the confidences, are drawn from recorded rounds (`bench.synthetic`): synthetic acceptance.
"""

import argparse
import datetime
import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from dspark_jax.bench.contest import Contest
from dspark_jax.bench.load_models import Model, real_model, shaped_model
from dspark_jax.bench.load_report import comparison, competitor, draw, merged, table, verdict
from dspark_jax.bench.load_run import Point, capacity
from dspark_jax.bench.synthetic import expected_tokens
from dspark_jax.decode.calibrate import Rounds
from dspark_jax.decode.calibration_file import head_digest, read_calibration
from dspark_jax.decode.file_checks import read_object
from dspark_jax.errors import ConfigError, DSparkError, RequestError, raise_all
from dspark_jax.parallel.mesh import EXPERT, PIPE, make_mesh
from dspark_jax.parallel.planner import plan_stages
from dspark_jax.parallel.ring import RingConfig
from dspark_jax.parallel.ring_timer import RingTimer, abstract_params
from dspark_jax.parallel.stage import PipelineSpec
from dspark_jax.presets import PRESETS
from dspark_jax.serve.scheduler import slot_counts

STEP_ROUNDS = 128  # rounds of a measurement of step times, over all requests
STEP_REPEATS = 3  # most measurements of each


@dataclass(frozen=True)
class Settings:
    """What is compared, and how often; see the options."""

    concurrency: tuple[int, ...]
    lengths: tuple[int, ...]
    threshold: float
    temperatures: tuple[float, ...] | None
    repeats: int
    rounds: int
    seed: int


class Log:
    """Progress on stderr, and the report so far in a file."""

    def __init__(self, out: Path | None, facts: dict[str, Any]):
        self.out, self.begin, self.found = out, time.perf_counter(), facts | {"points": [], "verdict": {}}

    def say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self.begin:6.1f} s] {text}", file=sys.stderr, flush=True)

    def keep(self) -> None:
        self.found |= {"verdict": verdict(self.found["points"]), "seconds": time.perf_counter() - self.begin}
        _kept(self.found, self.out)


def make_points(model: Model, mesh: Mesh, settings: Settings) -> list[Point]:
    """Rings of every concurrency, without weights; nothing is compiled.

    Raises ConfigError for a concurrency that the mesh cannot share out.
    """
    pipe, expert, gamma = mesh.shape[PIPE], mesh.shape[EXPERT], model.draft.block_size
    rounds_per_call = 1 if mesh.devices.flat[0].platform == "cpu" else 4
    max_len = capacity(gamma, model.workload, rounds_per_call)
    faults = [fault for n in settings.concurrency for fault in slot_counts(n, pipe, expert)[1]]
    limit = model.config.max_position_embeddings
    if max_len > limit:
        faults.append(f"{max_len} positions a request are needed; the model has {limit}: begin with a shorter context")
    raise_all(ConfigError, "--concurrency", faults)
    rows = max(settings.concurrency) // pipe * (gamma + 1)
    plan = plan_stages(
        model.config, model.draft, pipe, rows=rows, context=max_len, expert=expert, chunk=model.chunk, dtype=model.dtype.name
    )
    specs = [PipelineSpec(model.config, draft, plan.ranges, expert, model.dtype) for draft in (model.draft, None)]
    found = []
    for n in settings.concurrency:
        slots = n // pipe
        contest = Contest.of(slots // expert, gamma, settings.lengths, settings.threshold, settings.temperatures)
        sizes = RingConfig(slots, max_len, model.chunk, rounds_per_call, schedule=contest, buckets=contest.buckets)
        drafting = model.ring(specs[0], mesh, sizes)
        plain = model.ring(specs[1], mesh, RingConfig(slots, max_len, model.chunk, rounds_per_call))
        drafting, plain = (RingTimer(ring, abstract_params(ring)) for ring in (drafting, plain))
        found.append(Point(n, drafting, plain, model.workload, settings.seed))
    return found


def place_weights(points: Sequence[Point], model: Model) -> None:
    """One set of weights for all programs."""
    params = model.place(points[0].drafting.ring)
    for timer in (timer for point in points for timer in (point.drafting, point.plain)):
        timer.params = {key: params[key] for key in timer.params}  # plain decoding's weights are some of these


def compile_all(points: Sequence[Point], model: Model, log: Log) -> dict[int, str]:
    """All programs side by side, and what makes the weights; returns what went wrong, by concurrency."""
    failed: dict[int, str] = {}

    def compiled(work: tuple[int, str, RingTimer]) -> None:
        requests, name, timer = work
        try:
            log.say(f"{_requests(requests)}, {name}: compiled in {timer.compile():.1f} s")
        except jax.errors.JaxRuntimeError as error:
            failed[requests] = f"{name}: cannot be compiled: {_first_line(error)}"

    work = [(p.requests, name, timer) for p in points for name, timer in (("drafting", p.drafting), ("plain", p.plain))]
    with ThreadPoolExecutor(min(32, 2 * (os.cpu_count() or 1))) as pool:
        making = [pool.submit(make) for make in model.makers(points[0].drafting.ring)]
        list(pool.map(compiled, work))
        for one in making:
            one.result()
    return failed


def _requests(count: int) -> str:
    return f"{count} request{'s' * (count != 1)}"


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def measure(point: Point, settings: Settings, log: Log) -> None:
    """Times all competitors; the report is written after every repeat."""
    n, found = point.requests, dict[str, Any]()
    who = _requests(n)
    log.found["points"].append(found)
    found |= {"requests": n, "buckets": point.contest.buckets}
    try:
        point.allocate()
        point.measure_steps(min(settings.repeats, STEP_REPEATS), STEP_ROUNDS)
        *found["step_seconds"], found["plain_step_seconds"] = point.seconds
        log.say(f"{who}: steps " + ", ".join(f"{1e3 * s:.2f}" for s in point.seconds) + " ms, the last without drafting")
        runs: list[list[Any]] = []
        names = point.names
        for row in point.interleaved(names, settings.repeats, settings.rounds, lambda r, name: None):
            runs.append(row)
            each = {name: competitor(column, n) for name, column in zip(names, zip(*runs, strict=True), strict=True)}
            found |= {"competitors": each, "comparison": comparison(each, point.drafting.ring.gamma)}
            log.keep()
            rates = ", ".join(f"{name} {one['tokens_per_second']:.1f}" for name, one in each.items())
            so_far = "" if len(runs) == 1 else "median so far, "
            log.say(f"{who}, repeat {len(runs)} of {settings.repeats}: {so_far}{rates} tokens/s")
    except jax.errors.JaxRuntimeError as error:
        found["failed"] = _first_line(error)
        log.say(f"{who}: not measured: {found['failed']}")
    finally:
        point.free()
    log.keep()


def run(model: Model, mesh: Mesh, settings: Settings, out: Path | None = None, command: str = "") -> dict[str, Any]:
    """Measures everything and returns the report, which is also written to `out` as it grows."""
    synthetic = model.rounds is not None
    facts = {
        "command": command,
        "date": datetime.date.today().isoformat(),
        "model": model.name,
        "layers": model.config.num_hidden_layers,
        "dtype": model.dtype.name,
        "drafter": model.draft.summary,
        "gamma": model.draft.block_size,
        "mesh": f"{mesh.shape[PIPE]}x{mesh.shape[EXPERT]}",
        "device": mesh.devices.flat[0].device_kind,
        "jax": jax.__version__,
        "synthetic": synthetic,
        "acceptance": "synthetic: drawn from recorded rounds, random weights" if synthetic else "real",
        "recorded_rounds": len(model.rounds) if model.rounds else None,
        "recorded_tokens_per_round": _expected(model.rounds, settings.lengths) if model.rounds else None,
        **{name: getattr(settings, name) for name in ("threshold", "temperatures", "repeats", "rounds", "seed")},
        "temperature": model.workload.temperature,
        "context": model.workload.position,
    }
    log = Log(out, facts)
    points = make_points(model, mesh, settings)
    failed = compile_all(points, model, log)
    place_weights(points, model)
    log.say("weights are on the device")
    for point in points:
        if point.requests in failed:
            log.say(f"{_requests(point.requests)}: {failed[point.requests]}")
            log.found["points"].append({"requests": point.requests, "failed": failed[point.requests]})
            log.keep()
        else:
            measure(point, settings, log)
    return log.found


def _expected(rounds: Rounds, lengths: Sequence[int]) -> dict[str, float]:
    return {f"fixed:{n}": expected_tokens(rounds, n) for n in lengths}


def main(argv: Sequence[str] | None = None, prog: str = "python -m dspark_jax.bench.load") -> int:
    """Exit code 2 on bad input, 1 if a concurrency could not be measured."""
    args = _parser(prog).parse_args(argv)
    try:
        if args.draw is not None:
            reports = [read_object(path, "a report of bench load", "give what --out has written") for path in args.draw]
            return _show(_kept(merged(reports), args.out), args)
        mesh = _mesh(args)
        _check_files(args)
        if args.shape:
            model = shaped_model(args.shape, args.layers, args.context, args.recorded, args.dtype, mesh)
        else:
            separate = args.drafter, args.draft_tokens
            model = real_model(args.model, args.prompts, args.temperature, args.seed, args.dtype, mesh, *separate)
        settings = _settings(args, model, mesh.size)
        command = shlex.join([*prog.split(), *(sys.argv[1:] if argv is None else argv)])
        found = run(model, mesh, settings, args.out, command)
    except DSparkError as error:
        print(f"dspark-jax: error: {error}", file=sys.stderr)
        return 2
    return _show(found, args)


def _kept(found: dict[str, Any], out: Path | None) -> dict[str, Any]:
    if out is not None:
        part = out.with_name(out.name + ".part")
        part.write_text(json.dumps(found, indent=1) + "\n")
        os.replace(part, out)
    return found


def _show(found: dict[str, Any], args: argparse.Namespace) -> int:
    """Plots and table; 1 if a concurrency could not be measured."""
    if args.plots is not None:
        draw(found, args.plots)
    print(json.dumps(found) if args.json else table(found))
    return 1 if any("failed" in point for point in found["points"]) else 0


def _mesh(args: argparse.Namespace) -> Mesh:
    if args.mesh is None and args.emulate_devices is None:
        return make_mesh()
    from dspark_jax.cli_devices import chosen_mesh  # needs what the command line needs

    mesh = chosen_mesh(args.mesh, args.emulate_devices)[1]
    assert mesh is not None
    return mesh


def _parser(prog: str) -> argparse.ArgumentParser:
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog=prog, description=about)
    parser.add_argument("--model", "--target", default="nano", help="shipped model's name, or checkpoint folder (nano)")
    parser.add_argument("--drafter", type=Path, help="for a dense --model: its drafter's folder, or a smaller model (none)")
    parser.add_argument("--draft-tokens", type=int, help="drafts a round of a PARD or smaller model (5)")
    parser.add_argument("--prompts", type=Path, help="JSONL file with a prompt a line, for --model")
    parser.add_argument("--shape", choices=sorted(PRESETS), help="in place of a model: a preset's shapes, random weights")
    parser.add_argument("--layers", type=int, help="target layers of --shape (all)")
    parser.add_argument("--context", type=int, default=1024, help="positions before a request, with --shape (1024)")
    parser.add_argument("--recorded", type=Path, help="recorded rounds (calibrate --recorded) for --shape's acceptance")
    parser.add_argument("--concurrency", default="8", help="requests side by side: 1,4,16, or N for powers of two up to it (8)")
    parser.add_argument("--lengths", help="fixed lengths, which are also the buckets; the whole block is one (all)")
    parser.add_argument("--threshold", type=float, default=0.5, help="confidence of the static threshold (0.5)")
    parser.add_argument("--temperatures", type=Path, help="file of `dspark-jax calibrate`")
    parser.add_argument("--temperature", type=float, default=1.0, help="of sampling, with --model; 0 is greedy (1)")
    parser.add_argument("--repeats", type=int, default=5, help="interleaved runs, whose medians count (5)")
    parser.add_argument("--rounds", type=int, default=256, help="rounds of a run, summed over the requests (256)")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and sampling (0)")
    parser.add_argument("--dtype", help="of weights and activations (float32 on a CPU, bfloat16 elsewhere)")
    parser.add_argument("--mesh", help="pipe x expert ranks, or a mesh file; one device by default")
    parser.add_argument("--emulate-devices", type=int, help="split the CPU into so many devices")
    parser.add_argument("--out", type=Path, help="JSON file, written as it grows")
    parser.add_argument("--plots", type=Path, help="folder for pareto.png and budget.png")
    parser.add_argument(
        "--draw", type=Path, nargs="+", help="measure nothing: show and draw earlier --out files, several as one report"
    )
    parser.add_argument("--json", action="store_true", help="print the report, not the table")
    return parser


def _check_files(args: argparse.Namespace) -> None:
    faults = []
    for name, folder in (("--out", args.out and args.out.parent), ("--plots", args.plots)):
        if folder is not None and not folder.is_dir():
            faults.append(f"{name}: there is no folder {str(folder)!r}; make it, or choose another")
    if args.shape and args.recorded is None:
        faults.append("--shape has random weights, whose drafts mean nothing; give recorded rounds (--recorded)")
    if not args.shape and args.recorded is not None:
        faults.append("--recorded is for --shape; a model's own drafts are verified for what they are")
    if args.shape and (args.drafter is not None or args.draft_tokens is not None):
        faults.append("--drafter and --draft-tokens are for --model; a preset has its drafter's shapes")
    if not args.shape and args.prompts is None:
        faults.append("--prompts is missing; expected a JSONL file with a prompt a line")
    raise_all(RequestError, "bench load", faults)
    if args.plots is not None:
        from dspark_jax.cli_bench import check_plot

        check_plot(args.plots / "pareto.png")


def _numbers(name: str, text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.removesuffix(",").split(",")]
    if not all(word.isascii() and word.isdigit() and int(word) > 0 for word in words):
        raise RequestError(f"{name} is {text!r}; expected positive integers with commas between them")
    return tuple(sorted({int(word) for word in words}))


def _settings(args: argparse.Namespace, model: Model, parts: int) -> Settings:
    """`parts`: devices that requests are shared out over."""
    gamma, faults = model.draft.block_size, []
    concurrency = _numbers("--concurrency", args.concurrency)
    if "," not in args.concurrency:
        powers = (2**i for i in range(concurrency[0].bit_length()))
        concurrency = tuple(n for n in powers if n % parts == 0) or concurrency
    lengths = tuple(range(1, gamma + 1)) if args.lengths is None else _numbers("--lengths", args.lengths)
    if lengths[-1] > gamma:
        faults.append(f"--lengths has {lengths[-1]}; expected 1 … {gamma}, the model's drafts")
    for name in ("repeats", "rounds"):
        if getattr(args, name) < 1:
            faults.append(f"--{name} is {getattr(args, name)}; expected at least 1")
    if not 0 <= args.seed < 2**31:
        faults.append(f"--seed is {args.seed}; expected 0 … 2**31 - 1")
    if not 0 < args.threshold <= 1:
        faults.append(f"--threshold is {args.threshold}; expected a confidence in (0, 1]")
    raise_all(RequestError, "bench load", faults)
    temperatures = None
    if args.temperatures is not None:
        calibration = read_calibration(args.temperatures)
        own = calibration.model if model.rounds is not None else head_digest(model.params)
        calibration.check(gamma, own or "", unsigned=model.rounds is not None, source=str(args.temperatures))
        temperatures = tuple(calibration.temperatures)
    lengths = tuple(sorted({*lengths, gamma}))
    return Settings(concurrency, lengths, args.threshold, temperatures, args.repeats, args.rounds, args.seed)


if __name__ == "__main__":
    raise SystemExit(main())
