"""`dspark-jax bench kernels` and `bench round`: device time against what reading the bytes takes."""

from pathlib import Path
from typing import Annotated

import typer

from dspark_jax.cli_guard import guarded
from dspark_jax.errors import ConfigError, RequestError, raise_all

OutOption = Annotated[Path | None, typer.Option(help="JSON list to write; cases that it has already are replaced.")]


@guarded
def kernels(
    context: typer.Context,
    only: Annotated[str | None, typer.Option(help="Benchmarks, with commas between them; all by default.")] = None,
    out: OutOption = None,
) -> None:
    """Time the kernels on a GPU against references, peers and the floor; with one benchmark, further options are its own."""
    from dspark_jax.bench import records
    from dspark_jax.bench.kernels import available, chosen, run

    names = chosen(only)
    if context.args and len(names) > 1:
        raise RequestError(
            f"{' '.join(context.args)!r} would go to {len(names)} benchmarks, which have other options; choose one with --only"
            f" ({', '.join(available())})"
        )
    records.check_out(out)
    print(records.table(run(names, out, context.args)))


@guarded
def round_(
    model: Annotated[str, typer.Option(help="v4-flash, v4-pro, qwen3-4b, a shipped model, or a config.json folder.")] = "nano",
    layers: Annotated[int | None, typer.Option(help="Only the first layers of the target; all by default.")] = None,
    batch: Annotated[str, typer.Option(help="Requests side by side, with commas between them.")] = "1",
    context: Annotated[int, typer.Option(help="Positions in front of a request.")] = 512,
    dtype: Annotated[str | None, typer.Option(help="Of weights and activations; float32 on a CPU, bfloat16 elsewhere.")] = None,
    weights: Annotated[
        str, typer.Option(help="dequantised; quantised: fp4 experts; or quantised-all: fp8 linear maps, too.")
    ] = "dequantised",
    recorded: Annotated[Path | None, typer.Option(help="Draw acceptance from a file of calibrate --recorded.")] = None,
    count_experts: Annotated[
        bool, typer.Option("--count-experts", help="Count the experts that rows visit, for the floor: twice the compilation.")
    ] = False,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    deepspec: Annotated[
        Path | None, typer.Option(envvar="DSPARK_DEEPSPEC", help="A DeepSpec checkout: its round beside qwen3-4b's.")
    ] = None,
    peers: Annotated[
        str, typer.Option(help='Others to time before: transformers, deepspec, compiled (slow: torch.compile); or "none".')
    ] = "transformers,deepspec",
    out: OutOption = None,
) -> None:
    """Time and profile a decoding round and a plain step of a model with random weights, on one device."""
    from dspark_jax.bench import records
    from dspark_jax.bench.peers import NAMES
    from dspark_jax.bench.round import WEIGHTS, Settings, run

    chosen = () if peers == "none" else tuple(word.strip() for word in peers.split(","))
    faults, words = [], [word.strip() for word in batch.split(",")]
    if not all(word.isascii() and word.isdigit() and int(word) > 0 for word in words):
        faults.append(f"--batch is {batch!r}; expected positive integers with commas between them")
    if weights not in WEIGHTS:
        faults.append(f"--weights is {weights!r}; expected {', '.join(WEIGHTS)}")
    if unknown := [name for name in chosen if name not in NAMES]:
        faults.append(f"--peers has {', '.join(map(repr, unknown))}; expected {', '.join(NAMES)}, or none")
    raise_all(ConfigError, "bench round", faults)
    records.check_out(out)
    batches = tuple(sorted({int(word) for word in words}))
    settings = Settings(
        model, batches, layers, context, dtype, weights, recorded, count_experts, temperature, chosen,
        deepspec,
    )  # fmt: skip
    found, missing = run(settings, out)
    print(records.table(found))
    if missing:
        raise SystemExit(1)
