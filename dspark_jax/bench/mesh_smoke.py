"""The smallest program with what the ring relies on: collectives over `expert` in a branch that the `pipe` index chooses, in a
loop. Ranks of other `pipe` indices enter other numbers of collectives; a runtime that mixes them up hangs, or adds the wrong
rows.

    python -m dspark_jax.bench.mesh_smoke 2x4 4x2

`check` runs it in a process of its own under a time limit, before anything here asks JAX for devices.
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from dspark_jax.parallel.mesh import EXPERT, PIPE, make_mesh
from dspark_jax.parallel.mesh_config import load_mesh

TICKS = 12  # a multiple of 1, 2, 3, 4 pipe ranks; with more of them it is filled up
REMEDY = "set NCCL_NVLS_ENABLE=0 (NVLink multicast off), and NCCL_DEBUG=INFO to see which connection stands still"


def smoke(pipe: int, expert: int) -> None:
    """Runs the program on the first devices. Raises RuntimeError for a wrong value."""
    ticks, rows = -(-TICKS // pipe) * pipe, 4 * expert

    def branch(rank: int, x: jax.Array) -> jax.Array:
        for _ in range(rank + 1):  # other numbers of collectives in every branch
            x = jax.lax.psum_scatter(jax.lax.all_gather(x, EXPERT, tiled=True), EXPERT, tiled=True) / expert
            x = jax.lax.all_to_all(x, EXPERT, split_axis=0, concat_axis=0, tiled=True)
            x = jax.lax.all_to_all(x, EXPERT, split_axis=0, concat_axis=0, tiled=True)
        return x + rank + 1

    def call(x: jax.Array) -> jax.Array:
        def tick(x: jax.Array, _: jax.Array) -> tuple[jax.Array, None]:
            x = jax.lax.ppermute(x, PIPE, [(i, (i + 1) % pipe) for i in range(pipe)])
            return jax.lax.switch(jax.lax.axis_index(PIPE), [partial(branch, rank) for rank in range(pipe)], x), None

        return jax.lax.scan(tick, x[0], jnp.arange(ticks))[0][None]

    spec = PartitionSpec(PIPE, EXPERT)
    run = jax.jit(jax.shard_map(call, mesh=make_mesh(pipe, expert), in_specs=spec, out_specs=spec, check_vma=False))
    begin = np.arange(pipe * expert * rows, dtype=np.float32).reshape(pipe, expert * rows)
    expected = begin + ticks // pipe * sum(range(1, pipe + 1))  # every item has passed every rank, and is at home again
    found = np.asarray(run(begin))
    if not np.array_equal(found, expected):
        raise RuntimeError(f"{(found != expected).sum()} of {found.size} values are wrong, the first {found.ravel()[0]}")


def check(meshes: Sequence[str], limit: float) -> dict[str, float | str]:
    """For every mesh the seconds it took, compilation included, or what went wrong. `limit`: seconds of a mesh."""
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    process = subprocess.Popen(command(meshes), env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        said = process.communicate(timeout=limit * len(meshes))[0]
        hung = False
    except subprocess.TimeoutExpired:
        process.kill()
        said, hung = process.communicate()[0], True
    found: dict[str, float | str] = {}
    for line in said.splitlines():
        words = line.split(maxsplit=2)
        if len(words) == 3 and words[0] == "smoke" and words[1] in meshes:
            found[words[1]] = float(words[2][3:-2]) if words[2].startswith("ok ") else words[2]
    for i, mesh in enumerate([m for m in meshes if m not in found]):
        if hung:
            found[mesh] = "not reached" if i else f"hangs: no end after {limit * len(meshes):.0f} s; {REMEDY}"
        else:
            last = (said.strip().splitlines() or ["without a word"])[-1]
            found[mesh] = f"ended with exit code {process.returncode}: {last[:300]}"
    return found


@cache
def devices() -> tuple[int, str]:
    """How many JAX finds and their platform, asked in another process; (0, "") if it finds none."""
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(command(()), env=environment, text=True, capture_output=True, check=False)
    words = done.stdout.split()
    return (int(words[1]), words[2]) if words[:1] == ["devices"] else (0, "")


def command(meshes: Sequence[str]) -> list[str]:
    """Of the process that `check` starts."""
    return [sys.executable, "-m", "dspark_jax.bench.mesh_smoke", *meshes]


def main(meshes: Sequence[str]) -> int:
    """A line for every mesh, or with the number of devices; 1 if a value is wrong."""
    wrong = 0
    if not meshes:
        print("devices", len(jax.devices()), jax.devices()[0].platform)
    for text in meshes:
        shape, begin = load_mesh(text), time.perf_counter()
        try:
            smoke(shape.pipe, shape.expert)
            said = f"ok {time.perf_counter() - begin:.3f} s"
        except (RuntimeError, ValueError) as error:
            said, wrong = " ".join(str(error).split()), 1
        print(f"smoke {text} {said}", flush=True)
    return wrong


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
