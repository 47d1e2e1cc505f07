"""What the parts of `bench.mesh` share: what is measured, random weights on a mesh, a stopwatch, and how devices are named."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from dspark_jax.bench.records import record
from dspark_jax.bench.stage_programs import _leaf, _made, scaled
from dspark_jax.config import DraftConfig, TargetConfig
from dspark_jax.decode.calibrate import Rounds
from dspark_jax.decode.rounds_file import read_rounds
from dspark_jax.errors import ConfigError, raise_all
from dspark_jax.parallel.leaves import ITEM_SIZE
from dspark_jax.parallel.mesh import EXPERT, PIPE
from dspark_jax.presets import model_configs

REPEATS = 5  # of a timing; its median counts


@dataclass(frozen=True)
class Shape:
    """The model whose shapes are timed, with random weights.

    Attributes:
      context: positions in front of a request.
      rounds: where acceptance is drawn from.
      acceptance: what these rounds are, in words.
    """

    name: str
    config: TargetConfig
    draft: DraftConfig
    dtype: str
    context: int
    rounds: Rounds
    acceptance: str

    @property
    def title(self) -> str:
        """The beginning of a case's name."""
        weights = "" if self.config.expert_weights == "dense" else f"{self.config.expert_weights} experts, "
        layers = f"{self.config.num_hidden_layers}+{self.draft.num_stages} layers"
        return f"{self.name} {layers}, {weights}{self.dtype}, context {self.context}"


def shape_of(
    model: str, layers: int | None, weights: str, dtype: str | None, context: int, kept: float, recorded: Any, cpu: bool
) -> Shape:
    """The shapes of a preset or a model, and where acceptance comes from.

    Args:
      layers: fewer layers, in the model's proportions; None is all.
      weights: "fp4", "fp8" or "dense".
      kept: probability with which a draft survives, each by itself, where nothing is `recorded` (a file of rounds).

    Raises ConfigError for every impossible value.
    """
    config, draft = model_configs(model)
    whole, faults = config.num_hidden_layers, []
    dtype = dtype or ("float32" if cpu else "bfloat16")
    if draft is None:
        faults.append(f"--model {model} has no drafter; choose one with dspark_* in its config.json")
    if layers is not None and not min(5, whole) <= layers <= whole:
        faults.append(f"--layers is {layers}; expected {min(5, whole)} … {whole}, the model's")
    if dtype not in ITEM_SIZE:
        faults.append(f"--dtype is {dtype!r}; expected {', '.join(ITEM_SIZE)}")
    if context < 1:
        faults.append(f"--context is {context}; expected at least 1")
    if not 0 <= kept <= 1:
        faults.append(f"--acceptance is {kept}; expected a probability, 0 … 1")
    raise_all(ConfigError, "bench mesh", faults)
    assert draft is not None
    if layers is not None and layers < whole:
        config, draft = scaled(config, draft, layers)
    config = replace(config, expert_weights=weights)
    if recorded is not None:
        rounds, said = read_rounds(recorded), "synthetic: drawn from recorded rounds, random weights"
    else:
        kept_by_round = np.random.default_rng(0).random((4096, draft.block_size)) < kept
        accepted = np.cumprod(kept_by_round, axis=1).sum(axis=1)
        rounds = Rounds(np.zeros((4096, draft.block_size), np.float32), accepted.astype(np.int32))
        said = f"synthetic: a draft survives with probability {kept}, random weights"
    return Shape(model, config, draft, dtype, context, rounds, said)


def device_name(mesh: Mesh) -> str:
    """As records name it: "4 x NVIDIA H200"; one device as the other benchmarks do."""
    kind = mesh.devices.flat[0].device_kind
    return kind if mesh.size == 1 else f"{mesh.size} x {kind}"


def mesh_name(mesh: Mesh) -> str:
    """ "2x4": pipe x expert."""
    return f"{mesh.shape[PIPE]}x{mesh.shape[EXPERT]}"


def case(
    bench: str, text: str, mesh: Mesh, time_us: float, floor_us: float | None = None, ceiling: str | None = None, **more: Any
) -> dict[str, Any]:
    """A record of `bench.records` with what every part of this benchmark says."""
    found = record(f"mesh {bench}", f"{text}, mesh {mesh_name(mesh)}", device_name(mesh), time_us, floor_us, ceiling)
    return found | {"mesh": mesh_name(mesh), "jax": jax.__version__, **more}


def rounded(values: Sequence[float], digits: int = 3) -> list[float]:
    """For JSON."""
    return [round(float(x), digits) for x in values]


def median_us(run: Callable[[], Any], steps: int = 1, repeats: int = REPEATS) -> float:
    """Microseconds of one of `run`'s steps, from idle devices until all results are there; the first run only warms up."""
    found = []
    for repeat in range(repeats + 1):
        begin = time.perf_counter()
        jax.block_until_ready(run())
        if repeat:
            found.append((time.perf_counter() - begin) / steps)
    return 1e6 * statistics.median(found)


def random_leaves(
    shapes: dict[str, jax.ShapeDtypeStruct], specs: dict[str, PartitionSpec], mesh: Mesh, experts: int
) -> dict[str, jax.Array]:
    """Random arrays, each device making its own part of them; replicas are equal.

    Args:
      shapes: of the whole arrays.
      specs: over which axes they are split.
      experts: what ids in hash tables count to.
    """
    found = {}
    for i, (key, x) in enumerate(shapes.items()):
        found[key] = _maker(*_made(key, x, experts), specs[key], mesh)(jnp.int32(7919 * i))
    return found


@cache
def _maker(shape: tuple[int, ...], dtype: Any, integers: tuple[int, int], spec: PartitionSpec, mesh: Mesh) -> Any:
    names = [() if part is None else (part,) if isinstance(part, str) else tuple(part) for part in spec]
    names += [()] * (len(shape) - len(names))
    sizes = [math.prod(mesh.shape[name] for name in part) for part in names]
    piped = bool(names) and names[0] == (PIPE,)  # one leaf for each rank, as on a device of its own
    local = tuple(n // size for n, size in zip(shape, sizes, strict=True))[1 if piped else 0 :]
    split = [name for part in names for name in part]

    def make(seed: jax.Array) -> jax.Array:
        for name in split:
            seed = seed * 31 + jax.lax.axis_index(name) + 1
        leaf = _leaf(local, dtype, integers, seed)
        return leaf[None] if piped else leaf

    return jax.jit(jax.shard_map(partial(make), mesh=mesh, in_specs=PartitionSpec(), out_specs=spec, check_vma=False))
