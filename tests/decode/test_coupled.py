"""Coupled verification: the text is the one that noise, by seed and position, and the target's law decide."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.decode import noise
from dspark_jax.decode.round import rounds
from dspark_jax.decode.schedule import EarlyStop, FixedLength, Schedule, StaleSize, StepCost
from dspark_jax.decode.verify import COUPLED, coupled_sample, speculative_sample
from dspark_jax.testing import LookupDrafter, LookupTarget
from helpers.scheduling import KeyedDrafter, Plan, Retrospective, begin, decode
from helpers.speculation import bf16_law, state, tile
from helpers.statistics import Match, count, g_test, joint_index, markov_joint, matches, total_variation

VOCAB, GAMMA, TOKENS = 4, 3, 4
N = 4_098  # slots of one run, a multiple of three; few enough that rounding decides no token where programs are compared
RUNS, LONG_RUNS = 12, 245  # for the law, in the default and the long test: 10^6 samples

COST = StepCost((0, 1, 1, 1, *(2.0 + 0.05 * i for i in range(9))))
PLANS = {
    "whole": Plan(Schedule(FixedLength())),
    "fixed": Plan(Schedule(FixedLength(1))),
    "early stop": Plan(Schedule(EarlyStop(StepCost((0, 1, 1, 1, *(1.2 + 0.2 * i for i in range(9)))))), 3),
    "stale size": Plan(Schedule(StaleSize(COST)), 3),
    "retrospective": Plan(Schedule(Retrospective(COST)), 3),  # spoils the law under rejection sampling, and here nothing
}

RNG = np.random.default_rng(2)
TARGET = LookupTarget.random(VOCAB, order=2, scale=1.0, seed=5)
TABLE = np.asarray(TARGET.table).mean(0) + RNG.normal(0, 0.5, (GAMMA, VOCAB, VOCAB))
CONFIDENCE = RNG.normal(0.5, 2.0, (GAMMA, VOCAB))
DRAFTER = KeyedDrafter.of(TABLE, CONFIDENCE)
LAW = markov_joint(lambda prefix: TARGET.law((0, *prefix)), VOCAB, 3)
P4, Q4 = np.array([0.50, 0.30, 0.15, 0.05]), np.array([0.20, 0.45, 0.05, 0.30])


def planned(name: str, first_seed: int = 0, drafter: LookupDrafter = DRAFTER) -> np.ndarray:
    """The first tokens of every slot; all plans are one program."""
    choice, sampling = list(PLANS).index(name), state(N, first_seed=first_seed)
    return decode(TARGET, drafter, sampling, tuple(PLANS.values()), choice, verify=COUPLED)[0][:, :TOKENS]


def _rounds(drafter, sampling):
    max_len = TOKENS * (GAMMA + 1) + 4
    slots = begin(TARGET, drafter, sampling, jnp.zeros(N, jnp.int32), max_len)
    return rounds(TARGET, drafter, slots, max_len, TOKENS, verify=COUPLED)[1]


_compiled = jax.jit(_rounds)


def text(drafter: LookupDrafter | None, *, temperature: float = 1.0, top_k: int = 0, run=_compiled) -> np.ndarray:
    """The same with whole blocks, or without a drafter, by a program of its own."""
    out = jax.tree.map(np.asarray, run(drafter, state(N, temperature, top_k)))
    real = np.arange(out.token.shape[2]) < out.count[..., None]
    token, real = (np.moveaxis(x, 1, 0).reshape(N, -1) for x in (out.token, real))
    return np.take_along_axis(token, np.argsort(~real, axis=1, kind="stable"), axis=1)[:, :TOKENS]


def defined() -> np.ndarray:
    """Token after token: the argmax of the law's logarithm plus the noise of seed and absolute position."""
    before, last, found = np.zeros(N, int), np.zeros(N, int), []
    laws = np.array([[np.log(TARGET.law((a, b))) for b in range(VOCAB)] for a in range(VOCAB)])
    for position in range(1, TOKENS + 1):
        gumbel = noise.gumbel(jnp.arange(N, dtype=jnp.uint32), jnp.full(N, position), noise.COUPLED, VOCAB)
        before, last = last, (laws[before, last] + np.asarray(gumbel)).argmax(-1)
        found.append(last)
    return np.stack(found, axis=1)


def law_of(name: str, runs: int) -> Match:
    tokens = np.concatenate([planned(name, i * N) for i in range(runs)])
    counts = count(joint_index(tokens[:, :3], VOCAB), LAW.size)
    return Match(total_variation(counts / counts.sum(), LAW.ravel()), g_test(counts, LAW))


def test_the_text_has_the_targets_law():
    found = law_of("whole", RUNS)
    assert found.p_value > 1e-4 and found.tv < 0.02, found  # an exact sample of this size is about .011 away


@pytest.mark.long
@pytest.mark.parametrize("name", ["whole", "retrospective"])
def test_the_law_at_a_million_samples(name):
    found = law_of(name, LONG_RUNS)
    assert found, found


def test_the_text_does_not_depend_on_the_schedule():
    whole = planned("whole")
    for name in PLANS:
        np.testing.assert_array_equal(planned(name), whole, err_msg=name)
    np.testing.assert_array_equal(whole, defined())
    other = KeyedDrafter.of(-TABLE, -CONFIDENCE)  # a bad drafter
    np.testing.assert_array_equal(planned("stale size", drafter=other), whole)


