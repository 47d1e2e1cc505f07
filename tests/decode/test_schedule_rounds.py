"""A schedule inside `decode.round.rounds`: three tokens of the look-up pair keep the target's law, from end to end."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.decode.round import rounds
from dspark_jax.decode.sampling import SamplingState
from dspark_jax.decode.schedule import EarlyStop, Schedule, StaleRate, StaleSize, StepCost
from dspark_jax.decode.state import DecodeState, Emission
from dspark_jax.testing import LookupTarget
from helpers.scheduling import KeyedDrafter, Retrospective, begin
from helpers.speculation import state
from helpers.statistics import Match, count, g_test, joint_index, markov_joint, total_variation

VOCAB, GAMMA, SLOTS, ROUNDS = 4, 5, 3, 4
WIDTH = ROUNDS * (GAMMA + 1)
N = 12_288  # samples, a multiple of the slots of a batch
PART, PARTS = 250_002, 4  # of the long test: 10^6 in all

# Seconds by rows for batches of three requests: steep and then flat; and a cliff in front of the first draft.
STEPS = StepCost((0, 1, 1, 1, 1.2, 1.42, 1.6, 1.8, 2.0, 2.2, *(2.21 + 0.01 * i for i in range(9))))
CLIFF = StepCost((0, 1, 1, 1, *(2.6 + 0.02 * i for i in range(15))))
PLAIN = StepCost(STEPS.rows, plain=(0.6,))
LAWFUL = {
    "stale size": Schedule(StaleSize(CLIFF)),
    "early stop": Schedule(EarlyStop(STEPS)),
    "stale rate that rests": Schedule(StaleRate(PLAIN, lag=1, memory=1, probe=3)),
}
SCHEDULES = LAWFUL | {"retrospective": Schedule(Retrospective(CLIFF))}

_LAW = np.array([[0.4, 0.4, 0.1, 0.1], [0.1, 0.5, 0.3, 0.1], [0.3, 0.2, 0.1, 0.4], [0.25] * 4])
TARGET = LookupTarget(jnp.asarray(np.log(_LAW), jnp.float32))
_PROPOSALS = np.log([[0.1, 0.1, 0.4, 0.4], [0.4, 0.1, 0.1, 0.4], [0.2, 0.1, 0.6, 0.1], [0.1, 0.5, 0.2, 0.2]])
# Logits of .9, of .8 for the first draft, and of .02 and .45 behind two of the tokens.
_CONFIDENCE = np.full((GAMMA, VOCAB), 2.197)
_CONFIDENCE[0], _CONFIDENCE[1:, 1], _CONFIDENCE[1:, 2] = 1.386, -3.892, -0.201
DRAFTER = KeyedDrafter.of(np.tile(_PROPOSALS, (GAMMA, 1, 1)), _CONFIDENCE)


@functools.partial(jax.jit, static_argnames="name")
def decode(sampling: SamplingState, name: str) -> Emission:
    """Emissions [batches, rounds, slots of a batch, ...] of many batches side by side."""
    slots = sampling.seed.shape[0]
    fresh = begin(TARGET, DRAFTER, sampling, jnp.zeros(slots, jnp.int32), WIDTH + GAMMA + 3)
    fresh = replace(fresh, stale=SCHEDULES[name].init(slots, GAMMA))
    batches = jax.tree.map(lambda x: x.reshape(slots // SLOTS, SLOTS, *x.shape[1:]), fresh)

    def one(batch: DecodeState) -> Emission:
        return rounds(TARGET, DRAFTER, batch, WIDTH + GAMMA + 3, ROUNDS, schedule=SCHEDULES[name])[1]

    return jax.vmap(one)(batches)


def run(name: str, rows: int = N, first_seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Three tokens of every slot, behind the first one, which saw no scheduler; and the verify lengths."""
    found = jax.device_get(decode(state(rows, first_seed=first_seed), name))
    token, given = (np.moveaxis(x, 1, 2) for x in (found.token, found.count))  # batch, slot, round, …
    kept = np.arange(GAMMA + 1) < given[..., None]
    order = np.argsort(~kept.reshape(rows, -1), axis=1, kind="stable")[:, :4]
    return np.take_along_axis(token.reshape(rows, -1), order, axis=1)[:, 1:], np.moveaxis(found.verified, 1, 0)[1:]


def verdict(tokens: np.ndarray) -> Match:
    law = markov_joint(lambda prefix: TARGET.law((0, *prefix)), VOCAB, 4).sum(0)
    counts = count(joint_index(tokens, VOCAB), law.size)
    return Match(total_variation(counts / counts.sum(), law.ravel()), g_test(counts, law))


@pytest.mark.long
@pytest.mark.parametrize("name", ["stale size", "stale rate that rests"])
def test_three_tokens_have_the_targets_law(name):
    tokens, verified = run(name)
    found = verdict(tokens)
    assert found.p_value > 1e-4 and found.tv < 0.04, found  # an exact sample of this size is about .022 away
    assert (np.bincount(verified.ravel()) > 0.03 * verified.size).sum() >= 3  # lengths do change


@pytest.mark.long
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_law_at_a_million_samples(name):
    tokens = np.concatenate([run(name, PART, i * PART)[0] for i in range(PARTS)])
    found = verdict(tokens)
    print(name, found)
    assert bool(found) == (name in LAWFUL), found
