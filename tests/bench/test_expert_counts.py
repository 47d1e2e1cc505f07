"""The comparison behind the cost of counting: turns, warm-up, medians; on engines that do nothing."""

import itertools
from typing import ClassVar

import pytest

from dspark_jax.bench.expert_counts import Cost, compare


class Fake:
    """A call takes the next of `times`, on a clock of its own."""

    now = 0.0
    log: ClassVar[list[str]] = []

    def __init__(self, name: str, times: list[float]):
        self.name, self.times = name, itertools.cycle(times)

    def fill(self) -> None:
        Fake.log.append(self.name)

    def step(self) -> None:
        Fake.now += next(self.times)


def test_both_take_turns_and_medians_are_compared():
    Fake.now, Fake.log = 0.0, []
    plain, counting = Fake("p", [9.0, 1.0, 2.0, 3.0]), Fake("c", [9.0, 3.0, 3.0, 99.0])
    cost = compare(plain, counting, blocks=2, calls=3, clock=lambda: Fake.now)
    assert cost == Cost(2.0, 3.0) and cost.overhead == pytest.approx(0.5)
    assert Fake.log == list("cppccp")  # the first block is not timed; the order alternates
