"""Replica choice: from expert ids to expert slots, the replicas of an expert in turn (TensorRT-LLM's rule)."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

BLOCK = 1024  # entries of the flattened ids that are counted together


def choose_slots(
    ids: Int[Array, "B k"],
    expert_slots: Int[Array, "E R"] | Int[np.ndarray, "E R"],
    replica_count: Int[Array, "E"] | Int[np.ndarray, "E"],
    *,
    offset: int | Int[Array, ""] = 0,
) -> Int[Array, "B k"]:
    """Slot of every chosen expert.

    The ids, row after row, are cut into blocks of `BLOCK` entries. In block b the n-th occurrence of an expert (n from
    0) goes to its replica `(n + b + offset) mod replica_count`: within a block its replicas' rows differ by at most
    one. The choice depends on `ids` and `offset` alone, so ranks that see the same rows agree on it.

    Args:
      ids: expert ids; entries outside [0, E), such as the -1 of a padded row, get slot -1 and are not counted.
      expert_slots: slots of every expert, padded behind `replica_count`.
      replica_count: slots of every expert, at least 1.
      offset: the expert rank where each rank chooses for rows of its own (so that not all begin with the same replica),
        0 where all ranks see the same rows.
    """
    slots, count = jnp.asarray(expert_slots), jnp.asarray(replica_count)
    valid = (ids >= 0) & (ids < slots.shape[0])
    expert = jnp.where(valid, ids, 0)
    replica: Array | int = 0
    if slots.shape[1] > 1:
        replica = (_turn(ids) + offset) % count[expert]
    return jnp.where(valid, slots[expert, replica], -1)


def _turn(ids: Int[Array, "B k"]) -> Int[Array, "B k"]:
    """For every entry: equal entries before it in its block, plus the block's number."""
    flat = ids.reshape(-1)
    width = min(flat.size, BLOCK)
    blocks = jnp.pad(flat, (0, -flat.size % max(width, 1)), constant_values=-1).reshape(-1, max(width, 1))
    place = jnp.arange(blocks.shape[1])
    # XLA fuses comparison and sum: the [width, width] matrix is never stored.
    equal = (blocks[:, :, None] == blocks[:, None, :]) & (place[:, None] > place)
    turn = jnp.sum(equal, axis=2, dtype=jnp.int32) + jnp.arange(blocks.shape[0], dtype=jnp.int32)[:, None]
    return jax.lax.slice_in_dim(turn.reshape(-1), 0, flat.size).reshape(ids.shape)


def choose_slots_numpy(
    ids: Int[np.ndarray, "B k"],
    expert_slots: Int[np.ndarray, "E R"],
    replica_count: Int[np.ndarray, "E"],
    *,
    offset: int = 0,
) -> Int[np.ndarray, "B k"]:
    """`choose_slots` entry by entry on the host: the rule as a loop, for tests and for projections of the load."""
    flat = np.asarray(ids).reshape(-1)
    slots = np.full(flat.size, -1, np.int32)
    for block, start in enumerate(range(0, flat.size, BLOCK)):
        seen = np.zeros(len(replica_count), np.int64)
        for i in range(start, min(start + BLOCK, flat.size)):
            if 0 <= (expert := flat[i]) < len(replica_count):
                slots[i] = expert_slots[expert, (seen[expert] + block + offset) % replica_count[expert]]
                seen[expert] += 1
    return slots.reshape(np.shape(ids))
