"""`dspark-jax eplb`: plan a placement from statistics, report how even it is, check it against a model. Host only.

The commands that run the model are in `cli_eplb_run`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dspark_jax.cli_guard import guarded
from dspark_jax.errors import ConfigError

if TYPE_CHECKING:
    from dspark_jax.eplb.namespace import ExpertLayers
    from dspark_jax.eplb.report import LoadReport
    from dspark_jax.eplb.statistics import ExpertStatistics

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Static expert load balancing: collect, plan, report, check, apply.",
)

_Statistics = Annotated[Path, typer.Argument(help="Folder with meta_info.json and rank*.safetensors.")]
_Ep = Annotated[int | None, typer.Option("--ep", help="Expert ranks; by default those that recorded.")]
_Start = Annotated[int | None, typer.Option("--iter-start", help="First iteration to use; by default the first.")]
_Stop = Annotated[int | None, typer.Option("--iter-stop", help="First iteration not to use; by default all are used.")]


@app.command()
@guarded
def plan(
    statistics: _Statistics,
    output: Annotated[Path, typer.Option(help="YAML file to write.")],
    ep: _Ep = None,
    num_slots: Annotated[int | None, typer.Option(help="Slots over all ranks; by default one an expert.")] = None,
    policy: Annotated[str, typer.Option(help="search, deepseek or tensorrt.")] = "search",
    groups: Annotated[int, typer.Option(help="Expert groups of DeepSeek's hierarchical policy.")] = 1,
    nodes: Annotated[int, typer.Option(help="Nodes of DeepSeek's hierarchical policy.")] = 1,
    iter_start: _Start = None,
    iter_stop: _Stop = None,
    model: Annotated[str | None, typer.Option(help="Check the plan against this model, as `check` does.")] = None,
) -> None:
    """Place the experts by recorded load, and write the placement."""
    from dspark_jax.eplb import planner
    from dspark_jax.eplb.config import save_config
    from dspark_jax.eplb.report import load_report, placed, unbalanced
    from dspark_jax.eplb.statistics import read_statistics
    from dspark_jax.eplb.validation import placement_faults
    from dspark_jax.errors import raise_all

    recorded = read_statistics(statistics).window(iter_start, iter_stop)
    ranks = _ranks(ep, recorded)
    layers = None if model is None else model_layers(model)
    if layers is not None:
        planner.check_experts(recorded, layers.num_experts)
    config = planner.plan(recorded, ranks, num_slots, policy=policy, num_groups=groups, num_nodes=nodes)  # type: ignore[arg-type]
    if layers is not None and ranks > 1:
        raise_all(ConfigError, "the plan", placement_faults(config, layers, ranks))
    save_config(config, output)
    before = load_report(recorded, unbalanced(recorded, ranks), ranks)
    show_reports({"before": before, "after": load_report(recorded, placed(recorded, config, ranks), ranks)}, None)
    print(f"wrote {output}: {len(recorded.layers)} layers, {config.num_slots} slots on {ranks} expert ranks")


@app.command()
@guarded
def report(
    statistics: _Statistics,
    config: Annotated[Path | None, typer.Option(help="Placement to compare with none.")] = None,
    ep: _Ep = None,
    iter_start: _Start = None,
    iter_stop: _Stop = None,
    model: Annotated[str | None, typer.Option(help="Show this model's target and draft layers apart.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a heat map of the ranks' loads to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Rows of the ranks by layer, without balancing and under a placement: mean, std, imbalance = max/mean - 1."""
    from dspark_jax.eplb.config import load_config
    from dspark_jax.eplb.report import load_report, placed, unbalanced
    from dspark_jax.eplb.statistics import read_statistics

    recorded = read_statistics(statistics).window(iter_start, iter_stop)
    ranks = _ranks(ep, recorded)
    layers = None if model is None else model_layers(model)
    reports = {"before": load_report(recorded, unbalanced(recorded, ranks), ranks)}
    if config is not None:
        slots = placed(recorded, load_config(config), ranks)
        reports["after"] = load_report(recorded, slots, ranks)
    if plot is not None:
        _plot(reports, plot, None if layers is None else layers.num_hidden_layers)
    if as_json:
        print(json.dumps({"expert_ranks": ranks, **{name: r.as_dict() for name, r in reports.items()}}))
    else:
        parts = {} if layers is None else {"target": layers.target_layers, "draft": layers.draft_layers}
        show_reports(reports, parts)