def test_the_text_does_not_depend_on_the_drafter():
    plain = text(None)
    np.testing.assert_array_equal(plain, defined())
    np.testing.assert_array_equal(text(DRAFTER), plain)
    cut = text(None, temperature=0.7, top_k=2)
    np.testing.assert_array_equal(text(DRAFTER, temperature=0.7, top_k=2), cut)
    assert (cut != plain).any()


@pytest.mark.long
def test_noise_by_the_index_in_the_block_would_make_another_text(monkeypatch):
    by_index = lambda seed, anchor, index, vocab: noise.gumbel(seed, 0 * anchor + index, noise.COUPLED, vocab)  # noqa: E731
    monkeypatch.setattr(noise, "coupled_gumbel", by_index)
    run = jax.jit(lambda *arguments: _rounds(*arguments))
    assert (text(DRAFTER, run=run) != text(None, run=run)).any(axis=1).mean() > 0.1


# What it costs: acceptance. Two argmaxes over shared noise agree with probability sum_x 1 / sum_y max(p_y/p_x, q_y/q_x).


def agreement(p: np.ndarray, q: np.ndarray) -> float:
    return float((1 / np.maximum(p / p[:, None], q / q[:, None]).sum(axis=1)).sum())


SAMPLES = 200_000


@partial(jax.jit, static_argnames=("shared", "verify"))
def one_draft(p_logits, q_logits, shared: bool, verify: str):
    """First tokens and acceptance of rounds with one draft, the draft's noise shared with the target or not."""
    rows = SAMPLES
    sampling, anchor = state(rows), jnp.full(rows, 11, jnp.int32)
    q = tile(q_logits, rows)
    draft_noise = noise.coupled_gumbel if shared else noise.draft_gumbel
    draft = jnp.argmax(q.astype(jnp.float32) + draft_noise(sampling.seed, anchor, 0, VOCAB), axis=-1).astype(jnp.int32)
    p, one = tile(p_logits, rows)[:, None].repeat(2, axis=1), jnp.ones(rows, jnp.int32)
    if verify == COUPLED:
        verdict = coupled_sample(p, draft[:, None], one, sampling, anchor)
    else:
        verdict = speculative_sample(p, q[:, None], draft[:, None], one, sampling, anchor)
    return jnp.where(verdict.accepted > 0, draft, verdict.token), verdict.accepted


@pytest.mark.long
def test_acceptance_is_that_of_shared_noise():
    p, q = jnp.log(jnp.asarray(P4, jnp.float32)), jnp.asarray(np.log(Q4), jnp.bfloat16)
    q_law = bf16_law(np.log(Q4))
    found = {}
    for shared, verify in ((True, COUPLED), (False, COUPLED), (False, "rejection")):
        token, accepted = map(np.asarray, one_draft(p, q, shared, verify))
        assert matches(token, P4).p_value > 1e-4
        found[shared, verify] = token, accepted.mean()
    expected = {
        (True, COUPLED): agreement(P4, q_law),
        (False, COUPLED): (P4 * q_law).sum(),
        (False, "rejection"): np.minimum(P4, q_law).sum(),
    }
    for key, value in expected.items():
        assert found[key][1] == pytest.approx(value, abs=5 * np.sqrt(0.25 / SAMPLES)), key
    assert list(expected.values()) == pytest.approx([0.559, 0.258, 0.600], abs=2e-3)
    # A draft with noise of its own is accepted less often, and changes no token.
    np.testing.assert_array_equal(found[True, COUPLED][0], found[False, COUPLED][0])


coupled = jax.jit(coupled_sample)


@pytest.mark.long
def test_drafts_behind_the_verified_ones_and_outside_the_vocabulary_do_not_count():
    sampling, anchor = state(3), jnp.full(3, 7, jnp.int32)
    logits = jnp.zeros((3, 3, VOCAB))
    gumbel = jax.jit(lambda seed: [noise.coupled_gumbel(seed, anchor, j, VOCAB) for j in range(3)])(sampling.seed)
    right = np.stack([np.asarray(g).argmax(-1) for g in gumbel], axis=1).astype(np.int32)
    drafts = right[:, :2].copy()
    drafts[2, 0] = VOCAB
    verdict = coupled(logits, drafts, np.array([2, 1, 2], np.int32), sampling, anchor)
    assert verdict.accepted.tolist() == [2, 1, 0]
    assert verdict.token.tolist() == [right[0, 2], right[1, 1], right[2, 0]]
    none = coupled(logits[:, :1], drafts[:, :0], np.zeros(3, np.int32), sampling, anchor)
    assert none.accepted.tolist() == [0, 0, 0] and none.token.tolist() == right[:, 0].tolist()


def test_temperature_zero_is_the_argmax():
    logits = RNG.normal(size=(3, 3, VOCAB)).astype(np.float32)
    best = logits.argmax(-1)
    drafts = best[:, :2].astype(np.int32)
    verdict = coupled(logits, drafts, np.full(3, 2, np.int32), state(3, temperature=0.0), jnp.arange(3))
    assert verdict.accepted.tolist() == [2] * 3 and verdict.token.tolist() == best[:, 2].tolist()
