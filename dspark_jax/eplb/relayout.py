"""From one placement to another on a running mesh: every expert slot is copied from a device that holds its expert.

The checkpoint is not read again, and nothing but expert weights moves. They go leaf by leaf, and an old leaf is freed
before the next one begins, so a device holds at most one leaf twice.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Int

from dspark_jax.parallel.mesh import EXPERT, PIPE
from dspark_jax.parallel.stage import Pipeline, PipelineSpec


class Transfer(NamedTuple):
    """What every device sends to the device `shift` expert ranks behind it, in local slots.

    Attributes:
      take: old slot of every piece, by sender; padding takes slot 0.
      put: new slot of every piece, by receiver; padding points behind the last slot and is dropped.
    """

    take: Int[np.ndarray, "P ranks n"]
    put: Int[np.ndarray, "P ranks n"]


def relayout(leaves: dict[str, jax.Array], old: Pipeline, new: Pipeline, mesh: Mesh) -> dict[str, jax.Array]:
    """The parameters under the placement of `new`, by its keys, made from those under the placement of `old`.

    Args:
      leaves: placed parameters of `old`; emptied, and the expert leaves' memory is freed.
      old, new: pipelines that differ in their placement alone.
      mesh: the devices of both.
    """
    sources = {key: _sources(old, new, key) for key in old.params.shapes if _is_experts(old, key)}
    plans = dict(zip(sources, _plans(list(sources.values()), old.spec, new.spec), strict=True))
    move = _mover(mesh, _local_slots(new.spec))
    moved = {}
    for key in list(leaves):
        leaf = leaves.pop(key)
        if key not in plans:
            moved[key] = leaf
            continue
        # One after the other, or all leaves would be there twice at once.
        moved[_new_key(old, new, key)] = jax.block_until_ready(move(leaf, _on_mesh(plans[key], mesh)))
        leaf.delete()
    return moved


def slot_sources(
    old: Int[np.ndarray, "old_slots"], new: Int[np.ndarray, "new_slots"], ranks: int
) -> Int[np.ndarray, "new_slots"]:
    """For every new slot an old one that holds its expert, on the same rank if there is one."""
    old_rank, new_rank = (np.arange(n) // (n // ranks) for n in (len(old), len(new)))
    found = np.zeros(len(new), np.int32)
    for slot, (expert, rank) in enumerate(zip(new, new_rank, strict=True)):
        held = np.flatnonzero(old == expert)
        near = held[old_rank[held] == rank]
        found[slot] = near[0] if len(near) else held[rank % len(held)]
    return found


def _is_experts(pipeline: Pipeline, key: str) -> bool:
    return any("experts" in paths[key] for paths in pipeline.params.paths if key in paths)


def _new_key(old: Pipeline, new: Pipeline, key: str) -> str:
    """The name of an expert leaf holds the number of slots."""
    rank = next(rank for rank, paths in enumerate(old.params.paths) if key in paths)
    path = old.params.paths[rank][key]
    return next(name for name, at in new.params.paths[rank].items() if at == path)


def _assignment(spec: PipelineSpec, layer: int) -> Int[np.ndarray, "slots"]:
    placed = spec.placed(layer)
    return placed.tables.slot_to_expert if placed else np.arange(spec.config.n_routed_experts, dtype=np.int32)


def _local_slots(spec: PipelineSpec) -> int:
    return len(_assignment(spec, 0)) // spec.expert


def _sources(old: Pipeline, new: Pipeline, key: str) -> Int[np.ndarray, "P new_slots"]:
    """Old slots of a leaf's new slots; pipe ranks without the leaf hold zeros, which stay where they are."""
    ranks = new.spec.expert
    old_local, new_local = _local_slots(old.spec), _local_slots(new.spec)
    stay = np.arange(ranks)[:, None] * old_local + np.arange(new_local) % old_local
    found = np.tile(stay.reshape(-1), (new.spec.pipe, 1))
    for rank, paths in enumerate(old.params.paths):
        if key in paths:
            layer = old.layer_of(rank, paths[key])
            found[rank] = slot_sources(_assignment(old.spec, layer), _assignment(new.spec, layer), ranks)
    return found


def _plans(sources: list[np.ndarray], old: PipelineSpec, new: PipelineSpec) -> Iterator[list[Transfer]]:
    """For every leaf one transfer a shift; padded alike in all leaves, so that leaves of one shape share a program."""
    ranks, old_local, new_local = new.expert, _local_slots(old), _local_slots(new)
    pieces = [[_pieces(source, shift, ranks, old_local, new_local) for shift in range(ranks)] for source in sources]
    most = [max(len(cell) for leaf in pieces for cell in leaf[shift].values()) for shift in range(ranks)]
    for leaf in pieces:
        yield [_padded(cells, most[shift], shift, new.pipe, ranks, new_local) for shift, cells in enumerate(leaf)]


def _pieces(
    source: np.ndarray, shift: int, ranks: int, old_local: int, new_local: int
) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """(old local slot, new local slot) of all that a receiver (pipe rank, expert rank) gets from `shift` ranks before."""
    found = {}
    for pipe, row in enumerate(source):
        for rank in range(ranks):
            own = row[rank * new_local : (rank + 1) * new_local]
            sent = np.flatnonzero(own // old_local == (rank - shift) % ranks)
            found[pipe, rank] = [(int(own[slot]) % old_local, int(slot)) for slot in sent]
    return found


def _padded(cells: dict, most: int, shift: int, pipe: int, ranks: int, new_local: int) -> Transfer:
    take, put = np.zeros((pipe, ranks, most), np.int32), np.full((pipe, ranks, most), new_local, np.int32)
    for (p, rank), pairs in cells.items():
        for i, (before, after) in enumerate(pairs):
            take[p, (rank - shift) % ranks, i], put[p, rank, i] = before, after
    return Transfer(take, put)


def _on_mesh(plan: list[Transfer], mesh: Mesh) -> list[Transfer]:
    return jax.device_put(plan, NamedSharding(mesh, PartitionSpec(PIPE, EXPERT)))


def _mover(mesh: Mesh, new_local: int) -> Any:
    """(leaf [P, old slots, …], transfers) -> leaf [P, new slots, …]; each piece crosses the mesh once."""
    ranks, spec = mesh.shape[EXPERT], PartitionSpec(PIPE, EXPERT)

    def move(leaf: jax.Array, plan: list[Transfer]) -> jax.Array:
        own = leaf[0]
        out = jnp.zeros((new_local, *own.shape[1:]), own.dtype)
        for shift, transfer in enumerate(plan):
            take, put = transfer.take[0, 0], transfer.put[0, 0]
            if take.size:
                part = own[take]
                if shift:
                    part = jax.lax.ppermute(part, EXPERT, [(rank, (rank + shift) % ranks) for rank in range(ranks)])
                out = out.at[put].set(part, mode="drop")
        return out[None]

    return jax.jit(jax.shard_map(move, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False))