@app.command()
@guarded
def check(
    config: Annotated[Path, typer.Argument(help="Load-balancer YAML file.")],
    model: Annotated[str, typer.Option(help="A shipped model's name, or a folder with config.json.")],
    ep: Annotated[int, typer.Option("--ep", help="Expert ranks that the model will run on.")],
    draft_model: Annotated[
        Path | None, typer.Option(help="Folder with the drafter's config.json, where that is another checkpoint.")
    ] = None,
) -> None:
    """Check a placement against a model's config.json. Exit code 0, or 2 with every fault."""
    from dspark_jax.eplb.validation import resolve_placement

    if ep < 1:
        raise ConfigError(f"--ep is {ep}; expected at least 1")
    layers = model_layers(model, draft_model)
    placement = resolve_placement(config, layers, ep)
    if placement is None:
        return
    stages = f" and {len(layers.draft_layers)} draft stages" if layers.draft else ""
    extra = placement.slots_per_rank * ep / layers.num_experts - 1
    print(
        f"{config}: fits {layers.num_hidden_layers} layers{stages} on {ep} expert ranks:"
        f" {placement.num_slots} slots, {placement.slots_per_rank} a rank ({extra:.1%} more expert weights),"
        f" at most {placement.expert_slots.shape[2]} replicas of an expert\n"
        f"placement {placement.digest}"
    )


def _ranks(ep: int | None, recorded: "ExpertStatistics") -> int:
    if ep is not None and ep < 1:
        raise ConfigError(f"--ep is {ep}; expected at least 1")
    return recorded.ranks if ep is None else ep


def model_layers(model: str, draft_model: Path | None = None) -> "ExpertLayers":
    """The MoE layers by config.json alone: the folder needs no weights, and JAX is not imported."""
    from dspark_jax.config import read_config
    from dspark_jax.eplb.namespace import ExpertLayers

    shipped = Path(__file__).parent / "assets" / model
    if Path(model).name == model and shipped.is_dir():
        folder = shipped
    elif model and Path(model).is_dir():
        folder = Path(model)
    else:
        from dspark_jax.api import model_folder

        folder = model_folder(model)  # knows what to say
    draft = None if draft_model is None else read_config(draft_model)
    return ExpertLayers.from_hf(read_config(folder), draft, str(folder / "config.json"))


def _plot(reports: "dict[str, LoadReport]", path: Path, num_target_layers: int | None) -> None:
    from dspark_jax.plots_eplb import plot_rank_loads, save_figure

    try:
        figure = plot_rank_loads(reports, num_target_layers=num_target_layers)
    except ImportError as error:
        raise ConfigError(f"--plot: {error}") from error
    save_figure(figure, path)


def show_reports(reports: "dict[str, LoadReport]", parts: Mapping[str, range] | None) -> None:
    """A table of the layers, then means: over `parts` that were recorded, and over all. Without `parts` only the last.

    The mean of the ranks' rows is the same under every placement.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("\nlayer")
    for column in ("mean\nrows", *(f"{c}\n{n}" for c in ("std", "imbalance", "in sum") for n in reports)):
        table.add_column(column, justify="right", min_width=9)
    layers = next(iter(reports.values())).layers
    rows: dict[str, range | None] = {}
    if parts is not None:
        rows |= {str(layer): range(layer, layer + 1) for layer in layers}
        rows |= {name: part for name, part in parts.items() if set(part) & set(layers)}
    for name, part in {**rows, "all": None}.items():
        found = [report.overall(part) for report in reports.values()]
        std = [f"{f['std']:.1f}" for f in found]
        ratios = [f"{f[figure]:.3f}" for figure in ("imbalance", "total") for f in found]
        table.add_row(name, f"{found[0]['mean']:.1f}", *std, *ratios)
    Console(highlight=False, soft_wrap=True).print(table)
