"""The command-line options of the examples."""

import argparse
from typing import TYPE_CHECKING

from dspark_jax.errors import DSparkError
from dspark_jax.parallel.mesh_config import load_mesh
from dspark_jax.testing import emulate_devices

if TYPE_CHECKING:
    from jax.sharding import Mesh


def mesh_and_model(description: str | None) -> tuple["Mesh", str]:
    """Reads --mesh, --emulate-devices and --model; exits with a message if they do not fit. Call it before JAX starts."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="2x1", help="pipe x expert ranks (default 2x1)")
    parser.add_argument("--emulate-devices", type=int, help="CPU devices; 0 takes the real ones (default: the mesh's)")
    parser.add_argument("--model", default="nano", help="a shipped model's name or a checkpoint folder (default nano)")
    options = parser.parse_args()
    try:
        shape = load_mesh(options.mesh)
        count = shape.devices if options.emulate_devices is None else options.emulate_devices
        if count != 0:
            shape.check_devices(count)
            emulate_devices(count)
        return shape.make(), options.model
    except (DSparkError, RuntimeError, ValueError) as error:
        parser.error(str(error))
