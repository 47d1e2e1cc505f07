"""`dspark-jax eplb collect` and `apply`: the two steps that run the model."""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dspark_jax.cli_devices import EmulateOption, MeshOption, WeightsOption, chosen_mesh, stage_ranges
from dspark_jax.cli_eplb import app, model_layers, show_reports
from dspark_jax.cli_guard import guarded
from dspark_jax.cli_loading import loading
from dspark_jax.errors import ConfigError, RequestError, raise_all
from dspark_jax.parallel.distributed import check_processes

if TYPE_CHECKING:
    from dspark_jax.decode.sampling import SamplingParams
    from dspark_jax.serve.engine import Engine

EVERY = (0, 2**31 - 1)  # a window that no run leaves

_Prompts = Annotated[Path, typer.Option(help='JSONL file: on each line an object with "prompt" and maybe "kind".')]
_Model = Annotated[str, typer.Option(help="A shipped model's name, or a checkpoint folder.")]
_Kind = Annotated[str | None, typer.Option(help="Only the prompts of this kind.")]
_MaxTokens = Annotated[int, typer.Option(help="Most tokens to generate for a prompt.")]
_Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
_Seed = Annotated[int, typer.Option(help="Fixes every random draw.")]
_Slots = Annotated[int | None, typer.Option(help="Requests side by side; by default 8 for every device.")]


@app.command()
@guarded
def collect(
    prompts: _Prompts,
    out: Annotated[Path, typer.Option(help="Folder to write the statistics to.")],
    model: _Model = "nano",
    mesh: MeshOption = None,
    emulate_devices: EmulateOption = None,
    weights: WeightsOption = "dequantised",
    iterations: Annotated[
        str | None, typer.Option(help='First iteration and first not to count, "100-200"; by default the whole run.')
    ] = None,
    kind: _Kind = None,
    slots: _Slots = None,
    max_tokens: _MaxTokens = 128,
    temperature: _Temperature = 0.0,
    seed: _Seed = 0,
    no_draft: Annotated[bool, typer.Option("--no-draft", help="Without the drafter, whose layers are then absent.")] = False,
) -> None:
    """Answer prompts, and record how many rows each expert gets, by iteration and layer."""
    params, texts = _requests(prompts, kind, max_tokens, temperature, seed)
    window = EVERY if iterations is None else _window(iterations)
    above = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not above.is_dir():
        raise RequestError(f"--out {str(out)!r}: {str(above)!r} is a file; expected a folder, made where it is missing")
    shape, devices = chosen_mesh(mesh, emulate_devices)
    check_processes(devices)
    from dspark_jax.serve.engine import Engine

    with loading():
        engine = Engine(
            model, mesh=devices, stages=stage_ranges(shape, model), slots=slots, speculate=not no_draft, count_experts=window,
            weights=weights,
        )  # fmt: skip
    if engine.follows:
        engine.follow()
        return
    counter = engine.expert_counter
    assert counter is not None
    with engine:
        for text in texts:
            engine.submit(text, params)
        while engine.busy and counter.iterations < window[1]:
            engine.step()
    counter.write(out)
    found = counter.statistics()
    print(
        f"wrote {out}: iterations {found.iterations[0]} … {found.iterations[-1]} of {counter.iterations},"
        f" {len(found.layers)} layers, {found.ranks} expert ranks, {found.load().sum() / found.top_k:.0f} rows"
    )


@app.command()
@guarded
def apply(
    config: Annotated[Path, typer.Argument(help="Load-balancer YAML file.")],
    prompts: _Prompts,
    mesh: Annotated[str, typer.Option("--mesh", help="Pipe x expert ranks, such as 1x4, or a mesh file (YAML).")],
    model: _Model = "nano",
    emulate_devices: EmulateOption = None,
    weights: WeightsOption = "dequantised",
    kind: _Kind = None,
    slots: _Slots = None,
    max_tokens: _MaxTokens = 128,
    temperature: _Temperature = 0.0,
    seed: _Seed = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Run a placement: answer prompts without it and with it, compare the tokens, and show the ranks' loads."""
    from dspark_jax.eplb.report import load_report, unbalanced
    from dspark_jax.eplb.validation import resolve_placement

    params, texts = _requests(prompts, kind, max_tokens, temperature, seed)
    shape, devices = chosen_mesh(mesh, emulate_devices)
    check_processes(devices)
    layers = model_layers(model)
    if shape.expert == 1:
        raise ConfigError(f"mesh {shape} has one expert rank, where no placement has an effect; use more")
    placement = resolve_placement(config, layers, shape.expert)
    from dspark_jax.serve.engine import Engine

    with loading():
        engine = Engine(
            model, mesh=devices, stages=stage_ranges(shape, model), slots=slots, count_experts=EVERY, weights=weights
        )
    plain = _answers(engine, texts, params)
    assert engine.expert_counter is not None and placement is not None
    found = engine.expert_counter.statistics()
    engine.set_placement(placement)
    same = sum(a == b for a, b in zip(plain, _answers(engine, texts, params), strict=True))
    reports = {
        "before": load_report(found, unbalanced(found, shape.expert), shape.expert),
        "after": load_report(found, placement.slot_to_expert[found.layers], shape.expert),
    }
    if as_json:
        figures = {name: report.as_dict() for name, report in reports.items()}
        print(json.dumps({"expert_ranks": shape.expert, "answers": len(texts), "same_tokens": same, **figures}))
        return
    show_reports(reports, {"target": layers.target_layers, "draft": layers.draft_layers})
    print(f"{same} of {len(texts)} answers have the same tokens with the placement as without")


def _requests(
    prompts: Path, kind: str | None, max_tokens: int, temperature: float, seed: int
) -> "tuple[SamplingParams, list[str]]":
    from dspark_jax.decode.sampling import SamplingParams
    from dspark_jax.evaluate import read_prompts

    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens)
    raise_all(RequestError, "sampling parameters", params.faults())
    return params, [p.prompt for p in read_prompts(prompts, kind)]


def _window(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)-(\d+)", text.strip())
    if match is None or int(match[1]) >= int(match[2]):
        raise ConfigError(f'--iterations is {text!r}; expected "START-STOP" with START < STOP, such as 100-200')
    return int(match[1]), int(match[2])


def _answers(engine: "Engine", texts: list[str], params: Any) -> list[tuple[int, ...]]:
    return [answer.tokens for answer in engine.generate(texts, params)]
