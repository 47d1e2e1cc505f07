"""A scheduler may shorten the blocks as it likes: the text keeps the target's law, unless it looks where it must not.

Confidences depend on the drawn tokens in every case, and so do the lengths. One compiled program serves the whole file.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.decode.schedule import EarlyStop, FixedLength, Schedule, StaleRate, StaleSize, StepCost, Threshold
from dspark_jax.testing import LookupTarget
from helpers.scheduling import KeyedDrafter, Plan, Retrospective, decode
from helpers.speculation import state
from helpers.statistics import Match, count, g_test, joint_index, markov_joint, total_variation

VOCAB, GAMMA = 4, 5
N = 49_152  # samples of the default tests, a multiple of three slots
PART, PARTS = 250_002, 4  # of the long ones: 10^6 in all

# One request alone: the first curve rises smoothly, the second has a valley behind the first draft.
SMOOTH = StepCost((0, 1, 1.25, 1.45, 1.7, 2.0, 2.4))
VALLEY = StepCost((0, 1, 2, 2.2, 2.4, 2.6, 3.1))
# Three requests side by side: steep at first, then flat; a cliff in front of the first draft.
STEPS = StepCost((0, 1, 1, 1, 1.2, 1.42, 1.6, 1.8, 2.0, 2.2, *(2.21 + 0.01 * i for i in range(9))))
CLIFF = StepCost((0, 1, 1, 1, *(2.6 + 0.02 * i for i in range(15))))
# The paper's case (appendix A); two drafts, so that longer blocks cost too much.
PAPER = StepCost.of_rates((1, 0.5, 0.45, 0.01, 0.01, 0.01))
# Two confident drafts are worth their time, and a step without drafting is worth more than anything else.
PLAIN = StepCost(VALLEY.rows, plain=(0.82, 0.82))
ALL_OR_NONE = StepCost((0, 1, *[4.5] * GAMMA))

LAWFUL = {
    "fixed": Plan(Schedule(FixedLength(2))),
    "threshold": Plan(Schedule(Threshold(0.5))),
    "early stop": Plan(Schedule(EarlyStop(SMOOTH))),
    "early stop, 3 slots": Plan(Schedule(EarlyStop(STEPS)), 3),
    "stale size": Plan(Schedule(StaleSize(VALLEY))),
    "stale size of the last round": Plan(Schedule(StaleSize(VALLEY, lag=1))),
    "stale size, 3 slots": Plan(Schedule(StaleSize(CLIFF)), 3),
    "stale rate of the last rounds": Plan(Schedule(StaleRate(VALLEY, lag=1))),
    "stale rate, 3 slots": Plan(Schedule(StaleRate(CLIFF)), 3),
    "stale rate that rests": Plan(Schedule(StaleRate(PLAIN, lag=1, memory=1, probe=2))),
}
UNLAWFUL = {
    "retrospective": Plan(Schedule(Retrospective(VALLEY))),
    "retrospective, 3 slots": Plan(Schedule(Retrospective(CLIFF)), 3),
}
PAPERS = {
    "paper, early stop": Plan(Schedule(EarlyStop(PAPER))),
    "paper, retrospective": Plan(Schedule(Retrospective(PAPER))),
    "stale size, all or none": Plan(Schedule(StaleSize(ALL_OR_NONE))),
}
PLANS = LAWFUL | UNLAWFUL | PAPERS


def logit(p: float) -> float:
    return float(np.log(p / (1 - p)))


def target_of(table) -> LookupTarget:
    return LookupTarget(jnp.log(jnp.asarray(table, jnp.float32)))


TARGET = target_of([[0.4, 0.4, 0.1, 0.1], [0.1, 0.5, 0.3, 0.1], [0.3, 0.2, 0.1, 0.4], [0.25] * 4])
PROPOSALS = np.log([[0.1, 0.1, 0.4, 0.4], [0.4, 0.1, 0.1, 0.4], [0.2, 0.1, 0.6, 0.1], [0.1, 0.5, 0.2, 0.2]])
CONFIDENCE = np.full((GAMMA, VOCAB), logit(0.9))
CONFIDENCE[0], CONFIDENCE[1:, 1], CONFIDENCE[1:, 2] = logit(0.8), logit(0.02), logit(0.45)
DRAFTER = KeyedDrafter.of(np.tile(PROPOSALS, (GAMMA, 1, 1)), CONFIDENCE)


def law_of(target: LookupTarget) -> np.ndarray:
    """Of three tokens behind the first one, which the prompt's tick draws."""
    return markov_joint(lambda prefix: target.law((0, *prefix)), VOCAB, 4).sum(0)


LAW = law_of(TARGET)


