"""Does a sample follow a distribution? Total variation and the G-test, without scipy."""

import dataclasses
import math
from collections.abc import Callable

import numpy as np

TV_LIMIT = 0.005
P_VALUE_LIMIT = 1e-4


def chi2_survival(statistic: float, freedom: int) -> float:
    """P(X >= statistic) for X chi-squared: the regularised upper incomplete gamma function Q(freedom/2, x/2)."""
    a, x = freedom / 2, statistic / 2
    if not (math.isfinite(x) and a > 0):
        return 0.0 if x == math.inf else math.nan
    if x <= 0:
        return 1.0
    scale = math.exp(a * math.log(x) - x - math.lgamma(a))
    if x < a + 1:  # series of the lower function
        term = total = 1 / a
        n = a
        while abs(term) > abs(total) * 1e-16:
            n += 1
            term *= x / n
            total += term
        return max(0.0, 1 - scale * total)
    b = x + 1 - a  # continued fraction of the upper function, modified Lentz
    c, d = 1e300, 1 / b
    h = d
    for i in range(1, 10_000):
        an = -i * (i - a)
        b += 2
        d = 1 / (an * d + b)
        c = b + an / c
        h *= d * c
        if abs(d * c - 1) < 1e-15:
            break
    return scale * h


def total_variation(p: np.ndarray, q: np.ndarray) -> float:
    """Half the L1 distance of two distributions of equal shape."""
    return 0.5 * float(np.abs(np.asarray(p, np.float64) - np.asarray(q, np.float64)).sum())


def g_test(counts: np.ndarray, p: np.ndarray) -> float:
    """p-value of the likelihood-ratio test that `counts` come from `p`; cells expecting fewer than 5 are pooled."""
    counts, p = np.asarray(counts, np.float64).ravel(), np.asarray(p, np.float64).ravel()
    if counts[p == 0].any():
        return 0.0
    expected = p * counts.sum() / p.sum()
    small = expected < 5
    observed = np.append(counts[~small], counts[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    if len(expected) < 2:
        return 1.0
    hit = observed > 0
    statistic = 2 * float((observed[hit] * np.log(observed[hit] / expected[hit])).sum())
    return chi2_survival(statistic, len(expected) - 1)


@dataclasses.dataclass(frozen=True)
class Match:
    """The verdict on a sample; true when both the distance and the test allow the distribution."""

    tv: float
    p_value: float

    def __bool__(self) -> bool:
        return self.tv < TV_LIMIT and self.p_value > P_VALUE_LIMIT


def count(samples: np.ndarray, cells: int) -> np.ndarray:
    """Occurrences of 0..cells-1; a sample outside fails loudly."""
    samples = np.asarray(samples).ravel()
    assert samples.min() >= 0 and samples.max() < cells, (samples.min(), samples.max(), cells)
    return np.bincount(samples, minlength=cells)


def matches(samples: np.ndarray, p: np.ndarray) -> Match:
    """Whether integer `samples` follow `p` (flat index over `p` when it is a joint distribution)."""
    counts = count(samples, np.size(p))
    return Match(total_variation(counts / counts.sum(), np.ravel(p)), g_test(counts, p))


def joint_index(tokens: np.ndarray, vocab: int) -> np.ndarray:
    """Flat index of each row of `tokens` [N, n] in the joint distribution [vocab] * n."""
    tokens = np.asarray(tokens)
    return np.ravel_multi_index(tuple(tokens.T), (vocab,) * tokens.shape[1])


def markov_joint(next_token: Callable[[tuple[int, ...]], np.ndarray], vocab: int, length: int) -> np.ndarray:
    """Joint distribution [vocab] * length by enumeration; `next_token(prefix)` is the law [vocab] of what follows."""
    joint = np.zeros((vocab,) * length)
    for prefix in np.ndindex(*(vocab,) * (length - 1)):
        mass = 1.0
        for i, token in enumerate(prefix):
            mass *= next_token(prefix[:i])[token]
        joint[prefix] = mass * next_token(prefix)
    return joint
