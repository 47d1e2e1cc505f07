"""What a placement of experts is worth under a skewed load: one expert layer with rows that choose experts as recorded ones do.

The load is a recording (`--statistics`), or that of the shipped model on its own greedy texts. Where the timed shapes have more
experts than the recording, every layer's load is stretched: the sorted loads are interpolated, and shuffled. Rows draw their
experts by that load, without repetition. Two layers are timed, the most uneven one and the median, each expert once in order
against `eplb.plan` with an eighth more slots.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, Int

from dspark_jax.bench.mesh_common import Shape, case, median_us, rounded
from dspark_jax.bench.mesh_dispatch import STEPS, Layer
from dspark_jax.eplb import Placement, assign, read_statistics
from dspark_jax.eplb.loads import imbalance
from dspark_jax.parallel.mesh import EXPERT
from dspark_kernels.routing import choose_slots

SPARE = 8  # one more slot for so many experts


def recorded(folder: Path | None, model: str, experts: int, prompts: Sequence[str], tokens: int) -> tuple[np.ndarray, str]:
    """Rows by layer and expert [layers, experts], and where they come from.

    Args:
      folder: of statistics; None records `model` on one device.
      experts: of the timed shapes.

    Raises DSparkError for statistics that cannot be read.
    """
    if folder is not None:
        load, said = read_statistics(folder).load(), f"recorded: {folder.name}"
    else:
        from dspark_jax.decode.sampling import SamplingParams
        from dspark_jax.serve.engine import Engine

        with Engine(model, slots=min(len(prompts), 16), max_len=512, count_experts=(0, 10**9)) as engine:
            engine.generate(list(prompts), SamplingParams(max_tokens=tokens))
            assert engine.expert_counter is not None
            load, said = engine.expert_counter.statistics().load(), f"recorded: {model}, {len(prompts)} greedy texts"
    if load.shape[1] == experts:
        return load, said
    return stretched(load, experts), f"{said}, stretched from {load.shape[1]} experts"


def stretched(load: Int[np.ndarray, "L e"], experts: int) -> Float[np.ndarray, "L E"]:
    """Loads of more or fewer experts that are as uneven: the sorted ones interpolated, and shuffled."""
    at, known = (np.arange(experts) + 0.5) / experts, (np.arange(load.shape[1]) + 0.5) / load.shape[1]
    return np.stack([np.random.default_rng(i).permutation(np.interp(at, known, np.sort(row))) for i, row in enumerate(load)])


def drawn(load: Float[np.ndarray, "E"], rows: int, k: int, seed: int = 0) -> Int[np.ndarray, "rows k"]:
    """Experts of rows, k different ones each, by a load (the k largest of its logarithms plus Gumbel noise)."""
    noise = np.random.default_rng(seed).gumbel(size=(rows, len(load)))
    return np.argsort(-(np.log(np.maximum(load, 1e-9 * load.max())) + noise), axis=1)[:, :k].astype(np.int32)


def slots_of(ids: Int[np.ndarray, "rows k"], placed: Placement) -> Int[np.ndarray, "rows k"]:
    """Slots as the ranks choose them, each for its own rows; layer 0 of the placement."""
    tables, ranks = placed.layer(0), placed.expert_ranks
    parts = np.split(ids, ranks)
    chosen = [choose_slots(jnp.asarray(p), tables.expert_slots, tables.replica_count, offset=r) for r, p in enumerate(parts)]
    return np.concatenate([np.asarray(x) for x in chosen])


def placement(
    shape: Shape, mesh: Mesh, batches: Sequence[int], load: Float[np.ndarray, "L E"], said: str
) -> Iterator[dict[str, Any]]:
    """A record for every number of rows of a device and each of two layers; none on one expert rank."""
    if (ranks := mesh.shape[EXPERT]) == 1:
        return
    c = shape.config
    experts, k = c.n_routed_experts, c.num_experts_per_tok
    slots = -(-(experts + experts // SPARE) // ranks) * ranks
    uneven = imbalance(load.reshape(len(load), ranks, -1).sum(axis=-1))
    order = np.argsort(uneven)
    layers = {"most uneven": int(order[-1]), "median": int(order[len(order) // 2])}
    plain, spare = Layer(shape, mesh), Layer(shape, mesh, slots)
    programs = [(one, one.program("all-gather")) for one in (plain, spare)]
    for name, layer in layers.items():
        placed = Placement(assign(load[layer : layer + 1], slots, ranks), experts, ranks)
        for batch in batches:
            ids = drawn(load[layer], batch * ranks, k)
            times, slowest = [], []
            for (one, run), chosen in zip(programs, (ids, slots_of(ids, placed)), strict=True):
                rows = one.rows(chosen)
                times.append(median_us(partial(_run, run, one, rows), STEPS))
                by_rank = np.bincount((chosen // (one.slots // ranks)).ravel(), minlength=ranks)
                slowest.append(int(by_rank.max()))
            text = f"{shape.name} experts, {c.expert_weights}, {name} layer, {batch} rows a device, EPLB"
            found = case("placement", text, mesh, times[1])
            found["peers"] = {"without EPLB": round(times[0], 2)}
            mean = ids.size / ranks
            found |= {"load": said, "layer": layer, "slots": slots, "rows": batch, "mean_rows": round(mean, 1)}
            found["slowest_rank_rows"] = {"EPLB": slowest[1], "without EPLB": slowest[0]}
            found["rows_per_second"] = dict(
                zip(("without EPLB", "EPLB"), rounded([1e6 * batch * ranks / us for us in times], 1), strict=True)
            )
            yield found


def _run(run: Any, layer: Layer, rows: tuple[jax.Array, ...]) -> jax.Array:
    return run(layer.weights, *rows)
