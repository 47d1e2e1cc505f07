"""The oracle of the exactness tests, itself put to the test (B47): it accepts the truth and rejects small lies."""

import math

import numpy as np
import pytest

from helpers.statistics import chi2_survival, g_test, joint_index, markov_joint, matches, total_variation

P = np.array([0.50, 0.30, 0.15, 0.05])
N = 10**6


def sample(law, seed=0, n=N):
    return np.random.default_rng(seed).choice(len(law), size=n, p=law)


@pytest.mark.parametrize(
    ("statistic", "freedom", "expected"),
    [(3.841459, 1, 0.05), (7.814728, 3, 0.05), (11.344867, 3, 0.01), (0.0, 3, 1.0), (18.307038, 10, 0.05),
     (2.0, 2, math.exp(-1)), (40.0, 2, math.exp(-20)), (124.342113, 100, 0.05)],
)  # fmt: skip
def test_chi2_survival_equals_the_tables(statistic, freedom, expected):
    assert chi2_survival(statistic, freedom) == pytest.approx(expected, rel=1e-5)


def test_accepts_the_true_law():
    assert all(matches(sample(P, seed), P) for seed in range(5))


@pytest.mark.parametrize(("source", "target"), [(0, 1), (1, 0), (2, 3), (3, 0)])
def test_b47_rejects_a_law_that_is_slightly_wrong(source, target):
    wrong = P.copy()
    wrong[source] -= 0.004
    wrong[target] += 0.004
    verdict = matches(sample(wrong), P)
    assert not verdict
    assert verdict.tv < 0.005 and verdict.p_value < 1e-4  # the G-test sees what the distance alone would pass


def test_b47_rejects_a_distance_that_few_samples_cannot_prove():
    wrong = P + np.array([0.05, -0.05, 0, 0])
    verdict = matches(sample(wrong, n=200), P)
    assert verdict.tv > 0.005 and not verdict


def test_b47_rejects_a_token_that_cannot_occur():
    law = np.array([0.5, 0.5, 0.0])
    samples = sample(law)
    assert matches(samples, law)
    samples[0] = 2
    assert not matches(samples, law)


def test_b47_rejects_independent_tokens_with_the_right_marginals():
    table = np.array([[0.7, 0.3], [0.3, 0.7]])
    joint = markov_joint(lambda prefix: table[prefix[-1]] if prefix else np.array([0.5, 0.5]), 2, 2)
    np.testing.assert_allclose(joint, [[0.35, 0.15], [0.15, 0.35]])
    a, b = sample([0.5, 0.5], 1), sample([0.5, 0.5], 2)
    assert not matches(joint_index(np.stack([a, b], 1), 2), joint)
    b = np.where(np.random.default_rng(3).random(N) < 0.7, a, 1 - a)
    assert matches(joint_index(np.stack([a, b], 1), 2), joint)


def test_p_values_are_uniform_under_the_truth():
    rng = np.random.default_rng(11)
    values = np.array([g_test(rng.multinomial(10_000, P), P) for _ in range(2000)])
    np.testing.assert_allclose([(values < q).mean() for q in (0.05, 0.5, 0.9)], [0.05, 0.5, 0.9], atol=0.03)


def test_total_variation_by_hand():
    assert total_variation(np.array([0.5, 0.5]), np.array([0.25, 0.75])) == pytest.approx(0.25)
    with pytest.raises(AssertionError):
        matches(np.array([0, 4]), P)
