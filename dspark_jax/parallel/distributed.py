"""Joining processes: one on every host, or one for every GPU. `dspark-jax launch` starts them on one machine.

JAX is imported inside the functions: the command line asks `requested` before it decides whether to start JAX.
"""

import os
from collections.abc import Sequence
from typing import Any

from dspark_jax.errors import ConfigError, raise_all

COORDINATOR, PROCESSES = "DSPARK_COORDINATOR", "DSPARK_PROCESSES"
PROCESS, LOCAL_DEVICES = "DSPARK_PROCESS", "DSPARK_LOCAL_DEVICES"
_SHUTDOWN_SECONDS = 60  # how long an orderly end waits for the other processes


def requested() -> bool:
    """Whether the environment says that this process is one of several."""
    return COORDINATOR in os.environ


def check_processes(mesh: Any) -> None:
    """Raises ConfigError where a command has no mesh and is one of several processes."""
    if requested() and mesh is None:
        raise ConfigError("several processes need --mesh PxE, where P x E is the number of their devices")


def initialize(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    local_devices: Sequence[int] | None = None,
) -> bool:
    """Joins this process to the others, after which `jax.devices()` lists the devices of all; returns whether it did.

    Call it before anything asks JAX for a device. It returns when all processes have called it. Without arguments the
    environment decides (DSPARK_COORDINATOR, DSPARK_PROCESSES, DSPARK_PROCESS, DSPARK_LOCAL_DEVICES), and where that
    says nothing either this process stays alone.

    Args:
      coordinator: "host:port" of process 0, reachable from every process; the port must be free there.
      processes: how many there are.
      process: this one's number, from 0.
      local_devices: which GPUs of this host are this process's; by default all of them.

    Raises ConfigError for values that are missing or wrong, and where JAX has started already.
    """
    import jax

    if coordinator is None and processes is None and process is None:
        if not requested():
            return False
        coordinator, processes, process, local_devices = _from_environment()
    raise_all(ConfigError, "several processes", _faults(coordinator, processes, process))
    if jax.distributed.is_initialized():
        return True
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            coordinator, processes, process, local_devices, shutdown_timeout_seconds=_SHUTDOWN_SECONDS
        )
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"process {process} cannot join the others at {coordinator}: {reason}") from error
    return True


def _from_environment() -> tuple[str, Any, Any, list[int] | None]:
    listed = os.environ.get(LOCAL_DEVICES)
    local = None if listed is None else [_number(LOCAL_DEVICES, part) for part in listed.split(",")]
    numbers = [_number(name, os.environ.get(name)) for name in (PROCESSES, PROCESS)]
    return os.environ[COORDINATOR], numbers[0], numbers[1], local


def _number(name: str, text: str | None) -> int:
    try:
        return int(text or "")
    except ValueError:
        raise ConfigError(f"{name} is {text!r}; expected an integer, as {COORDINATOR} is set") from None


def _faults(coordinator: str | None, processes: int | None, process: int | None) -> list[str]:
    found = []
    host, _, port = (coordinator or "").rpartition(":")
    if not (host and port.isdecimal()):
        found.append(f"coordinator is {coordinator!r}; expected host:port of process 0")
    if processes is None or processes < 1:
        found.append(f"processes is {processes!r}; expected at least 1")
    if process is None or not 0 <= process < max(processes or 1, 1):
        found.append(f"process is {process!r}; expected 0 … processes - 1")
    return found
