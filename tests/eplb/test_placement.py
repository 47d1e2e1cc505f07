"""`Placement`: tables against a plain loop, automatic placement, digest, weights by slot and back."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_jax.eplb import Placement, auto_assignment, collapse_by_slot, expand_by_slot
from dspark_jax.errors import ConfigError


@st.composite
def placements(draw) -> Placement:
    experts, ranks, layers = draw(st.integers(1, 12)), draw(st.integers(1, 5)), draw(st.integers(1, 3))
    slots = (-(-experts // ranks) + draw(st.integers(0, 3))) * ranks
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    extra = rng.integers(0, experts, (layers, slots - experts))
    rows = np.concatenate([np.tile(np.arange(experts), (layers, 1)), extra], axis=1)
    return Placement(rng.permuted(rows, axis=1), experts, ranks)


@given(placements())
def test_tables_against_a_loop(placement: Placement):
    for i in range(placement.num_layers):
        tables = placement.layer(i)
        row = tables.slot_to_expert.tolist()
        for expert in range(placement.num_experts):
            slots = [slot for slot, held in enumerate(row) if held == expert]
            assert tables.replica_count[expert] == len(slots) >= 1
            padding = [-1] * (placement.expert_slots.shape[2] - len(slots))
            assert tables.expert_slots[expert].tolist() == slots + padding
        ranks = [slot // (len(row) // placement.expert_ranks) for slot in range(len(row))]
        assert tables.slot_to_rank.tolist() == ranks
    assert placement.expert_slots.shape[2] == placement.replica_count.max()


@given(placements())
def test_weights_by_slot_invert_to_weights_by_expert(placement: Placement):
    weights = np.random.default_rng(0).normal(size=(placement.num_experts, 3, 2))
    for i in range(placement.num_layers):
        tables = placement.layer(i)
        by_slot = expand_by_slot(weights, tables.slot_to_expert)
        for slot, expert in enumerate(tables.slot_to_expert):
            np.testing.assert_array_equal(by_slot[slot], weights[expert])
        np.testing.assert_array_equal(collapse_by_slot(by_slot, tables.expert_slots), weights)


def test_automatic_placement():
    assert auto_assignment(8, 12, 4).tolist() == [0, 1, 2, 2, 3, 4, 4, 5, 6, 6, 7, 0]
    assert auto_assignment(10, 12, 4).tolist() == [0, 1, 2, 2, 3, 4, 5, 6, 7, 7, 8, 9]
    assert auto_assignment(384, 384, 32).tolist() == list(range(384))
    placement = Placement.auto(3, 10, 12, 4)
    assert placement.slot_to_expert.tolist() == [auto_assignment(10, 12, 4).tolist()] * 3
    assert (placement.num_layers, placement.num_slots, placement.slots_per_rank) == (3, 12, 3)


def test_automatic_placement_covers_every_expert():
    for experts in range(1, 40):
        for ranks in range(1, 17):
            for per_rank in range(-(-experts // ranks), -(-experts // ranks) + 3):
                row = auto_assignment(experts, per_rank * ranks, ranks)
                assert len(row) == per_rank * ranks and set(row.tolist()) == set(range(experts))


def test_frozen_and_not_shared_with_the_caller():
    rows = np.array([[0, 1, 2, 0]])
    placement = Placement(rows, 3, 2)
    rows[0, 0] = 2
    assert placement.slot_to_expert[0, 0] == 0
    for table in (*placement.layer(0), placement.expert_slots):
        assert table.dtype == np.int32
        with pytest.raises(ValueError, match="read-only"):
            table[0] = 0
    with pytest.raises(AttributeError):
        placement.expert_ranks = 4  # type: ignore[misc]


def test_digest_identifies():
    one = Placement([[0, 1, 2, 0]], 3, 2)  # type: ignore[arg-type]
    same = Placement(np.array([[0, 1, 2, 0]], np.int64), 3, 2)
    assert one == same and hash(one) == hash(same) and one.digest == same.digest
    others = [
        Placement(np.array([[0, 1, 0, 2]]), 3, 2),
        Placement(np.array([[0, 1, 2, 0]]), 3, 4),
        Placement(np.array([[0, 1, 2, 0]] * 2), 3, 2),
    ]
    assert len({one, *others}) == 4 and one != "placement"
    code = "from dspark_jax.eplb import Placement; print(Placement([[0, 1, 2, 0]], 3, 2).digest)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == one.digest


@pytest.mark.parametrize(
    ("rows", "ranks", "message"),
    [
        ([[0, 1, 2]], 2, "3 slots on 2 expert ranks; expected equally many on each"),
        ([[0, 1, 3, 2]], 2, "ids from 0 to 3; expected [0, 3)"),
        ([[0, 1, -1, 2]], 2, "ids from -1 to 2; expected [0, 3)"),
        ([[0, 1, 2, 0], [0, 0, 1, 1]], 2, "layer 1: experts [2] have no slot"),
        ([0, 1, 2, 0], 2, "shape [4]; expected [layers, slots]"),
    ],
)
def test_impossible_tables(rows, ranks, message):
    with pytest.raises(ConfigError) as error:
        Placement(np.array(rows), 3, ranks)
    assert message in str(error.value)
