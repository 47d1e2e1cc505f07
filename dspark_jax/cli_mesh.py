"""`dspark-jax plan-stages`: which pipeline rank gets which layers, what they cost and what they hold. Host only."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dspark_jax.cli_guard import guarded
from dspark_jax.cli_loading import DraftTokensOption
from dspark_jax.config import TargetConfig
from dspark_jax.config_dense import DenseConfig, ModelConfig
from dspark_jax.config_drafter import AnyDraftConfig
from dspark_jax.errors import ConfigError

if TYPE_CHECKING:
    from dspark_jax.parallel.planner import StagePlan

_REQUESTS = 8  # of a microbatch on an expert rank, where --rows is left out
_CONTEXT = 8192  # or the model's limit


@guarded
def plan_stages(
    model: Annotated[str, typer.Option(help="v4-flash, v4-pro, a shipped model, or a folder with config.json.")],
    mesh: Annotated[str, typer.Option(help="Pipe x expert ranks, such as 2x4, or a mesh file (YAML).")],
    drafter: Annotated[
        Path | None,
        typer.Option(help="For a dense model: folder of its drafter; config.json and the weights' headers are read."),
    ] = None,
    draft_tokens: DraftTokensOption = None,
    stages: Annotated[
        str | None, typer.Option(help="Layers of the ranks, 0-20,21-42 or 21,22; by default the planner's.")
    ] = None,
    rows: Annotated[
        int | None, typer.Option(help="Target rows of a tick over all expert ranks; by default 8 requests' a rank.")
    ] = None,
    context: Annotated[
        int | None, typer.Option(help="Positions of a request; by default 8192 or the model's limit.")
    ] = None,
    num_slots: Annotated[
        int | None, typer.Option(help="Expert slots of a layer over all expert ranks; by default one an expert.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of weights and activations: bfloat16, float32 or float16.")] = "bfloat16",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Cut a model into pipeline stages: layers, predicted cost and memory of every rank."""
    from dspark_jax.parallel import planner
    from dspark_jax.parallel.mesh_config import load_mesh
    from dspark_jax.presets import any_configs

    shape, (config, draft) = load_mesh(mesh), any_configs(model)
    if drafter is not None:
        if not isinstance(config, DenseConfig):
            raise ConfigError(f"--drafter {drafter} is for dense models; {model}'s drafter is embedded: leave it out")
        from dspark_jax.checkpoint.drafter import read_drafter_config

        draft = read_drafter_config(config, drafter, draft_tokens)
    elif draft_tokens is not None:
        raise ConfigError(f"--draft-tokens {draft_tokens} is for --drafter; leave it out, or name one")
    block = 1 + (draft.block_size if draft else 0)
    rows = _REQUESTS * block * shape.expert if rows is None else rows
    context = min(_CONTEXT, config.max_position_embeddings) if context is None else context
    stages = shape.stages if stages is None else stages
    if stages is None:
        plan = planner.plan_stages(
            config, draft, shape.pipe, rows=rows, context=context, expert=shape.expert, dtype=dtype, num_slots=num_slots
        )
    else:
        plan = planner.given_stages(
            config, draft, stages, shape.pipe, rows=rows, context=context, expert=shape.expert, dtype=dtype,
            num_slots=num_slots,
        )  # fmt: skip
    if as_json:
        print(json.dumps({"model": model, "mesh": str(shape), "given": stages is not None, **plan.as_dict()}))
    else:
        _show(plan, (config, draft))


def _show(plan: "StagePlan", model: "tuple[ModelConfig, AnyDraftConfig | None]") -> None:
    """A row for every rank, then what holds for all of them."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("\n\nrank", no_wrap=True)
    for column in ("\n\nlayers", "window\nsparse\nheavy", "\ndraft\nstages"):
        table.add_column(column, justify="right", no_wrap=True)
    for column in ("layers", "head", "drafter", "total"):
        table.add_column(f"\n{column}\nms", justify="right", no_wrap=True)
    for column in ("\ncost\nshare", "\nweights\nused", "\n\npadding"):
        table.add_column(column, justify="right", no_wrap=True)
    for rank, ((first, end), cost) in enumerate(zip(plan.ranges, plan.costs, strict=True)):
        last = rank == plan.pipe - 1
        table.add_row(
            str(rank),
            f"{first}-{end - 1}",
            _kinds(model, first, end),
            str(plan.draft_stages if last else 0),
            *(f"{1e3 * seconds:.3f}" for seconds in (*cost, cost.total)),
            f"{plan.share[rank]:.1%}",
            size(plan.memory.own[rank]),
            size(plan.memory.padding[rank]),
        )
    console, memory, load = Console(highlight=False, soft_wrap=True), plan.memory, plan.load
    console.print(table)
    requests = load.local_slots(model[1].block_size if model[1] else 0) * load.expert
    microbatches = f"each of {plan.pipe} microbatches" if plan.pipe > 1 else "the one microbatch"
    console.print(
        f"\n{load.rows} rows a tick ({requests} request{'s' * (requests != 1)} in {microbatches}), context {load.context},"
        f" {load.dtype}, {load.expert} expert rank{'s' * (load.expert > 1)}; rates of an H200\n"
        f"slowest rank {1e3 * plan.tick_seconds:.3f} ms a tick; mean over slowest {plan.balance:.3f}\n"
        f"each device: weights {size(memory.parameters)}, padding included;"
        f" {memory.slots} request slot{'s' * (memory.slots != 1)} of {size(memory.cache + memory.request)};"
        f" together {size(memory.total)}\n"
        f"each hop: {size(memory.item)} a device"
    )


def _kinds(model: "tuple[ModelConfig, AnyDraftConfig | None]", first: int, end: int) -> str:
    """Layers with a window only, compressed sparse, heavily compressed; dense layers are none of these."""
    config = model[0]
    if not isinstance(config, TargetConfig):
        return "-"
    ratios = config.compress_ratios[first:end]
    window, sparse = ratios.count(0), ratios.count(config.csa_ratio)
    return f"{window}/{sparse}/{len(ratios) - window - sparse}"


def size(count: int) -> str:
    """Bytes as text, in powers of 1000."""
    value, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while value >= 999.95 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.1f} {units[0]}"
