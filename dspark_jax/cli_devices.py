"""`--mesh` and `--emulate-devices`: from the command line to a mesh. Devices are emulated before JAX starts."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dspark_jax.errors import ConfigError
from dspark_jax.parallel.mesh_config import MeshConfig, load_mesh

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from dspark_jax.parallel.stage import Ranges

MeshOption = Annotated[
    str | None,
    typer.Option("--mesh", help="Pipe x expert ranks, such as 2x1, or a mesh file (YAML); by default one device."),
]
EmulateOption = Annotated[
    int | None, typer.Option("--emulate-devices", min=1, help="Split the CPU into this many devices.")
]
PlacementOption = Annotated[
    Path | None, typer.Option("--placement", help="Load-balancer file (YAML): expert slots of every layer.")
]
WeightsOption = Annotated[
    Literal["dequantised", "quantised", "quantised-all"],
    typer.Option("--weights", help="Of fp8 or fp4 files: dequantised; quantised: devices keep experts' codes; -all: all."),
]


def chosen_mesh(mesh: str | None, emulate: int | None) -> tuple[MeshConfig, "Mesh | None"]:
    """The mesh that the options name; None, one device, where neither was given.

    Raises ConfigError for an unknown form, and for a mesh that does not take exactly the devices that there are.
    """
    if mesh is None and emulate is None:
        return MeshConfig(), None
    shape = MeshConfig() if mesh is None else load_mesh(mesh)
    if emulate is not None:
        if shape.devices != emulate:
            raise ConfigError(
                f"--emulate-devices is {emulate}, and mesh {shape} takes {shape.devices}; expected --emulate-devices"
                f" {shape.devices}, or another --mesh"
            )
        from dspark_jax.testing import emulate_devices

        try:
            emulate_devices(emulate)
        except RuntimeError as error:
            raise ConfigError(str(error)) from error
    return shape, shape.make()


def stage_ranges(shape: MeshConfig, model: str) -> "Ranges | str | None":
    """Layers of the pipe ranks that a mesh file names, of a GGUF file as written there; None where it leaves them out.

    Raises ConfigError that lists all that makes them impossible for `model`.
    """
    if shape.stages is None or model.endswith(".gguf"):
        return shape.stages
    from dspark_jax.parallel.planner import given_stages
    from dspark_jax.presets import any_configs

    config, draft = any_configs(model)
    return given_stages(config, draft, shape.stages, shape.pipe, rows=1, context=2, expert=shape.expert).ranges
