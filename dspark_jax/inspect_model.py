"""What a model holds and takes on a mesh: parameters, bytes of every rank, cache of a request, and whether it all fits.

Everything follows from config.json and the headers of the weight files: no weight is read and no device is touched.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dspark_jax.config import DraftConfig, TargetConfig
from dspark_jax.config_dense import v4_config
from dspark_jax.eplb.namespace import ExpertLayers
from dspark_jax.eplb.validation import PlacementSource, resolve_placement
from dspark_jax.errors import ConfigError, raise_all
from dspark_jax.parallel.leaves import ITEM_SIZE, Leaf, rank_leaves
from dspark_jax.parallel.mesh_config import MeshConfig, MeshSource, load_mesh
from dspark_jax.parallel.planner import StagePlan, given_stages, plan_stages
from dspark_jax.presets import PRESETS, checkpoint_folder, model_configs

CONTEXT = 8192  # positions of a request, or the model's limit
SLOTS = 8  # requests of a device
H200 = 140.0  # GiB that one has
_WEIGHTS = {"dequantised": {}, "quantised": {"expert_weights": "fp4"}}
_WEIGHTS["quantised-all"] = _WEIGHTS["quantised"] | {"linear_weights": "fp8"}


@dataclass(frozen=True)
class Inspection:
    """A model on a mesh. Parameters are counted once, whatever the mesh: hash tables are none, a code is one.

    Attributes:
      model, mesh: as given; the mesh as "PxE".
      expert_weights: how devices hold the routed experts: "dense" (numbers of the plan's dtype), "fp8" or "fp4".
      linear_weights: the same of the other linear maps that published files hold as fp8: "dense" or "fp8".
      target_parameters, draft_parameters: embedding and output head are the target's, which the drafter shares.
      target_active, draft_active: of them, those that a row is multiplied with: of the routed experts as many as a row
        visits, and no table that a row picks a vector from. `draft_active` counts all stages and heads once.
      stored: bytes of the weight files by dtype, in safetensors' notation; None where there are none.
      num_slots: expert slots of a layer over all expert ranks.
      slots: requests side by side on the whole mesh.
      plan: the stages, and the memory of a device.
      widened: bytes of one layer's experts on a device in the model's dtype, for as long as the layer runs; 0 for "dense".
      memory: bytes that a device has.
    """

    model: str
    mesh: str
    expert_weights: str
    linear_weights: str
    target_parameters: int
    draft_parameters: int
    target_active: int
    draft_active: int
    stored: Mapping[str, int] | None
    num_slots: int
    slots: int
    plan: StagePlan
    widened: int
    memory: int

    @property
    def needed(self) -> int:
        """Bytes of a device: parameters, state of its requests, item, and widened experts. Other temporaries of the program
        (activations, logits) are not counted."""
        return self.plan.memory.total + self.widened

    @property
    def fits(self) -> bool:
        """Whether a device has the bytes that are needed; activations are not counted."""
        return self.needed <= self.memory

    @property
    def most_slots(self) -> int:
        """Requests side by side for which a device's memory would do with these stages, on the whole mesh; 0 if for none."""
        part, expert = self.plan.memory, self.plan.load.expert
        free = self.memory - part.parameters - self.widened
        # A microbatch of one request a device: a slot on every pipe rank, and its share of the item.
        each = self.plan.pipe * (part.cache + part.request) + part.item * self.plan.pipe // part.slots
        return max(free, 0) // each * self.plan.pipe * expert

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON; memory in bytes."""
        names = ("model", "mesh", "expert_weights", "linear_weights")
        names += ("target_parameters", "draft_parameters", "target_active", "draft_active")
        found = {name: getattr(self, name) for name in names}
        found |= {"stored": None if self.stored is None else dict(self.stored), "num_slots": self.num_slots}
        found |= {"slots": self.slots, "plan": self.plan.as_dict(), "widened": self.widened, "needed": self.needed}
        return found | {"memory": self.memory, "fits": self.fits, "most_slots": self.most_slots}


def inspect_model(
    model: str | Path,
    mesh: MeshSource = "1x1",
    *,
    eplb: PlacementSource | None = None,
    weights: str = "dequantised",
    dtype: str = "bfloat16",
    slots: int | None = None,
    context: int | None = None,
    memory: float = H200,
) -> Inspection:
    """Inspects a shipped model, a preset, or a folder; with weight files their headers are checked as `load` does.

    Args:
      model: a shipped model's name, a preset ("v4-flash", "v4-pro"), or a folder with config.json and maybe weights.
      mesh: "PxE", a mesh file, or a `MeshConfig`.
      eplb: the experts' placement, as for `Engine`; its slots take memory.
      weights: as for `load`; a preset's experts are fp4 and its linear maps fp8, as published.
      dtype: of weights and activations: float32, bfloat16 or float16.
      slots: requests side by side on the mesh, by default 8 for every device.
      context: positions of a request, by default 8192 or the model's limit.
      memory: GiB of a device.

    Raises CheckpointError or ConfigError that lists all that is impossible.
    """
    faults = [] if weights in _WEIGHTS else [f"weights is {weights!r}; expected {' or '.join(map(repr, _WEIGHTS))}"]
    if dtype not in ITEM_SIZE:
        faults.append(f"dtype is {dtype!r}; expected {', '.join(ITEM_SIZE)}")
    if not 0 < memory < float("inf"):
        faults.append(f"memory is {memory!r}; expected GiB of a device, a positive number")
    raise_all(ConfigError, "inspect", faults)
    shape = load_mesh(mesh)
    config, draft, stored = _read(str(model), weights)
    placed = resolve_placement(eplb, ExpertLayers.of(config, draft), shape.expert)
    slots = SLOTS * shape.devices if slots is None else _slots(slots, shape)
    num_slots = placed.num_slots if placed else config.n_routed_experts
    load: dict[str, Any] = {
        "rows": slots // shape.pipe * (1 + (draft.block_size if draft else 0)),
        "context": min(CONTEXT, config.max_position_embeddings) if context is None else context,
        "expert": shape.expert,
        "dtype": dtype,
        "num_slots": placed.num_slots if placed else None,
    }
    if shape.stages is None:
        plan = plan_stages(config, draft, shape.pipe, **load)
    else:
        plan = given_stages(config, draft, shape.stages, shape.pipe, **load)
    whole = ((0, config.num_hidden_layers),)
    target = rank_leaves(config, None, whole, 1, 0)
    drafter = rank_leaves(config, draft, whole, 1, 0) - target
    visited = config.num_experts_per_tok / config.n_routed_experts
    expert = 3 * config.hidden_size * config.moe_intermediate_size
    return Inspection(
        model=str(model),
        mesh=str(shape),
        expert_weights=config.expert_weights,
        linear_weights=config.linear_weights,
        target_parameters=_numbers(target),
        draft_parameters=_numbers(drafter),
        target_active=_numbers(target, visited),
        draft_active=_numbers(drafter, visited),
        stored=stored,
        num_slots=num_slots,
        slots=slots,
        plan=plan,
        widened=0 if config.expert_weights == "dense" else expert * num_slots // shape.expert * ITEM_SIZE[dtype],
        memory=int(memory * 2**30),
    )


def _read(model: str, weights: str) -> tuple[TargetConfig, DraftConfig | None, Mapping[str, int] | None]:
    """Configurations, the target's with what stays codes, and the bytes of the weight files by dtype."""
    if model in PRESETS:
        config, draft = PRESETS[model]()
        return replace(config, **_WEIGHTS[weights]), draft, None
    folder = checkpoint_folder(model)
    if not any(folder.glob("*.safetensors*")):
        if weights != "dequantised":
            raise ConfigError(f"{folder}: holds no weights that could say how they are quantised; use --weights dequantised")
        return *model_configs(model), None
    from dspark_jax.checkpoint.files import open_files, stored_bytes
    from dspark_jax.checkpoint.reader import open_checkpoint

    opened = open_checkpoint(folder, dtype="float32", weights=weights)  # type: ignore[arg-type]
    return v4_config(opened.config, str(folder)), opened.draft, stored_bytes(open_files(folder))


def _slots(slots: int, shape: MeshConfig) -> int:
    from dspark_jax.serve.scheduler import slot_counts

    raise_all(ConfigError, "inspect", slot_counts(slots, shape.pipe, shape.expert)[1])
    return slots


def _numbers(leaves: Iterable[Leaf], visited: float | None = None) -> int:
    """Parameters in `leaves`; with the share of the experts that a row visits, those that it is multiplied with."""
    total = 0
    for leaf in leaves:
        if leaf.kind == "int" or (visited is not None and leaf.role == "table"):
            continue
        count = leaf.size * leaf.numbers
        total += round(count * visited) if visited is not None and leaf.role == "experts" else count
    return total
