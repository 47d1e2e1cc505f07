"""The bench of a schedule alone."""

import json
import math

import pytest

from dspark_jax.bench import schedule_step


@pytest.mark.long
def test_every_kind_is_timed_for_every_size(capsys):
    assert schedule_step.main(["--requests", "2,4", "--gamma", "3", "--steps", "64", "--repeats", "3"]) == 0
    found = json.loads(capsys.readouterr().out)["microseconds"]
    assert list(found) == ["2", "4"]
    for each in found.values():
        assert list(each) == ["fixed", "threshold", "early-stop", "stale-size", "stale-rate"]
        assert all(math.isfinite(us) for us in each.values())


@pytest.mark.parametrize(("arguments", "message"), [
    (["--requests", "4,x"], "--requests is 4,x; expected at least 1"),
    (["--gamma", "0", "--steps", "0"], "--gamma is 0; expected at least 1"),
])  # fmt: skip
def test_bad_input_is_named(capsys, arguments, message):
    assert schedule_step.main(arguments) == 2
    assert message in capsys.readouterr().err
