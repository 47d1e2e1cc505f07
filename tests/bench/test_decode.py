"""`dspark-jax bench decode`: medians and ratios of known times, and what it refuses."""

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dspark_jax import RequestError, SamplingParams, cli
from dspark_jax.bench.decode import decode_speed


class Clock:
    """A model whose answers take the next of the given seconds: 10 tokens each, in 3 rounds with the drafter."""

    def __init__(self, fast: list[float], plain: list[float]):
        self.draft_config: Any = "some"
        self.mesh = SimpleNamespace(devices=np.asarray([SimpleNamespace(device_kind="clock")]))
        self.seconds = {True: iter(fast), False: iter(plain)}
        self.calls: list[tuple[bool, tuple, tuple]] = []

    def compile(self, prompts, params, speculate):
        assert speculate == [True, False]

    def generate(self, prompts, params, speculate):
        self.calls.append((speculate, tuple(prompts), tuple(p.seed for p in params)))
        last = next(self.seconds[speculate])
        return [SimpleNamespace(tokens=(0,) * 10, rounds=3, seconds=last * (i + 1) / len(prompts)) for i in range(len(prompts))]


def test_medians_of_interleaved_turns():
    lm: Any = Clock([1.0, 2.0, 1.0, 1.0, 4.0, 4.0], [2.0, 4.0, 5.0, 5.0, 10.0, 14.0])
    found = decode_speed(lm, ["a", "b", "c", "d", "e"], SamplingParams(seed=7), 2, name="a b", repeats=3)
    # 40 tokens a turn: (3, 2, 8) and (6, 10, 24) seconds; a group takes as long as its last answer. "e" fills no group.
    assert found["time_us"] == 75_000 and found["peers"] == {"plain": 250_000}
    assert found["speedup"] == 3.0 and found["tau"] == 3.0
    assert found["bench"] == "decode" and found["case"] == "a b batch=2 temperature=0 prompts=4 max_tokens=128"
    assert [call[0] for call in lm.calls] == [True, True, False, False, False, False, True, True, True, True, False, False]
    assert {call[1:] for call in lm.calls} == {(("a", "b"), (7, 8)), (("c", "d"), (7, 8))}


def test_what_cannot_be_compared_is_refused():
    lm: Any = Clock([], [])
    with pytest.raises(RequestError, match="batch is 3, and there are 2 prompts"):
        decode_speed(lm, ["a", "b"], SamplingParams(), 3, name="")
    lm.draft_config = None
    with pytest.raises(RequestError, match="needs a model with a drafter; give --drafter"):
        decode_speed(lm, ["a"], SamplingParams(), 1, name="")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--batch", "1,3"), "--batch is '1,3', and {file} has 2 prompts; give 3, or a smaller batch"),
        (("--batch", "0"), "--batch is '0'; expected positive integers"),
        (("--out", "absent/x.json"), "there is no folder 'absent'"),
    ],
)
def test_the_command_refuses_before_it_loads(options, said, tmp_path, monkeypatch, capsys):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n' * 2)
    monkeypatch.setattr(sys, "argv", ["dspark-jax", "bench", "decode", "--model", "absent", "--prompts", str(file), *options])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2 and said.format(file=file) in " ".join(capsys.readouterr().err.split())
