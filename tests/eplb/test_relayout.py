"""Changing the placement of a running engine's weights: every slot from a device that has its expert, leaf by leaf."""

import gc

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_jax.eplb import relayout
from dspark_jax.eplb.relayout import slot_sources
from dspark_jax.parallel.mesh import make_mesh
from dspark_jax.serve.engine import Engine
from helpers.placed_model import EXPERTS, MAX_LEN, lm, rotated, shuffled


def engine(pipe: int, expert: int, placement=None) -> Engine:
    """Weights in place, nothing compiled."""
    return Engine(lm(), mesh=make_mesh(pipe, expert), slots=pipe * expert, max_len=MAX_LEN, placement=placement)


@pytest.mark.parametrize(("pipe", "expert"), [(1, 2), pytest.param(2, 4, marks=pytest.mark.long)])
def test_weights_are_those_that_loading_would_give(pipe, expert):
    """From none to more slots, as many, fewer, and to none again; other leaves are not even copied."""
    moving = engine(pipe, expert)
    ends = {key: leaf for key, leaf in moving._params.items() if ".experts." not in key}
    for placement in (rotated(expert), shuffled(expert, slots=16), shuffled(expert, 1, slots=8 + expert), None):
        moving.set_placement(placement)
        expected = engine(pipe, expert, placement)
        assert moving._params.keys() == expected._params.keys() and moving.plan.memory == expected.plan.memory
        for key, leaf in expected._params.items():
            assert moving._params[key].sharding.is_equivalent_to(leaf.sharding, leaf.ndim)
            np.testing.assert_array_equal(np.asarray(moving._params[key]), np.asarray(leaf))
    assert all(moving._params[key] is leaf for key, leaf in ends.items())


def expert_arrays() -> list[jax.Array]:
    """All there are in this process; nothing else has [pipe, slots, in, out]."""
    gc.collect()
    return [x for x in jax.live_arrays() if x.ndim == 4 and x.shape[2:] in {(16, 5), (5, 16)}]


@pytest.mark.long
def test_one_leaf_at_a_time_is_there_twice(monkeypatch):
    moving, sizes = engine(1, 2), []
    experts = [leaf.nbytes for key, leaf in moving._params.items() if ".experts." in key]
    others = sum(x.nbytes for x in expert_arrays()) - sum(experts)
    real = relayout._mover

    def spied(mesh, slots):
        move = real(mesh, slots)

        def run(leaf, plan):
            out = move(leaf, plan)
            sizes.append(sum(x.nbytes for x in expert_arrays()) - others)
            return out

        return run

    monkeypatch.setattr(relayout, "_mover", spied)
    moving.set_placement(rotated(2))
    growth = (EXPERTS + 8) // EXPERTS
    assert len(sizes) == len(experts)
    for i, size in enumerate(sizes):
        assert size == sum(experts[i:]) + growth * sum(experts[: i + 1])


def test_the_same_placement_moves_nothing(monkeypatch):
    moving = engine(1, 2, rotated(2))
    monkeypatch.setattr("dspark_jax.serve.engine.relayout", None)
    moving.set_placement(rotated(2))
    assert moving.placement == rotated(2)


@given(st.integers(0, 10**6), st.sampled_from([2, 4]), st.sampled_from([8, 12, 16]), st.sampled_from([8, 12, 16]))
def test_sources_hold_the_expert_and_are_near(seed, ranks, before, after):
    old = shuffled(ranks, seed, before).slot_to_expert[0]
    new = shuffled(ranks, seed + 1, after).slot_to_expert[0]
    found = slot_sources(old, new, ranks)
    np.testing.assert_array_equal(old[found], new)
    for slot, source in enumerate(found):
        rank = slot // (after // ranks)
        own = old[rank * (before // ranks) : (rank + 1) * (before // ranks)]
        assert (source // (before // ranks) == rank) == (new[slot] in own)
