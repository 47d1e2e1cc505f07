"""`dspark-jax bench`: load generators and what they measure; `cli_bench_kernels` has kernels and rounds, `cli_bench_decode`
whole answers."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dspark_jax.cli_bench_decode import decode
from dspark_jax.cli_bench_kernels import kernels, round_
from dspark_jax.cli_devices import EmulateOption, MeshOption, PlacementOption, WeightsOption, chosen_mesh, stage_ranges
from dspark_jax.cli_guard import guarded
from dspark_jax.cli_loading import DrafterOption, DraftTokensOption, ModelOption, loading
from dspark_jax.cli_schedule import (
    ProfileOption,
    SchedulerOption,
    TemperaturesOption,
    UnsignedOption,
    VerifyOption,
    schedule_of,
)
from dspark_jax.errors import RequestError, raise_all
from dspark_jax.parallel.distributed import check_processes

if TYPE_CHECKING:
    from dspark_jax.bench.serve import Percentiles, ServeReport

PLOTTED = 200  # ticks from the first; more would be a blur

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Measure speed: the engine under load, a round, the kernels.",
)


@app.callback()
def bench() -> None:
    """Measure speed: the engine under load, a round, the kernels."""


@app.command()
@guarded
def serve(
    prompts: Annotated[Path, typer.Option(help='JSONL file: on each line an object with "prompt" and maybe "kind".')],
    model: ModelOption = "nano",
    drafter: DrafterOption = None,
    draft_tokens: DraftTokensOption = None,
    mesh: MeshOption = None,
    emulate_devices: EmulateOption = None,
    placement: PlacementOption = None,
    weights: WeightsOption = "dequantised",
    scheduler: SchedulerOption = None,
    profile: ProfileOption = None,
    temperatures: TemperaturesOption = None,
    unsigned: UnsignedOption = False,
    verify: VerifyOption = "rejection",
    kind: Annotated[str | None, typer.Option(help="Only the prompts of this kind.")] = None,
    rate: Annotated[float | None, typer.Option(help="Arrivals a second (Poisson); by default all at once.")] = None,
    requests: Annotated[int, typer.Option(help="Requests to serve; the file's prompts are taken again if need be.")] = 32,
    slots: Annotated[int | None, typer.Option(help="Requests side by side; by default 8 for every device.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate for a request.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Sample from the k likeliest tokens; 0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens of this mass; 1 is off.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of arrivals and order; request i is sampled with seed + i.")] = 0,
    no_draft: Annotated[bool, typer.Option("--no-draft", help="Decode without the drafter.")] = False,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="The end-of-sequence token ends nothing.")] = False,
    plot: Annotated[Path | None, typer.Option(help=f"Draw the first {PLOTTED} ticks of the pipeline here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Send requests at random times, and measure speed, waiting times and how busy each pipeline rank is."""
    from dspark_jax.bench.serve import Load, serve_load
    from dspark_jax.cli_display import Display
    from dspark_jax.decode.sampling import SamplingParams
    from dspark_jax.evaluate import read_prompts
    from dspark_jax.serve.engine import Engine

    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, max_tokens=max_tokens)
    load = Load(rate, requests, seed)
    raise_all(RequestError, "sampling parameters", params.faults())
    raise_all(RequestError, "load", load.faults())
    texts = [p.prompt for p in read_prompts(prompts, kind)]
    if plot is not None:
        check_plot(plot)
    schedule = schedule_of(scheduler, profile, temperatures, unsigned, draft=not no_draft, measurable=True)
    shape, devices = chosen_mesh(mesh, emulate_devices)
    check_processes(devices)
    with loading():
        engine = Engine(
            model, mesh=devices, stages=stage_ranges(shape, model), slots=slots, speculate=not no_draft, placement=placement,
            scheduler=schedule, verify=verify, weights=weights, drafter=drafter, draft_tokens=draft_tokens,
        )  # fmt: skip
    if engine.follows:
        engine.follow()
        return
    display = Display()
    with engine, display.waiting("compiling and serving"):
        report = serve_load(engine, texts, params, load, ignore_eos=ignore_eos)
    if plot is not None:
        from dspark_jax.plots import plot_timeline

        plot_timeline(report.ticks[:PLOTTED]).savefig(plot)
    if as_json:
        settings: dict[str, Any] = {"model": model, "mesh": str(shape), "slots": engine.slots, "rate": rate}
        settings |= {"requests": requests, "seed": seed, "max_tokens": max_tokens, "temperature": temperature}
        settings |= {"top_k": top_k, "top_p": top_p, "gamma": engine.gamma, "scheduler": scheduler, "verify": verify}
        settings |= {"weights": weights, "drafter": engine.draft_config and engine.draft_config.summary}
        print(json.dumps(settings | report.as_dict()))
    else:
        display.out.print(_table(report, f"{model} on mesh {shape}, {engine.slots} slots"))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False)
@guarded
def load(context: typer.Context) -> None:
    """Decoding speed over the number of requests side by side: plain, fixed lengths, and every scheduler (load --help)."""
    from dspark_jax.bench.load import main

    raise SystemExit(main(context.args, "dspark-jax bench load"))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False)
@guarded
def mesh(context: typer.Context) -> None:
    """Check and time several devices: equality, scale, dispatch, pipeline, placement (mesh --help)."""
    from dspark_jax.bench.mesh import main

    raise SystemExit(main(context.args, "dspark-jax bench mesh"))


app.command("kernels", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(kernels)
app.command("round")(round_)
app.command("decode")(decode)


def check_plot(path: Path) -> None:
    """Raises RequestError for a plot that could not be written, before anything runs."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise RequestError("--plot needs matplotlib; install it with: pip install 'dspark-jax[notebooks]'") from None
    kinds = sorted(Figure().canvas.get_supported_filetypes())
    faults = []
    if path.suffix[1:].lower() not in kinds:
        faults.append(f"{str(path)!r} ends in {path.suffix!r}; expected one of {', '.join(kinds)}")
    if not path.parent.is_dir():
        faults.append(f"the folder {str(path.parent)!r} is not there; make it, or choose another")
    raise_all(RequestError, "--plot", faults)


def _table(report: "ServeReport", title: str) -> Any:
    from rich.table import Table

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0), title=title, title_justify="left")
    table.add_row("requests", f"{len(report.served)} in {report.seconds:.2f} s, {report.tokens} tokens")
    table.add_row("tokens/s", f"{report.tokens_per_second:.1f}")
    table.add_row("time to first token", _milliseconds(report.time_to_first_token))
    table.add_row("time per output token", _milliseconds(report.time_per_output_token))
    tau = report.tokens_per_round
    table.add_row("tokens per round", "-" if tau is None else f"{tau:.2f}")
    if report.verified:
        wasted = f"{report.verified - report.accepted} of {report.verified} verified drafts"
        table.add_row("verified a round", f"{report.verified / report.rounds:.2f} drafts")
        table.add_row("verified for nothing", wasted)
    rested = sum(one.rested for one in report.served)
    if rested:
        table.add_row("drafter rested", f"{rested} of {report.rounds} rounds")
    for rank, share in enumerate(report.busy):
        table.add_row(f"rank {rank} busy", f"{share:.1%} of {len(report.ticks)} ticks")
    table.add_row("compilation", f"{report.compile_seconds:.1f} s (not in the figures)")
    return table


def _milliseconds(times: "Percentiles | None") -> str:
    return "-" if times is None else f"p50 {1e3 * times.p50:.1f} ms  p99 {1e3 * times.p99:.1f} ms"
