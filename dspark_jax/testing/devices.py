"""Several devices on a machine that has one: XLA's host platform split into parts."""

import os
import re

import jax

_FLAG = "--xla_force_host_platform_device_count"


def emulate_devices(count: int) -> None:
    """Makes `jax.devices("cpu")` return `count` devices. Call it before anything asks jax for a device or an array.

    Sets XLA_FLAGS, NPROC (XLA sizes its CPU thread pools by it; with fewer threads than device programs in flight,
    collectives deadlock) and, unless chosen already, JAX_PLATFORMS=cpu. Subprocesses inherit the settings. If jax
    already runs with `count` CPU devices, nothing changes.

    Raises:
      ValueError: `count` is not a positive integer.
      RuntimeError: jax has already started with another number of devices.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"count = {count!r}; expected a positive number of devices")
    try:
        jax.config.update("jax_num_cpu_devices", count)  # refuses once the devices exist
    except RuntimeError as error:
        present = len(jax.devices())
        if present == count and jax.default_backend() == "cpu":
            return
        raise RuntimeError(
            f"emulate_devices({count}) came too late: jax has already started with {present} {jax.default_backend()} "
            "device(s); call it before the first array or jax.devices(), or set "
            f"XLA_FLAGS={_FLAG}={count} in the environment"
        ) from error
    flags = re.sub(rf"{_FLAG}=\S*", "", os.environ.get("XLA_FLAGS", ""))
    os.environ["XLA_FLAGS"] = " ".join([*flags.split(), f"{_FLAG}={count}"])
    current = os.environ.get("NPROC", "")
    os.environ["NPROC"] = str(max(4 * count, int(current) if current.isdigit() else 0))
    if not (os.environ.get("JAX_PLATFORMS") or jax.config.jax_platforms):
        os.environ["JAX_PLATFORMS"] = "cpu"  # for subprocesses; jax here has read the variable already
        jax.config.update("jax_platforms", "cpu")
