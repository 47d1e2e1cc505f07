"""`dspark-jax calibrate`: temperatures for the drafter's confidence, from real decoding."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dspark_jax.cli_devices import EmulateOption, MeshOption, WeightsOption, chosen_mesh
from dspark_jax.cli_guard import check_out, guarded
from dspark_jax.cli_loading import ChatOption, DrafterOption, DraftTokensOption, ModelOption, conversation, loading
from dspark_jax.errors import ConfigError, RequestError
from dspark_jax.parallel.distributed import requested

if TYPE_CHECKING:
    from dspark_jax.record import Calibrated


@guarded
def calibrate(
    prompts: Annotated[Path, typer.Option(help='JSONL file: on each line an object with "prompt" and maybe "kind".')],
    model: ModelOption = "nano",
    drafter: DrafterOption = None,
    draft_tokens: DraftTokensOption = None,
    chat: ChatOption = False,
    kind: Annotated[str | None, typer.Option(help="Only the prompts of this kind.")] = None,
    samples: Annotated[int, typer.Option(help="How often to decode every prompt.")] = 1,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate for a prompt.")] = 40,
    temperature: Annotated[float, typer.Option(help="As in service; the drafter is trained for 1.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from the k likeliest tokens; 0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens of this mass; 1 is off.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the first request; it rises by 1 from one to the next.")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Requests decoded side by side.")] = 16,
    out: Annotated[Path | None, typer.Option(help="Write the temperatures to this file (JSON).")] = None,
    recorded: Annotated[
        Path | None, typer.Option(help="Write the recorded rounds, logits and accepted drafts, to this file (npz).")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the reliability before and after here.")] = None,
    mesh: MeshOption = None,
    emulate_devices: EmulateOption = None,
    weights: WeightsOption = "dequantised",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Fit one temperature a draft position so that the drafter's confidence says how often drafts survive.

    Every second prompt is for fitting, the others judge the result. The defaults are a small sample that takes well under
    a minute with the model nano; for temperatures to serve with, give many prompts, or more --samples.
    """
    from dspark_jax import record
    from dspark_jax.cli_display import Display
    from dspark_jax.cli_engine import EngineRunner, generator
    from dspark_jax.decode.rounds_file import write_rounds
    from dspark_jax.decode.sampling import SamplingParams
    from dspark_jax.errors import raise_all
    from dspark_jax.evaluate import read_prompts

    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, max_tokens=max_tokens)
    raise_all(RequestError, "sampling parameters", params.faults())
    chosen = read_prompts(prompts, kind)
    for option, path in (("--out", out), ("--recorded", recorded)):
        check_out(option, path)
    if plot is not None:
        from dspark_jax.cli_bench import check_plot

        check_plot(plot)
    if requested():
        raise ConfigError("calibrate works in one process; run it without `dspark-jax launch`")
    shape = chosen_mesh(mesh, emulate_devices)
    lm = generator(model, *shape, weights=weights, slots=batch, drafter=drafter, draft_tokens=draft_tokens)
    if isinstance(lm, EngineRunner):
        with loading():
            lm.open([True])
    given = [conversation(lm, p.prompt) if chat else p.prompt for p in chosen]
    display = Display()
    with display.waiting("decoding"):
        recording = record.record(lm, given, params, samples=samples, batch=batch)
        if recorded is not None:
            write_rounds(recorded, recording.rounds)
        found = record.calibrate(lm, recording, prompts.name)
    if out is not None:
        found.calibration.write(out)
    if plot is not None:
        from dspark_jax.plots_schedule import plot_reliability

        plot_reliability(found.before, found.after).savefig(plot)
    if as_json:
        settings = {"model": model, "prompts": len(chosen), "samples": samples, "max_tokens": max_tokens, "seed": seed}
        settings |= {"temperature": temperature, "top_k": top_k, "top_p": top_p, "chat": chat}
        settings |= {"drafter": lm.draft_config and lm.draft_config.summary}
        print(json.dumps({**settings, **found.as_dict()}))
    else:
        _show(display, found, out)


def _show(display, found: "Calibrated", out: Path | None) -> None:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("draft", "temperature", "ECE before", "after", "of perfect confidences", "AUC before", "after"):
        table.add_column(column, justify="right")
    c = found.calibration
    for k, t in enumerate(c.temperatures):
        errors = (f"{x:.2%}" for x in (c.ece_before[k], c.ece_after[k], c.ece_floor[k]))
        areas = ("-" if x is None else f"{x:.3f}" for x in (c.auc_before[k], c.auc[k]))
        table.add_row(str(k + 1), f"{t:.3f}", *errors, *areas)
    mean = (f"{_mean(x):.2%}" for x in (c.ece_before, c.ece_after, c.ece_floor))
    table.add_row("mean", "", *mean, "", "")
    display.out.print(table)
    display.out.print(f"Fitted on {c.num_samples} rounds, judged on {found.rounds} of other prompts.")
    if _mean(c.ece_floor) > 0.5 * _mean(c.ece_before):
        display.out.print(
            "Most of the error is that of a sample of this size; for temperatures to serve with, record more rounds"
            " (more prompts, or --samples)."
        )
    if out is not None:
        display.out.print(f"Written to {out}.", markup=False)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
