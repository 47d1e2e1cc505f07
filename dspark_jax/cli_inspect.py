"""`dspark-jax inspect`: parameters, bytes of every rank and of a request, and whether a model fits, without its weights."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dspark_jax.cli_guard import guarded
from dspark_jax.cli_mesh import size

if TYPE_CHECKING:
    from dspark_jax.inspect_model import Inspection


@guarded
def inspect(
    model: Annotated[str, typer.Argument(help="v4-flash, v4-pro, a shipped model, or a folder with config.json.")],
    mesh: Annotated[str, typer.Option(help="Pipe x expert ranks, such as 2x4, or a mesh file (YAML).")] = "1x1",
    eplb: Annotated[Path | None, typer.Option(help="Load-balancer file (YAML): its expert slots take memory.")] = None,
    weights: Annotated[
        str, typer.Option(help="dequantised; quantised: devices keep experts' codes; or quantised-all: all codes.")
    ] = "dequantised",
    dtype: Annotated[str, typer.Option(help="Of weights and activations: bfloat16, float32 or float16.")] = "bfloat16",
    slots: Annotated[int | None, typer.Option(help="Requests side by side; by default 8 for every device.")] = None,
    context: Annotated[
        int | None, typer.Option(help="Positions of a request; by default 8192 or the model's limit.")
    ] = None,
    memory: Annotated[
        float | None, typer.Option(help="GiB of a device; by default this machine's GPU's, else 140, an H200's.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Show what a model takes on a mesh, and whether it fits; only config.json and headers are read."""
    from dspark_jax.inspect_model import H200, inspect_model

    found = inspect_model(
        model, mesh, eplb=eplb, weights=weights, dtype=dtype, slots=slots, context=context,
        memory=(_own_memory() or H200) if memory is None else memory,
    )  # fmt: skip
    if as_json:
        print(json.dumps(found.as_dict()))
    else:
        _show(found)


def _own_memory() -> float | None:
    """GiB that JAX may allocate on a GPU of this machine; None without one."""
    import jax

    device = jax.local_devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit") if device.platform == "gpu" else None
    return limit / 2**30 if limit else None


def _show(found: "Inspection") -> None:
    from dspark_jax.parallel.planner import layer_names

    plan, memory = found.plan, found.plan.memory
    load, pipe = plan.load, plan.pipe
    experts = f"{load.dtype} experts" if found.expert_weights == "dense" else f"experts kept as {found.expert_weights} codes"
    experts += ", linear maps as fp8" if found.linear_weights == "fp8" else ""
    print(f"{found.model} on mesh {found.mesh}, {load.dtype}, {experts}\n")
    print(f"target   {_count(found.target_parameters)} parameters, {_count(found.target_active)} of them active for a token")
    if plan.draft_stages:
        stages = f" and {plan.draft_stages} draft stage{'s' * (plan.draft_stages > 1)}"
        print(f"drafter  {_count(found.draft_parameters)} parameters, {_count(found.draft_active)} of them active for a draft")
    else:
        stages = ""
        print("drafter  none")
    if found.stored is not None:
        parts = ", ".join(f"{name} {size(n)}" for name, n in sorted(found.stored.items(), key=lambda x: -x[1]))
        print(f"files    {size(sum(found.stored.values()))}: {parts}")
    for rank, ((first, end), own) in enumerate(zip(plan.ranges, memory.own, strict=True)):
        where = layer_names(first, end) + (stages if rank == pipe - 1 else "")
        print(f"rank {rank:<3} {size(own)} of weights on each device: {where}")
    request = memory.cache + memory.request
    print(f"request  {size(request)} on a device of each pipe rank, for {load.context} positions")
    padding = memory.parameters - min(memory.own)
    parts = [f"weights {size(memory.parameters)}" + (f" (up to {size(padding)} of them zeros)" if padding else "")]
    slots = f"{memory.slots} request slot{'s' * (memory.slots != 1)}"
    parts += [f"{slots} {size(memory.slots * request)}", f"item {size(memory.item)}"]
    parts += [f"a layer's experts, widened, {size(found.widened)}"] if found.widened else []
    print(f"\nEach device: {', '.join(parts)}; together {size(found.needed)} of {size(found.memory)}.")
    if found.fits:
        most = f"{found.most_slots} request{'s' * (found.most_slots != 1)}"
        room = f"memory for {most} side by side on the mesh, {found.slots} counted here"
        print(f"It fits: {room}. Activations and logits are not counted.")
        return
    remedies = ["more devices"]
    remedies += ["fewer --slots", "a shorter --context"] if found.most_slots else []
    remedies += ["--weights quantised"] if found.expert_weights == "dense" else []
    remedies += ["--weights quantised-all"] if found.expert_weights != "dense" and found.linear_weights == "dense" else []
    over = size(found.needed - found.memory)
    print(f"It does not fit: {over} too much on each device. What helps: {', '.join(remedies)}.")


def _count(parameters: int) -> str:
    """Parameters as text, in millions or thousands of millions."""
    return f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.1f}M"
