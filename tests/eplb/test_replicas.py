"""Replica choice: TensorRT-LLM's published vectors, a loop as reference, balance, padding, agreement of ranks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from dspark_jax.eplb import Placement
from dspark_jax.parallel.mesh import EXPERT, make_mesh
from dspark_kernels.routing.replicas import BLOCK, choose_slots, choose_slots_numpy

WORKED = Placement(np.array([[0, 1, 2, 0, 3, 0]]), 4, 2).layer(0)
IDS = np.array([[0, 1], [0, 2], [0, 3], [0, 1], [-1, 0]])
BOTH = pytest.mark.parametrize("choose", [choose_slots, choose_slots_numpy], ids=["jnp", "numpy"])


@BOTH
@pytest.mark.parametrize(("offset", "expected"), [(0, [0, 1, 3, 2, 5, 4, 0, 1, -1, 3]), (1, [3, 1, 5, 2, 0, 4, 3, 1, -1, 5])])
def test_worked_vectors(choose, offset, expected):
    slots = choose(jnp.asarray(IDS) if choose is choose_slots else IDS, *WORKED[1:3], offset=offset)
    assert slots.shape == IDS.shape and np.asarray(slots).ravel().tolist() == expected


@BOTH
def test_counting_starts_again_in_every_block(choose):
    tables = Placement(np.array([[0, 0]]), 1, 2).layer(0)
    ids = np.zeros((1025, 1), np.int32)
    slots = np.asarray(choose(jnp.asarray(ids) if choose is choose_slots else ids, *tables[1:3])).ravel()
    assert slots[:4].tolist() == [0, 1, 0, 1] and slots[1023] == 1
    assert slots[1024] == 1  # occurrence 0 of block 1; a counter over all entries would give slot 0


def random_case(seed: int, rows: int, k: int, experts: int = 13, extra: int = 11, invalid: float = 0.2):
    rng = np.random.default_rng(seed)
    row = rng.permutation([*range(experts), *rng.integers(0, experts // 2, extra)])
    ids = np.argsort(rng.random((rows, experts)), axis=1)[:, :k].astype(np.int32)
    ids[rng.random(rows) < invalid] = -1
    return ids, Placement(row[None], experts, 1).layer(0)


@pytest.mark.parametrize(("rows", "k"), [(1, 1), (7, 3), (341, 3), (342, 3), (700, 6)])
@pytest.mark.parametrize("offset", [0, 3])
def test_against_the_loop(rows, k, offset):
    ids, tables = random_case(rows, rows, k)
    slots = jax.jit(choose_slots)(jnp.asarray(ids), *tables[1:3], offset=offset)
    assert slots.dtype == jnp.int32
    np.testing.assert_array_equal(slots, choose_slots_numpy(ids, *tables[1:3], offset=offset))


@given(st.integers(0, 2**32 - 1))
def test_slots_hold_the_expert_and_replicas_differ_by_at_most_one_row_a_block(seed):
    ids, tables = random_case(seed, 400, 6)
    slots = np.asarray(_choose(ids, tables.expert_slots, tables.replica_count, 0)).ravel()
    flat = ids.ravel()
    np.testing.assert_array_equal(tables.slot_to_expert[slots[flat >= 0]], flat[flat >= 0])
    assert (slots[flat < 0] == -1).all()
    for start in range(0, flat.size, BLOCK):
        block = slots[start : start + BLOCK]
        for expert in range(13):
            rows = [np.sum(block == s) for s in tables.expert_slots[expert] if s >= 0]
            assert max(rows) - min(rows) <= 1


_choose = jax.jit(lambda ids, slots, count, offset: choose_slots(ids, slots, count, offset=offset))


def test_invalid_rows_change_nothing():
    ids, tables = random_case(5, 60, 3, invalid=0)
    expected = choose_slots_numpy(ids, *tables[1:3])
    padded = np.full((100, 3), -1, np.int32)
    where = np.sort(np.random.default_rng(0).permutation(100)[:60])
    padded[where] = ids
    for content in (-1, -7, 13, 2**31 - 1):
        filled = np.where(padded < 0, content, padded).astype(np.int32)
        slots = np.asarray(_choose(filled, tables.expert_slots, tables.replica_count, 0))
        np.testing.assert_array_equal(slots[where], expected)
        assert (np.delete(slots, where, axis=0) == -1).all()


def test_without_replicas_it_is_a_look_up():
    ids, _ = random_case(1, 50, 4)
    tables = Placement(np.random.default_rng(2).permutation(13)[None], 13, 13).layer(0)
    slots = np.asarray(choose_slots(jnp.asarray(ids), *tables[1:3], offset=5))
    np.testing.assert_array_equal(slots, np.where(ids < 0, -1, tables.expert_slots[ids, 0]))


def test_no_rows():
    assert choose_slots(jnp.zeros((0, 3), jnp.int32), *WORKED[1:3]).shape == (0, 3)


def test_ranks_that_see_the_same_rows_agree_and_others_begin_with_their_own_replica():
    mesh, ids = make_mesh(1, 4), random_case(3, 64, 3)[0]
    tables = random_case(3, 64, 3)[1]
    spec = PartitionSpec(EXPERT)
    shard = functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)

    def gathered(own):
        return choose_slots(jax.lax.all_gather(own, EXPERT, tiled=True), *tables[1:3])[None]

    def apart(own):
        return choose_slots(own, *tables[1:3], offset=jax.lax.axis_index(EXPERT))

    by_rank = np.asarray(jax.jit(shard(gathered))(ids))
    expected = choose_slots_numpy(ids, *tables[1:3])
    for rank in range(4):
        np.testing.assert_array_equal(by_rank[rank], expected)
    own = [choose_slots_numpy(ids[16 * r : 16 * r + 16], *tables[1:3], offset=r) for r in range(4)]
    np.testing.assert_array_equal(jax.jit(shard(apart))(ids), np.concatenate(own))
