"""Calibration of the drafter's confidence: what happened against what was said, and one temperature a draft position.

A round says c_1, c_2, …, each the chance of one draft given those before it; a_k, the product of the first k, is the
chance that k drafts survive, and is what schedulers sort by. So errors are measured on a_k against "k drafts survived",
over all rounds, and temperatures are fitted for it from left to right: sequential temperature scaling (STS, paper).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from dspark_jax.errors import ConfigError, raise_all

BINS = 10
SPAN = 20.0  # temperatures are sought in 1 / SPAN … SPAN

CAUTION = 0.1


@dataclass(frozen=True)
class Rounds:
    """Recorded rounds, all of whose drafts were verified.

    Attributes:
      logits: confidence logits [N, gamma].
      accepted: how many drafts survived, from the first on, [N].

    Raises:
      ConfigError: naming every contradiction of the arrays.
    """

    logits: Float[np.ndarray, "N gamma"]
    accepted: Int[np.ndarray, "N"]

    def __post_init__(self) -> None:
        raise_all(ConfigError, "recorded rounds", list(self._faults()))

    def _faults(self):
        if self.logits.ndim != 2 or self.accepted.shape != self.logits.shape[:1] or not self.logits.size:
            yield f"logits {self.logits.shape} and accepted {self.accepted.shape}; expected [N, gamma] and [N], N >= 1"
            return
        if not np.isfinite(self.logits).all():
            yield f"logits hold {int((~np.isfinite(self.logits)).sum())} values that are not finite"
        low, high = int(self.accepted.min()), int(self.accepted.max())
        if low < 0 or high > self.gamma:
            yield f"accepted spans {low} … {high}; expected 0 … {self.gamma}"

    @property
    def gamma(self) -> int:
        """Drafts of a block."""
        return self.logits.shape[1]

    def __len__(self) -> int:
        return len(self.accepted)

    def part(self, mask: Bool[np.ndarray, "N"]) -> "Rounds":
        """The rounds where `mask` is true."""
        return Rounds(self.logits[mask], self.accepted[mask])

    def survived(self) -> Bool[np.ndarray, "N gamma"]:
        """Whether draft k and all before it were accepted."""
        return self.accepted[:, None] > np.arange(self.gamma)

    def survival(self, temperatures: Sequence[float] | None = None) -> Float[np.ndarray, "N gamma"]:
        """a_k: the cumulative product of sigmoid(logit_k / T_k); T = 1 by default."""
        return np.cumprod(self.confidence(temperatures), axis=1)

    def confidence(self, temperatures: Sequence[float] | None = None) -> Float[np.ndarray, "N gamma"]:
        """c_k = sigmoid(logit_k / T_k)."""
        return _sigmoid(self.logits / (np.ones(self.gamma) if temperatures is None else np.asarray(temperatures)))


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(0.5 * x))


@dataclass(frozen=True)
class Reliability:
    """A reliability diagram: bins of equal mass, from the least predictions to the largest.

    Attributes:
      predicted: mean prediction by bin.
      observed: share of events by bin.
      count: rounds by bin.
    """

    predicted: tuple[float, ...]
    observed: tuple[float, ...]
    count: tuple[int, ...]

    @property
    def ece(self) -> float:
        """Expected calibration error: mean distance of the two, weighted by mass."""
        p, o, n = (np.asarray(x, np.float64) for x in (self.predicted, self.observed, self.count))
        return float((np.abs(p - o) * n).sum() / n.sum())


def reliability(predicted: Float[np.ndarray, "N"], happened: Bool[np.ndarray, "N"], bins: int = BINS) -> Reliability:
    """Sorts by prediction and splits into `bins` parts of equal size (at most one a sample)."""
    order = np.argsort(predicted, kind="stable")
    edges = np.linspace(0, len(order), min(bins, len(order)) + 1).astype(int)
    count = np.diff(edges)
    p, h = (np.add.reduceat(x[order].astype(np.float64), edges[:-1]) / count for x in (predicted, happened))
    return Reliability(tuple(p.tolist()), tuple(h.tolist()), tuple(count.tolist()))


def auc(predicted: Float[np.ndarray, "N"], happened: Bool[np.ndarray, "N"]) -> float | None:
    """P(an event was given a higher prediction than a non-event), ties half; None without one of each."""
    events = int(happened.sum())
    others = len(happened) - events
    if not events or not others:
        return None
    _, place, size = np.unique(predicted, return_inverse=True, return_counts=True)
    rank = (np.cumsum(size) - (size - 1) / 2)[place]  # mean rank among equals, from 1 on
    return float((rank[happened].sum() - events * (events + 1) / 2) / (events * others))


def fit(rounds: Rounds, bins: int = BINS) -> tuple[float, ...]:
    """Temperatures T_1 … T_gamma: each by a grid search that makes the error of a_k least, with those before it fixed.

    Two grids, even in log T: a wide one, and a fine one around its best point. Where the error hardly depends on T, few
    rounds would choose any temperature; a price of `CAUTION / sqrt(rounds)` on |log T| keeps it near 1 then, and is far
    below the error's own noise.
    """
    before, found = np.ones(len(rounds)), []
    survived = rounds.survived()
    for k in range(rounds.gamma):
        logits, happened, fixed = rounds.logits[:, k], survived[:, k], before

        def error(log_t: float, logits=logits, happened=happened, fixed=fixed) -> float:
            price = CAUTION * abs(log_t) / np.sqrt(len(rounds))
            return reliability(fixed * _sigmoid(logits / np.exp(log_t)), happened, bins).ece + price

        wide = np.linspace(-np.log(SPAN), np.log(SPAN), 41)
        center = min(wide, key=error)
        step = wide[1] - wide[0]
        best = min(np.linspace(center - step, center + step, 31), key=error)
        found.append(float(np.exp(best)))
        before = before * _sigmoid(logits / found[-1])
    return tuple(found)


@dataclass(frozen=True)
class Quality:
    """How good confidences are, by draft position; of a_k against "k drafts survived".

    Attributes:
      ece: expected calibration error.
      auc: None where all rounds went the same way.
      diagrams: what `ece` sums up.
    """

    ece: tuple[float, ...]
    auc: tuple[float | None, ...]
    diagrams: tuple[Reliability, ...]


def quality(rounds: Rounds, temperatures: Sequence[float] | None = None, bins: int = BINS) -> Quality:
    """Of confidences at these temperatures."""
    predicted, happened = rounds.survival(temperatures), rounds.survived()
    diagrams = tuple(reliability(predicted[:, k], happened[:, k], bins) for k in range(rounds.gamma))
    areas = tuple(auc(predicted[:, k], happened[:, k]) for k in range(rounds.gamma))
    return Quality(tuple(d.ece for d in diagrams), areas, diagrams)


def ece_floor(
    rounds: Rounds, temperatures: Sequence[float] | None = None, *, draws: int = 10, seed: int = 0, bins: int = BINS
) -> tuple[float, ...]:
    """The error by position that perfect confidences would show in as many rounds: outcomes drawn from them, averaged.

    An error is a mean of absolute values, so a finite sample never shows 0.
    """
    confidence = rounds.confidence(temperatures)
    rng = np.random.default_rng(seed)
    errors = []
    for _ in range(draws):
        survives = rng.random(confidence.shape) < confidence
        accepted = np.cumprod(survives, axis=1).sum(axis=1)
        errors.append(quality(Rounds(rounds.logits, accepted), temperatures, bins).ece)
    return tuple(np.mean(errors, axis=0).tolist())
