"""Several devices: checked first, timed after, in one command.

    dspark-jax bench mesh --out mesh.json
    dspark-jax bench mesh --tiny --emulate-devices 4

runs on however many devices there are, by default on every split of their number into pipe x expert ranks:

- smoke: collectives over `expert` in a branch that depends on the `pipe` index, in a loop, in a process of its own with a time
  limit (`mesh_smoke`); a mesh that fails is left out of all that follows.
- equality: the shipped model's greedy tokens against one device's (`mesh_equality`).
- dispatch: rows to their experts and back by all-gather, all-to-all and ragged all-to-all (`mesh_dispatch`).
- placement: skewed loads with and without EPLB (`mesh_placement`).
- scale, pipeline: rounds of a model's true shape with random weights, against bytes and collectives; busy shares against the
  planner's (`mesh_pipeline`, `mesh_rounds`).

Records go into a JSON list as docs/performance/ has them. The exit code is 1 if a check has failed.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark_jax.bench.records import check_out, merge, table
from dspark_jax.errors import ConfigError, DSparkError, raise_all
from dspark_jax.parallel.distributed import requested
from dspark_jax.parallel.mesh_config import MeshConfig, load_mesh

PARTS = ("smoke", "equality", "dispatch", "placement", "scale", "pipeline")


@dataclass(frozen=True)
class Settings:
    """What runs, and how large; see the options."""

    parts: tuple[str, ...]
    meshes: tuple[MeshConfig, ...]
    model: str = "v4-flash"
    layers: int | None = None
    weights: str = "fp4"
    dtype: str | None = None
    context: int = 1024
    rows: tuple[int, ...] = (1, 8, 64, 256)
    dispatch_rows: tuple[int, ...] = (1, 8, 32, 128, 256)
    acceptance: float = 0.7
    recorded: Path | None = None
    statistics: Path | None = None
    shipped: str = "nano"
    prompts: int = 16
    tokens: int = 64
    variants: tuple[str, ...] | None = None
    processes: bool = False
    limit: float = 120.0

    @property
    def largest(self) -> int:
        """Devices of the largest mesh."""
        return max(mesh.devices for mesh in self.meshes)

    def requests(self, gamma: int, devices: int) -> list[int]:
        """Side by side on so many devices: blocks of the `rows` in all, and once the most of them on every device.

        All but a single request are shared out evenly over the largest mesh, so that all meshes run the same ones.
        """
        found = [1 if r == 1 else self.largest * math.ceil(r / (gamma + 1) / self.largest) for r in self.rows]
        return sorted({*found, max(found) * devices if max(found) > 1 else 1})


class Report:
    """Records and failed checks so far."""

    def __init__(self, out: Path | None):
        self.out, self.records, self.faults, self.begin = out, list[dict[str, Any]](), list[str](), time.perf_counter()

    def say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self.begin:6.1f} s] {text}", file=sys.stderr, flush=True)

    def add(self, found: dict[str, Any], faults: Sequence[str] = ()) -> None:
        self.records.append(found)
        peers = "".join(f", {name} {us:.1f} us" for name, us in found["peers"].items())
        self.say(f"{found['bench']}: {found['case']}: {found['time_us']:.1f} us{peers}")
        for fault in faults:
            self.fail(fault)
        self.keep([found])

    def fail(self, fault: str) -> None:
        self.faults.append(fault)
        self.say(f"FAILED: {fault}")

    def keep(self, records: Sequence[dict[str, Any]]) -> None:
        if self.out is not None and records:
            merge(self.out, records)


def run(settings: Settings, out: Path | None = None) -> Report:
    """Everything, in order. Raises DSparkError for bad input, before any device work."""
    report, meshes, smokes = Report(out), list(settings.meshes), dict[str, float]()
    shape = _shape(settings)
    # First what runs in other processes: JAX in this one will take the devices' memory.
    if "smoke" in settings.parts:
        meshes, smokes = _smoke(settings, report)
    together = _launched(settings, meshes, report) if settings.processes and "equality" in settings.parts else {}

    from dspark_jax.bench.mesh_common import case
    from dspark_jax.parallel.mesh import make_mesh

    made = [make_mesh(mesh.pipe, mesh.expert) for mesh in meshes]
    for mesh, seconds in zip(made, smokes.values(), strict=False):
        report.add(case("smoke", "collectives in branches, compilation included", mesh, 1e6 * seconds))
    if "equality" in settings.parts:
        _equality(settings, made, together, report)
    if shape is not None:
        _timed(settings, shape, made, report)
    return report


def _shape(settings: Settings) -> Any:
    """The timed model; None where nothing is timed."""
    if not set(settings.parts) - {"smoke", "equality"}:
        return None
    from dspark_jax.bench.mesh_common import shape_of
    from dspark_jax.bench.mesh_smoke import devices

    s = settings
    cpu = s.dtype is None and devices()[1] == "cpu"
    return shape_of(s.model, s.layers, s.weights, s.dtype, s.context, s.acceptance, s.recorded, cpu)


def _smoke(settings: Settings, report: Report) -> tuple[list[MeshConfig], dict[str, float]]:
    """The meshes that work, and their seconds."""
    from dspark_jax.bench.mesh_smoke import check

    found = check([str(mesh) for mesh in settings.meshes], settings.limit)
    for mesh, said in found.items():
        if isinstance(said, str):
            report.fail(f"smoke, mesh {mesh}: {said}")
    sound = {mesh: seconds for mesh, seconds in found.items() if not isinstance(seconds, str)}
    meshes = [mesh for mesh in settings.meshes if str(mesh) in sound]
    return meshes, {str(mesh): sound[str(mesh)] for mesh in meshes}


def _launched(settings: Settings, meshes: Sequence[MeshConfig], report: Report) -> dict[str, tuple[list[int], float]]:
    """By mesh the ids of one process a device, and seconds."""
    from dspark_jax.bench.mesh_equality import in_processes

    found = {}
    for mesh in (mesh for mesh in meshes if mesh.devices > 1):
        begin = time.perf_counter()
        ids, wrong = in_processes(settings.shipped, str(mesh), mesh.devices, settings.tokens, 5 * settings.limit)
        if wrong:
            report.fail(f"one process a device, mesh {mesh}: {wrong}")
        else:
            found[str(mesh)] = ids, time.perf_counter() - begin
    return found


def _equality(settings: Settings, meshes: Sequence[Any], together: dict[str, tuple[list[int], float]], report: Report) -> None:
    from dspark_jax.bench.mesh_common import mesh_name
    from dspark_jax.bench.mesh_equality import Texts, equality, processes

    texts = Texts(settings.shipped, settings.prompts, settings.tokens)
    for mesh in meshes:
        if why := _impossible(settings.shipped, mesh):
            report.say(f"equality, mesh {mesh_name(mesh)}: left out, {why}")
            continue
        for found, faults in equality(texts, mesh, settings.variants):
            report.add(found, faults)
        if mesh_name(mesh) in together:
            report.add(*processes(texts, mesh, *together[mesh_name(mesh)]))


def _timed(settings: Settings, shape: Any, meshes: Sequence[Any], report: Report) -> None:
    import jax

    from dspark_jax.bench.mesh_common import mesh_name
    from dspark_jax.bench.mesh_dispatch import dispatch
    from dspark_jax.bench.mesh_equality import PROMPTS
    from dspark_jax.bench.mesh_pipeline import efficiencies, rounds
    from dspark_jax.bench.mesh_placement import placement, recorded
    from dspark_kernels.timing import read_ceiling

    parts = settings.parts
    rate = None if jax.devices()[0].platform == "cpu" or "scale" not in parts else read_ceiling()
    load, said = None, ""
    if "placement" in parts and any(mesh.shape["expert"] > 1 for mesh in meshes):
        prompts = PROMPTS[: settings.prompts]
        load, said = recorded(settings.statistics, settings.shipped, shape.config.n_routed_experts, prompts, settings.tokens)
    works: list[tuple[str, Callable[[Any], Iterator[dict[str, Any]]]]] = []
    if "dispatch" in parts:
        works.append(("dispatch", lambda mesh: dispatch(shape, mesh, settings.dispatch_rows, report.say)))
    if load is not None:
        works.append(("placement", lambda mesh: placement(shape, mesh, settings.dispatch_rows, load, said)))
    if {"scale", "pipeline"} & set(parts):
        several = lambda mesh: settings.requests(shape.draft.block_size, mesh.size)  # noqa: E731
        works.append(("rounds", lambda mesh: rounds(shape, mesh, several(mesh), parts, rate, report.say)))
    for name, work in works:
        for mesh in meshes:
            if why := _impossible(shape.config, mesh, alone=name != "rounds"):
                report.say(f"{name}, mesh {mesh_name(mesh)}: left out, {why}")
                continue
            report.say(f"{name}, mesh {mesh_name(mesh)}")
            try:
                for found in work(mesh):
                    report.add(found)
            except jax.errors.JaxRuntimeError as error:
                report.fail(f"{name}, mesh {mesh_name(mesh)}: {str(error).partition(chr(10))[0][:300]}")
    scales = [r for r in report.records if r["bench"] == "mesh scale"]
    efficiencies(scales)
    report.keep(scales)


def _impossible(model: Any, mesh: Any, alone: bool = False) -> str:
    """Why a model has no place on a mesh; "" if it has. `alone`: a layer by itself."""
    from dspark_jax.presets import model_configs

    config = model_configs(model)[0] if isinstance(model, str) else model
    pipe, expert = mesh.shape["pipe"], mesh.shape["expert"]
    if config.n_routed_experts % expert:
        return f"{config.n_routed_experts} experts on {expert} ranks"
    return f"{config.num_hidden_layers} layers on {pipe} ranks" if pipe > config.num_hidden_layers and not alone else ""


def main(argv: Sequence[str] | None = None, prog: str = "python -m dspark_jax.bench.mesh") -> int:
    """Exit code 2 on bad input, 1 if a check has failed."""
    parser = _parser(prog)
    args = parser.parse_args(argv)
    if args.tiny:  # other defaults: what is given counts
        parser.set_defaults(**_TINY)
        args = parser.parse_args(argv)
    try:
        settings = _settings(args)
        check_out(args.out)
        report = run(settings, args.out)
    except DSparkError as error:
        print(f"dspark-jax: error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(report.records) if args.json else table(report.records))
    for fault in report.faults:
        print(f"dspark-jax: error: {fault}", file=sys.stderr)
    return 1 if report.faults else 0


def _parser(prog: str) -> argparse.ArgumentParser:
    about = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog=prog, description=about)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {','.join(PARTS)} (all)")
    parser.add_argument("--meshes", help="pipe x expert ranks: 1x2,2x1 (every split of the devices; with scale also 1x1)")
    parser.add_argument("--model", default="v4-flash", help="preset, shipped model, or folder: the timed shapes (v4-flash)")
    parser.add_argument("--layers", type=int, help="target layers of the timed shapes, in the model's proportions (all)")
    parser.add_argument("--weights", choices=("fp4", "fp8", "dense"), default="fp4", help="the timed experts' form (fp4)")
    parser.add_argument("--dtype", help="of the other weights and activations (float32 on a CPU, bfloat16 elsewhere)")
    parser.add_argument("--context", type=int, default=1024, help="positions in front of a timed request (1024)")
    parser.add_argument("--rows", default="1,8,64,256", help="of a round in all; the most of them once on every device, too")
    parser.add_argument("--dispatch-rows", default="1,8,32,128,256", help="of a device, for dispatch and placement")
    parser.add_argument("--acceptance", type=float, default=0.7, help="synthetic: how likely a draft survives (0.7)")
    parser.add_argument("--recorded", type=Path, help="draw acceptance from recorded rounds (calibrate --recorded)")
    parser.add_argument("--statistics", type=Path, help="folder of expert statistics for placement (--shipped's own)")
    parser.add_argument("--shipped", default="nano", help="model of equality and of recorded statistics (nano)")
    parser.add_argument("--prompts", type=int, default=16, help="of equality (16)")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer (64)")
    parser.add_argument("--variants", help='of equality, with commas: "float32", "scheduler", "replicas", "bfloat16" (all)')
    parser.add_argument("--processes", action="store_true", help="equality also with one process for every device")
    parser.add_argument("--limit", type=float, default=120, help="seconds of a mesh in smoke, a fifth of --processes' (120)")
    parser.add_argument("--emulate-devices", type=int, help="split the CPU into so many devices")
    parser.add_argument("--tiny", action="store_true", help="a small model and few of everything: to try the command itself")
    parser.add_argument("--out", type=Path, help="JSON list, written as it grows; cases that it has already are replaced")
    parser.add_argument("--json", action="store_true", help="print the records, not the table")
    return parser


_TINY: dict[str, Any] = {
    "model": "nano", "layers": 5, "weights": "dense", "context": 16, "rows": "1,8", "dispatch_rows": "2,8", "prompts": 2,
    "tokens": 8,
}  # fmt: skip
_VARIANTS = {"float32": "float32", "scheduler": "float32, scheduler", "replicas": "float32, replicas", "bfloat16": "bfloat16"}


def _settings(args: argparse.Namespace) -> Settings:
    """Raises ConfigError that names every bad option."""
    faults = []

    def numbers(name: str) -> tuple[int, ...]:
        words = getattr(args, name.replace("-", "_")).split(",")
        if all(w.strip().isascii() and w.strip().isdigit() and int(w) > 0 for w in words):
            return tuple(sorted({int(w) for w in words}))
        faults.append(f"--{name} is {','.join(words)!r}; expected positive integers with commas between them")
        return (1,)

    def chosen(name: str, known: Sequence[str]) -> tuple[str, ...]:
        words = [word.strip() for word in getattr(args, name).split(",")]
        if unknown := [word for word in words if word not in known]:
            faults.append(f"--{name} has {', '.join(map(repr, unknown))}; expected some of {', '.join(known)}")
        return tuple(word for word in known if word in words)

    found: dict[str, Any] = {"parts": chosen("parts", PARTS), "rows": numbers("rows")}
    found["dispatch_rows"] = numbers("dispatch-rows")
    if args.variants is not None:
        found["variants"] = tuple(_VARIANTS[name] for name in chosen("variants", tuple(_VARIANTS)))
    for name in ("prompts", "tokens", "limit"):
        if getattr(args, name) <= 0:
            faults.append(f"--{name} is {getattr(args, name)}; expected more than 0")
    if requested():
        faults.append("this is one of several processes (launch); start it once, it starts others itself (--processes)")
    if args.statistics is not None and not args.statistics.is_dir():
        faults.append(f"--statistics: there is no folder {str(args.statistics)!r}; expected one of `eplb collect`")
    raise_all(ConfigError, "bench mesh", faults)
    names = ("model", "layers", "weights", "dtype", "context", "acceptance", "recorded", "statistics", "shipped", "prompts")
    found |= {name: getattr(args, name) for name in (*names, "tokens", "processes", "limit")}
    return Settings(meshes=tuple(_meshes(args, found["parts"])), **found)


def _meshes(args: argparse.Namespace, parts: Sequence[str]) -> list[MeshConfig]:
    """Those that were named, or every split of the devices. JAX is asked in another process."""
    from dspark_jax.bench.mesh_smoke import devices

    if args.emulate_devices is not None:
        from dspark_jax.cli_devices import chosen_mesh

        chosen_mesh(f"1x{args.emulate_devices}", args.emulate_devices)
    count = devices()[0]
    if args.meshes is not None:
        meshes = [load_mesh(text) for text in args.meshes.split(",")]
        large = [f"mesh {mesh} needs {mesh.devices} devices" for mesh in meshes if mesh.devices > count]
        raise_all(ConfigError, f"--meshes (there are {count} devices)", large)
        return list(dict.fromkeys(meshes))
    if count < 2:
        raise ConfigError(
            f"there {'is' if count == 1 else 'are'} {count} device{'s' * (count != 1)}, and bench mesh wants at least two;"
            " choose a machine with several GPUs, or --emulate-devices 4 on a CPU"
        )
    every = [MeshConfig(pipe, count // pipe) for pipe in range(1, count + 1) if count % pipe == 0]
    return [MeshConfig(1, 1), *every] if "scale" in parts else every


if __name__ == "__main__":
    raise SystemExit(main())
