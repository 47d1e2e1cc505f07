"""Device time of an operation: many dependent calls in one program, less the same program without them."""

import datetime
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

STEPS, UNROLL = 50, 4  # calls of a program by default


class Program:
    """`step` (carry -> carry) many times: `steps` times round a loop with `unroll` calls in its body. Compiles in a thread as
    soon as it is made.

    An optimisation barrier after every step keeps XLA from merging steps or computing only a part of one.
    """

    _pool = ThreadPoolExecutor(8)

    def __init__(self, step: Callable[[Any], Any], carry: Any, steps: int = STEPS, unroll: int = UNROLL):
        def body(_: int, carry: Any) -> Any:
            for _ in range(unroll):
                carry = jax.lax.optimization_barrier(step(carry))
            return carry

        self.carry, self.calls = carry, steps * unroll
        run = jax.jit(lambda carry: jax.lax.fori_loop(0, steps, body, carry))
        self._compiled: Future = self._pool.submit(lambda: run.lower(carry).compile())

    def wait(self) -> Exception | None:
        """Waits for the compilation; its error, if it failed."""
        error = self._compiled.exception()
        if error is None or isinstance(error, Exception):
            return error
        raise error

    def run(self) -> float:
        """Time of one step in us."""
        start = time.perf_counter()
        jax.block_until_ready(self._compiled.result()(self.carry))
        return (time.perf_counter() - start) / self.calls * 1e6


def wait(programs: Iterable[Program]) -> None:
    """Before any timing: threads that compile take the host from the one that launches."""
    for program in programs:
        program.wait()


def times_us(programs: dict[str, Program], repeats: int = 9) -> dict[str, float]:
    """Median time of a step of each program less that of the one named "", run in turn; without those that fail.

    Call `wait` with all programs of the benchmark first. Failures are printed.
    """
    samples: dict[str, list[float]] = {}
    for name, program in programs.items():
        try:
            if error := program.wait():
                raise error
            program.run()
            samples[name] = []
        except Exception as error:
            print(f"  {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
    for _ in range(repeats):
        for name, values in samples.items():
            values.append(programs[name].run())
    medians = {name: statistics.median(values) for name, values in samples.items()}
    return {name: value - medians[""] for name, value in medians.items() if name}


@lru_cache(1)
def read_ceiling() -> float:
    """Bytes a second that a skinny bf16 matmul reads of a matrix of 512 MB."""
    w = jnp.full((4096, 65536), 0.01, jnp.bfloat16)
    x = jnp.ones((8, 4096), jnp.bfloat16)

    def step(_: int, x: jax.Array, w: jax.Array) -> jax.Array:
        # Without the barrier XLA may compute only the columns that are kept.
        return jnp.tanh(jax.lax.optimization_barrier(x @ w)[:, :4096])

    # w is an argument: as a constant it would be copied into the program.
    run = jax.jit(lambda x, w: jax.lax.fori_loop(0, 40, lambda i, x: step(i, x, w), x))
    jax.block_until_ready(run(x, w))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(run(x, w))
        times.append(time.perf_counter() - start)
    return 40 * w.nbytes / min(times)


def commit() -> str:
    """The short name of the commit that is checked out where the program runs; "unknown" outside a repository."""
    try:
        git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    except OSError:  # there is no git
        return "unknown"
    return git.stdout.strip() or "unknown"


class Records:
    """The results of a benchmark as a JSON list, written after every case."""

    def __init__(self, path: str | None):
        self.path, self.records, self.commit = path, [], commit()

    def add(self, bench: str, case: str, time_us: float, bytes_moved: int, peers: dict[str, float]) -> None:
        """One case: its time, the floor that the bytes set, and the peers' times (us)."""
        rate = read_ceiling()
        record = {
            "bench": bench,
            "case": case,
            "device": jax.devices()[0].device_kind,
            "date": datetime.date.today().isoformat(),
            "commit": self.commit,
            "time_us": round(time_us, 2),
            "floor_us": round(bytes_moved / rate * 1e6, 2),
            "ceiling": f"{rate / 1e12:.2f} TB/s",
            "fraction": round(bytes_moved / rate * 1e6 / time_us, 3),
            "peers": {name: round(value, 2) for name, value in peers.items()},
        }
        self.records.append(record)
        print(f"{bench} {case}: {time_us:.2f} us, floor {record['floor_us']} us, peers {record['peers']}", flush=True)
        if self.path:
            Path(self.path).write_text(json.dumps(self.records, indent=1) + "\n")
