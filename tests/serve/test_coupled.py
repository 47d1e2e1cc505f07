"""Coupled verification on the mesh: sampled text is what prompt, seed and target decide, under every scheduler."""

import functools

import numpy as np
import pytest

from dspark_jax.decode.sampling import SamplingParams
from dspark_jax.decode.verify import COUPLED
from dspark_jax.parallel.mesh import make_mesh
from dspark_jax.results import Completion
from dspark_jax.serve.engine import Engine
from helpers.scheduled_model import GAMMA, MAX_LEN, NAMES, SLOTS, TOP, check_coupled, chosen, engine, lm

TEMPERATURE = 0.7
MESHES = [(1, 1), (1, 2), (2, 1), (2, 2)]


def asked(name: str) -> tuple[list[list[int]], list[SamplingParams]]:
    return chosen(name, TEMPERATURE)


def answers(e: Engine, name: str) -> list[Completion]:
    found = e.generate(*asked(name), ignore_eos=True)
    check_coupled(found, asked(name)[1])
    return found


@pytest.mark.long
@pytest.mark.parametrize("mesh", MESHES, ids=lambda m: f"{m[0]}x{m[1]}")
def test_the_text_is_the_targets_choice(mesh):
    """Checked by a pass over each whole text, without a cache, a drafter or a schedule."""
    e = engine(*mesh, verify=COUPLED)
    for name in NAMES:
        found = answers(e, name)
        assert sum(sum(a.drafted) for a in found) > 5, name
        assert len({n for a in found for n in a.verify_lengths}) > 1 or name == "fixed"
    assert {b for tick in e.timeline for b in tick.bucket or ()} == set(e.ring.buckets)


@functools.cache
def plain_engine(pipe: int, expert: int) -> Engine:
    return Engine(
        lm(), mesh=make_mesh(pipe, expert), slots=SLOTS * pipe, chunk=GAMMA + 1, max_len=MAX_LEN, max_logprobs=TOP,
        speculate=False, verify=COUPLED,
    )  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("mesh", [(1, 1), (2, 2)], ids=lambda m: f"{m[0]}x{m[1]}")
def test_plain_decoding_gives_the_same_text(mesh):
    for name in NAMES:
        plain, found = answers(plain_engine(*mesh), name), answers(engine(*mesh, verify=COUPLED), name)
        assert [a.tokens for a in plain] == [a.tokens for a in found]
        assert np.sum([a.rounds for a in plain]) > np.sum([a.rounds for a in found])
