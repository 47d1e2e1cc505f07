"""`dspark-jax profile`: seconds of decoding steps by rows and requests, for schedulers that weigh tokens against time."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dspark_jax.cli_devices import EmulateOption, MeshOption, PlacementOption, WeightsOption, chosen_mesh, stage_ranges
from dspark_jax.cli_guard import check_out, guarded
from dspark_jax.cli_loading import DrafterOption, DraftTokensOption, ModelOption, loading
from dspark_jax.errors import ConfigError, RequestError, raise_all
from dspark_jax.parallel.distributed import requested

if TYPE_CHECKING:
    from dspark_jax.decode.profile_table import ProfileTable
    from dspark_jax.parallel.profile import StepTimes


@guarded
def profile(
    model: ModelOption = "nano",
    drafter: DrafterOption = None,
    draft_tokens: DraftTokensOption = None,
    mesh: MeshOption = None,
    emulate_devices: EmulateOption = None,
    placement: PlacementOption = None,
    weights: WeightsOption = "dequantised",
    slots: Annotated[int | None, typer.Option(help="Requests side by side; by default 8 for every device.")] = None,
    buckets: Annotated[
        str | None, typer.Option(help="Rows of an expert rank to measure, 8,16,32; by default quarters of whole blocks.")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Measurements of every step, interleaved; their median counts.")] = 5,
    out: Annotated[Path | None, typer.Option(help="Write the step times to this file (JSON).")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw steps a second over rows here.")] = None,
    read: Annotated[
        Path | None, typer.Option("--read", help="Measure nothing: show or draw this file (ours or SGLang's forms).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Measure the seconds of decoding steps on this mesh, draft and target apart; the rows become the engine's buckets."""
    from dspark_jax.cli_bench import check_plot
    from dspark_jax.cli_display import Display

    if plot is not None:
        check_plot(plot)
    check_out("--out", out)
    display = Display()
    if read is not None:
        given = {"--out": out, "--buckets": buckets, "--slots": slots, "--mesh": mesh, "--placement": placement}
        extra = [f"{name} is for measuring; leave it out, or --read" for name, x in given.items() if x is not None]
        raise_all(RequestError, "--read", extra)
        found, rates = _read(read)
    else:
        rows = None if buckets is None else _rows(buckets)
        if requested():
            raise ConfigError("profile works in one process; run it without `dspark-jax launch`")
        from dspark_jax.serve.engine import Engine

        shape, devices = chosen_mesh(mesh, emulate_devices)
        with loading():
            engine = Engine(
                model, mesh=devices, stages=stage_ranges(shape, model), slots=slots, placement=placement,
                scheduler="stale-size", profile="measure", buckets=rows, weights=weights, drafter=drafter,
                draft_tokens=draft_tokens,
            )  # fmt: skip
        with display.waiting("profiling") as status:
            times = engine.measure_steps(repeats, None if status is None else lambda text: status.update(f"{text} …"))
        if out is not None:
            times.table(engine.fingerprint).write(out)
        found = {"model": model, "mesh": str(shape), "slots": engine.slots, "repeats": repeats}
        found["drafter"] = engine.draft_config and engine.draft_config.summary
        found |= {"device": engine.fingerprint.device} | times.as_dict()
        rates = _rates(times)
    if plot is not None:
        from dspark_jax.plots_schedule import plot_step_rates

        plot_step_rates(rates).savefig(plot)
    if as_json:
        print(json.dumps(found))
    else:
        _show(display, found, rates, out)


def _rows(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and int(word) > 0 for word in words):
        raise RequestError(f"--buckets is {text!r}; expected positive numbers of rows with commas between them")
    return sorted({int(word) for word in words})


def _rates(times: "StepTimes") -> dict[int, list[tuple[float, float]]]:
    """(rows of the bucket, steps a second) by requests, as measured."""
    from statistics import median

    found: dict[int, list[tuple[float, float]]] = {}
    for cell in times.cells:
        found.setdefault(cell.requests, []).append((cell.bucket, 1 / median(cell.seconds)))
    return found


def _read(path: Path) -> tuple[dict[str, Any], dict[int, list[tuple[float, float]]]]:
    """A file's points, and its rates at them."""
    from dspark_jax.decode.profile_table import read_profile

    table = read_profile(path)
    found: dict[str, Any] = {"file": str(path), "max_rows": table.max_rows}
    found["fingerprint"] = None if table.fingerprint is None else vars(table.fingerprint)
    found["draft"] = {"requests": list(table.draft.points), "seconds": list(table.draft.seconds)}
    found["verify"] = {"rows": list(table.verify.points), "seconds": list(table.verify.seconds), "between": table.verify.rule}
    found["plain"] = table.plain and {"requests": list(table.plain.points), "seconds": list(table.plain.seconds)}
    return found, _table_rates(table)


def _table_rates(table: "ProfileTable") -> dict[int, list[tuple[float, float]]]:
    rates: dict[int, list[tuple[float, float]]] = {}
    for requests in (n for n in table.draft.points if n > 0 or len(table.draft.points) == 1):
        rows = [n for n in table.verify.points if n >= max(requests, 1)]
        rates[requests] = [(n, 1 / (table.verify.at(n) + table.draft.at(requests))) for n in rows]
    return {requests: points for requests, points in rates.items() if points}


def _show(display, found: dict[str, Any], rates: dict[int, list[tuple[float, float]]], out: Path | None) -> None:
    """Milliseconds of a step by rows and requests, then what drafting has of it."""
    from rich.table import Table

    measured = "residual" in found
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("rows", justify="right")
    for requests in rates:
        table.add_column(f"{requests} request{'s' * (requests != 1)}" if requests else "any requests", justify="right")
    by_requests = {requests: dict(points) for requests, points in rates.items()}
    for rows in sorted({rows for points in rates.values() for rows, _ in points}):
        times = (by_requests[requests].get(rows) for requests in rates)
        table.add_row(str(rows), *("" if rate is None else f"{1e3 / rate:.3f} ms" for rate in times))
    draft = dict(zip(found["draft"]["requests"], found["draft"]["seconds"], strict=True))
    table.add_row("drafting", *(f"{1e3 * draft.get(requests, 0):.3f} ms" for requests in rates))
    plain = found["plain"] and dict(zip(found["plain"]["requests"], found["plain"]["seconds"], strict=True))
    if plain:
        table.add_row("plain", *(f"{1e3 * plain[requests]:.3f} ms" if requests in plain else "" for requests in rates))
    display.out.print(table)
    if not plain:
        display.out.print("It has no times of plain steps: with it, stale-size and stale-rate always draft and never rest.")
    if measured:
        display.out.print(
            f"A step of all pipe ranks, by rows of an expert rank. Drafting is what it adds; target and drafter added up are"
            f" {found['residual']:.1%} off at most."
        )
    if out is not None:
        display.out.print(f"Written to {out}.", markup=False)