def run(name: str, target=TARGET, drafter=DRAFTER, rows: int = N, first_seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Three tokens of every slot, and the verify lengths."""
    choice = list(PLANS).index(name)
    tokens, verified = decode(target, drafter, state(rows, first_seed=first_seed), tuple(PLANS.values()), choice)
    return tokens[:, 1:4], verified[1:]


def million(name: str, target=TARGET, drafter=DRAFTER) -> np.ndarray:
    return np.concatenate([run(name, target, drafter, PART, i * PART)[0] for i in range(PARTS)])


def verdict(tokens: np.ndarray, law: np.ndarray = LAW) -> Match:
    counts = count(joint_index(tokens, VOCAB), law.size)
    return Match(total_variation(counts / counts.sum(), law.ravel()), g_test(counts, law))


@pytest.mark.parametrize("name", LAWFUL)
def test_three_tokens_have_the_targets_law(name):
    tokens, verified = run(name)
    found = verdict(tokens)
    assert found.p_value > 1e-4 and found.tv < 0.02, found  # an exact sample of this size is about .011 away
    if name != "fixed":
        assert (np.bincount(verified.ravel()) > 0.03 * verified.size).sum() >= 3  # lengths do change
    if "3 slots" in name:  # nor do the slots of a batch learn from each other
        law = np.einsum("a,b,c->abc", *[LAW.sum((1, 2))] * 3)
        assert verdict(tokens[:, 0].reshape(-1, 3), law).p_value > 1e-4


@pytest.mark.parametrize("name", UNLAWFUL)
def test_a_search_over_the_whole_path_spoils_it(name):
    found = verdict(run(name)[0])
    assert found.p_value < 1e-4 and found.tv > 0.04, found


@pytest.mark.long
@pytest.mark.parametrize("name", LAWFUL)
def test_the_law_at_a_million_samples(name):
    found = verdict(million(name))
    assert found, found


@pytest.mark.long
@pytest.mark.parametrize("name", UNLAWFUL)
def test_the_forbidden_search_at_a_million_samples(name):
    found = verdict(million(name))
    assert not found, found


# The paper's case: one request, p = (.7, .3), q = (.5, .5); the second confidence is .9 behind A and 0 behind B.

_NEVER = 1e-13
BINARY = target_of([[0.7, 0.3, _NEVER, _NEVER]] * VOCAB)
_SURE = np.full((GAMMA, VOCAB), -40.0)
_SURE[0], _SURE[1, 0] = logit(0.8), logit(0.9)
EVEN = KeyedDrafter.of(np.log(np.tile([0.5, 0.5, _NEVER, _NEVER], (GAMMA, VOCAB, 1))), _SURE)


@pytest.mark.parametrize(("name", "share"), [("paper, retrospective", 0.85), ("paper, early stop", 0.70)])
def test_the_papers_case(name, share):
    tokens, _ = run(name, BINARY, EVEN)
    assert (tokens[:, 0] == 0).mean() == pytest.approx(share, abs=0.01)


@pytest.mark.long
@pytest.mark.parametrize(("name", "share"), [("paper, retrospective", 0.85), ("paper, early stop", 0.70)])
def test_the_papers_case_at_a_million_samples(name, share):
    assert (million(name, BINARY, EVEN)[:, 0] == 0).mean() == pytest.approx(share, abs=0.0025)


# Draft noise keyed by absolute position alone: a draft that was forgotten comes back, and the stale size knows it.

SAME = target_of([[0.4, 0.4, 0.1, 0.1]] * VOCAB)
SAME_LAW = law_of(SAME)
# The third draft of a block tells the size two rounds later: all drafts, or none.
_TELLING = np.full((GAMMA, VOCAB), 4.0)
_TELLING[3] = [4, -6, 4, -6]


def telling(by_position: bool) -> KeyedDrafter:
    return KeyedDrafter.of(np.tile(PROPOSALS[0], (GAMMA, VOCAB, 1)), _TELLING, by_position)


def test_draft_noise_by_position_spoils_the_stale_size_but_no_fixed_length():
    name = "stale size, all or none"
    fixed = verdict(run("fixed", SAME, telling(by_position=True))[0], SAME_LAW)
    stale = verdict(run(name, SAME, telling(by_position=True))[0], SAME_LAW)
    fresh = verdict(run(name, SAME, telling(by_position=False))[0], SAME_LAW)
    assert fixed.p_value > 1e-4 and fresh.p_value > 1e-4, (fixed, fresh)
    assert stale.p_value < 1e-4 and stale.tv > 0.03, stale


@pytest.mark.long
@pytest.mark.parametrize("by_position", [False, True])
def test_draft_noise_at_a_million_samples(by_position):
    found = verdict(million("stale size, all or none", SAME, telling(by_position)), SAME_LAW)
    assert bool(found) != by_position, found
