"""`dspark-jax launch`: a command in several processes of this machine, started and ended together."""

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from dspark_jax.cli_guard import guarded
from dspark_jax.cli_process import is_script
from dspark_jax.errors import ConfigError, raise_all
from dspark_jax.parallel.distributed import COORDINATOR, LOCAL_DEVICES, PROCESS, PROCESSES
from dspark_jax.parallel.mesh_config import load_mesh

_GRACE = 2.0  # seconds that a process has to end when it is told to
_LAST = 90.0  # seconds that the others have to end when the first one has


@guarded
def launch(
    command: Annotated[list[str], typer.Argument(help="Behind --: a command such as generate, or a script (*.py).")],
    processes: Annotated[int, typer.Option(help="How many to start.")],
    mesh: Annotated[str | None, typer.Option("--mesh", help="Pipe x expert ranks of the command, such as 2x1.")] = None,
    emulate_devices: Annotated[
        int | None, typer.Option("--emulate-devices", min=1, help="Split the CPU of every process into this many devices.")
    ] = None,
) -> None:
    """Run a command in several processes that share one mesh. Process 0 reads and prints; if one fails, all end."""
    local = _local_devices(processes, mesh, emulate_devices)
    if command[0] == "launch":
        raise ConfigError("launch: the command is 'launch' again; expected one that runs a model, such as generate")
    if mesh is not None and not is_script(command[0]):
        command = [*command, "--mesh", mesh]
    if emulate_devices is not None:
        from dspark_jax.testing import emulate_devices as emulate

        emulate(emulate_devices)  # in the environment, which the processes inherit
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        shared = {COORDINATOR: f"127.0.0.1:{free.getsockname()[1]}", PROCESSES: str(processes)}
    own: list[dict[str, str]] = [{PROCESS: str(i)} for i in range(processes)]
    if local is not None:
        for i in range(processes):
            own[i][LOCAL_DEVICES] = ",".join(str(i * local + k) for k in range(local))
    code = run([sys.executable, "-m", "dspark_jax.cli_process", *command], [shared | one for one in own])
    if code:
        raise SystemExit(code)


def _local_devices(processes: int, mesh: str | None, emulated: int | None) -> int | None:
    """Devices of each process, where the mesh says so; raises ConfigError if they do not divide it."""
    faults = [] if processes >= 1 else [f"--processes is {processes}; expected at least 1"]
    shape = None if mesh is None else load_mesh(mesh)
    local = None
    if shape is not None and processes >= 1:
        local = shape.devices // processes
        if shape.devices % processes:
            faults.append(f"mesh {shape} has {shape.devices} devices; expected a multiple of --processes {processes}")
        elif emulated is not None and emulated != local:
            faults.append(f"--emulate-devices is {emulated}; expected {local}, the devices of a process in mesh {shape}")
    raise_all(ConfigError, "launch", faults)
    return local


def run(command: Sequence[str], environments: Sequence[Mapping[str, str]]) -> int:
    """Runs the command once for every environment, added to this one's; returns the exit code.

    The first process has the terminal; what the others print goes to stderr, each line marked with the process. When
    one fails the rest is ended, and its exit code is the answer (128 + n for signal n).
    """
    group = _Group()
    previous = signal.signal(signal.SIGTERM, _terminated)
    try:
        for environment in environments:
            group.start(command, os.environ | environment)
        return group.wait()
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # a second one must not interrupt the end
        group.end()
        signal.signal(signal.SIGTERM, previous)
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _terminated(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(128 + signal.SIGTERM)


class _Group:
    """Processes that end together."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen] = []
        self.readers: list[threading.Thread] = []
        self.ended: queue.Queue[tuple[int, int]] = queue.Queue()  # number and exit code, in order
        self.failed: int | None = None

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Starts the next process."""
        index = len(self.processes)
        output: dict[str, Any] = {}
        if index > 0:
            output = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, env=environment, **output)
        self.processes.append(process)
        threading.Thread(target=lambda: self._watch(index, process), daemon=True).start()
        if index > 0:
            self.readers.append(threading.Thread(target=lambda: self._mark(index, process), daemon=True))
            self.readers[-1].start()

    def wait(self) -> int:
        """The exit code of the first process that fails; 0 when all have ended well."""
        limit = None
        for _ in self.processes:
            try:
                index, code = self.ended.get(timeout=limit)
            except queue.Empty:
                _say(f"process 0 has ended, and others have not after {_LAST:.0f} s; they are ended")
                return 1
            if code:
                if code < 0:
                    _say(f"process {index} was killed by {_signal(-code)}; the others are ended")
                elif index > 0:  # process 0 has said itself why
                    _say(f"process {index} has failed with exit code {code}; the others are ended")
                return code if code > 0 else 128 - code
            limit = _LAST if index == 0 else limit
        return 0

    def end(self) -> None:
        """Ends those that still run. JAX may hold SIGTERM back, so it does not stay at that."""
        for process in self.processes:
            process.terminate()
        limit = time.monotonic() + _GRACE
        for process in self.processes:
            try:
                process.wait(max(limit - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                process.kill()
        for reader in self.readers:
            reader.join(_GRACE)

    def _watch(self, index: int, process: subprocess.Popen) -> None:
        code = process.wait()
        if code and self.failed is None:
            self.failed = index
        self.ended.put((index, code))

    def _mark(self, index: int, process: subprocess.Popen) -> None:
        for line in process.stdout or ():
            text = line.decode(errors="replace")
            # Gloo announces its connections. What others say once a process has failed is only that they miss it.
            if not text.startswith("[Gloo]") and self.failed in (None, index):
                sys.stderr.write(f"[{index}] {text}")
                sys.stderr.flush()


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no name
        return f"signal {number}"


def _say(message: str) -> None:
    print(f"dspark-jax: error: {message}", file=sys.stderr)
