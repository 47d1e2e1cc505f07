"""Validation of a load-balancer section against a model: whole, on the host, every fault in one error.

Nothing here touches a device: an impossible section is refused on every process before any collective exists.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from dspark_jax.eplb.config import Assignments, ConfigSource, LoadBalancerConfig, load_config
from dspark_jax.eplb.namespace import DraftExperts, ExpertLayers
from dspark_jax.eplb.placement import Placement
from dspark_jax.errors import ConfigError, raise_all

DOCS = "docs/expert_placement.md"
LISTED = 32  # expert ids of one fault that are spelt out; layers always are


class PlacementNotice(UserWarning):
    """A load-balancer section has no effect, or a part of it has none; the message says which and why."""


PlacementSource = ConfigSource | Placement


def resolve_placement(source: PlacementSource | None, layers: ExpertLayers, expert_ranks: int) -> Placement | None:
    """The placement that a load-balancer section asks for, None where experts are not balanced.

    Balancing is active with a section and more than one expert rank. Without a section this returns None; with one
    expert rank too, and a `PlacementNotice` says that the section is ignored. Layers that the model does not have are
    ignored with one notice that names them (a file made for another drafter works without it).

    Args:
      source: a YAML file's path, the section as a mapping or object, a placement, or None.
      layers: the model's MoE layers.
      expert_ranks: size of the mesh's `expert` axis.

    Raises:
      ConfigError: the section cannot be read, or (when active) does not fit the model: every fault in one message.
    """
    if source is None:
        return None
    config = _as_section(source) if isinstance(source, Placement) else load_config(source)
    name = str(source) if isinstance(source, str) or hasattr(source, "__fspath__") else "load_balancer"
    if expert_ranks == 1:
        _notice(f"{name}: ignored, because experts are balanced over ranks and there is one expert rank")
        return None
    faults = placement_faults(config, layers, expert_ranks)
    if isinstance(source, Placement):
        faults = [*_made_for_faults(source, layers, expert_ranks), *faults]
    raise_all(ConfigError, name, faults)
    if outside := sorted((config.initial_global_assignments or {}).keys() - range(layers.num_layers)):
        stages = f" and {len(layers.draft_layers)} draft stages" if layers.draft else ", without draft stages"
        _notice(
            f"{name}: initial_global_assignments has layers {outside}, which are ignored: the model has"
            f" {layers.num_hidden_layers} target layers{stages}, so its layers are [0, {layers.num_layers})"
        )
    return _placement(config, layers, expert_ranks)


def placement_faults(config: LoadBalancerConfig, layers: ExpertLayers, expert_ranks: int) -> list[str]:
    """Everything that makes `config` impossible for a model on `expert_ranks` > 1 ranks, with remedies; [] if nothing.

    Layers outside the namespace are no fault.
    """
    faults = [*slot_faults(config.num_slots, layers.num_experts, expert_ranks)]
    if config.layer_updates_per_iter > 0:
        faults.append(_online_fault(config.layer_updates_per_iter, layers.draft))
    if layers.draft is not None:
        faults += _draft_faults(layers, layers.draft)
    rows = config.initial_global_assignments
    if rows is not None:  # an empty mapping is not absent: it lacks every layer
        faults += _missing_layer_faults(rows, layers)
        known = {layer: row for layer, row in rows.items() if layer in range(layers.num_layers)}
        faults += row_faults(known, config.num_slots, layers.num_experts)
    return faults


def _placement(config: LoadBalancerConfig, layers: ExpertLayers, ranks: int) -> Placement:
    assert config.num_slots is not None
    rows = config.initial_global_assignments
    if rows is None:
        return Placement.auto(layers.num_layers, layers.num_experts, config.num_slots, ranks)
    table = np.array([rows[layer] for layer in range(layers.num_layers)], np.int32)
    return Placement(table, layers.num_experts, ranks)


def _as_section(placement: Placement) -> LoadBalancerConfig:
    rows = {layer: row.tolist() for layer, row in enumerate(placement.slot_to_expert)}
    return LoadBalancerConfig(placement.num_slots, rows)


def _made_for_faults(placement: Placement, layers: ExpertLayers, ranks: int) -> Iterator[str]:
    for name, made, here in (
        ("expert_ranks", placement.expert_ranks, ranks),
        ("num_experts", placement.num_experts, layers.num_experts),
    ):
        if made != here:
            yield f"the placement was made with {name} = {made}; expected {here}: make it for this mesh and model"


def _notice(message: str) -> None:
    warnings.warn(message, PlacementNotice, stacklevel=3)


def slot_faults(slots: int | None, experts: int, ranks: int) -> Iterator[str]:
    """What is wrong with `num_slots`."""
    least = -(-experts // ranks) * ranks
    wanted = f"a multiple of the {ranks} expert ranks and at least {experts}, the number of routed experts"
    if slots is None:
        yield f"num_slots is missing; expected {wanted}, for example {least}"
        return
    if slots < 1:
        yield (
            f"num_slots is {slots}, which does not switch balancing off; expected {wanted}, for example {least}."
            " To switch it off, leave the section out"
        )
        return
    if slots % ranks:
        lower = slots // ranks * ranks
        choices = [str(n) for n in (lower, lower + ranks) if n >= experts]
        yield (
            f"num_slots is {slots}; expected a multiple of the {ranks} expert ranks, as each holds equally many slots:"
            f" use {' or '.join(choices) or least}"
        )
    if slots < experts:
        yield (
            f"num_slots is {slots}; expected at least {experts}, a slot for every routed expert (with automatic"
            f" placement too): use {least} or more"
        )


def _online_fault(updates: int, draft: DraftExperts | None) -> str:
    reason = ""
    if draft is not None:
        reason = (
            " With DSpark on it could not work either: the drafter's MoE layers are idle in iterations without"
            " generation requests (prefill, warm-up), and an online balancer would wait for them for ever."
        )
    return (
        f"layer_updates_per_iter is {updates}; static EPLB only: there is no online balancer, which would place"
        f" {updates} layers anew in each iteration.{reason} Set it to 0"
    )


def _draft_faults(layers: ExpertLayers, draft: DraftExperts) -> Iterator[str]:
    remedy = "use the drafter that was published with this target"
    if draft.num_hidden_layers != layers.num_hidden_layers:
        yield (
            f"num_hidden_layers is {draft.num_hidden_layers} in the draft's config and {layers.num_hidden_layers} in"
            " the target's; expected the same, because a draft stage's layer index is num_hidden_layers + stage and"
            f" must be the one that the mapping's keys mean: {remedy}"
        )
    for name, own, target in (
        ("n_routed_experts", draft.num_experts, layers.num_experts),
        ("num_experts_per_tok", draft.top_k, layers.top_k),
    ):
        if own != target:
            yield (
                f"{name} is {own} in the draft's config and {target} in the target's; expected the same, because both"
                f" share one placement: {remedy}, or leave the load-balancer section out"
            )
    if draft.num_stages < 1:
        yield f"the drafter has {draft.num_stages} stages; expected at least 1: {remedy}"


def _missing_layer_faults(rows: Assignments, layers: ExpertLayers) -> Iterator[str]:
    auto = "leave initial_global_assignments out, and every layer is placed automatically"
    if missing := [i for i in layers.target_layers if i not in rows]:
        yield (
            f"target layers {missing} are missing from initial_global_assignments; expected every layer in"
            f" [0, {layers.num_hidden_layers}). Either regenerate the file for this model ({DOCS}), or {auto}"
        )
    if missing := [i for i in layers.draft_layers if i not in rows]:
        where = layers.draft_layers
        yield (
            f"draft stage layers {missing} are missing from initial_global_assignments; expected all of"
            f" [{where.start}, {where.stop}), the {len(where)} stages of DSpark: a stage's layer index is"
            f" num_hidden_layers + stage = {where.start} + stage. Either regenerate the file from statistics that were"
            f" collected with DSpark on ({DOCS}), or {auto}"
        )


def row_faults(rows: Assignments, slots: int | None, experts: int) -> Iterator[str]:
    """Faults of the lists' lengths, ids and coverage; layers that share one are named together."""

    def length(row: Sequence[int]) -> str | None:
        if slots is None or len(row) == slots:
            return None
        return f"the list has {len(row)} entries; expected num_slots = {slots}, an expert id for every slot"

    def outside(row: Sequence[int]) -> str | None:
        wrong = sorted({e for e in row if not 0 <= e < experts})
        if not wrong:
            return None
        return (
            f"the list holds expert ids {_ids(wrong)}; expected ids in [0, {experts}), as the model has {experts}"
            " routed experts (was the file made for another model?)"
        )

    def uncovered(row: Sequence[int]) -> str | None:
        missing = sorted(set(range(experts)) - set(row))
        if not missing:
            return None
        return (
            f"experts {_ids(missing)} have no slot; expected every expert in [0, {experts}) at least once:"
            f" plan the file anew ({DOCS})"
        )

    for check in (length, outside, uncovered):
        for fault, where in _grouped(rows, check).items():
            yield f"{'layer ' + str(where[0]) if len(where) == 1 else 'layers ' + str(where)}: {fault}"


def _grouped(rows: Mapping[int, Sequence[int]], check: Callable[[Sequence[int]], str | None]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for layer in sorted(rows):
        if fault := check(rows[layer]):
            found.setdefault(fault, []).append(layer)
    return found


def _ids(ids: Iterable[int]) -> str:
    ids = list(ids)
    rest = len(ids) - LISTED
    return f"{ids[:LISTED]} and {rest} more" if rest > 0 else str(ids)
