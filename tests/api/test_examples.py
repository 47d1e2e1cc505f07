"""The examples run as a user runs them, and show the model's own text: a tiny model's, and the shipped one's if long."""

import os
import subprocess
import sys

import pytest

from dspark_jax import LM, Completion, SamplingParams, load

PROMPTS = ["def fib(n):", "The river", "import os\n"]


def run(name: str, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", f"dspark_jax.examples.{name}", *arguments]
    # Without the suite's settings for devices: the examples must make their own.
    environment = {k: v for k, v in os.environ.items() if k != "NPROC"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=400)


@pytest.fixture(scope="module", params=["tiny", pytest.param("nano", marks=pytest.mark.long)])
def model(request: pytest.FixtureRequest) -> str:
    return "nano" if request.param == "nano" else str(request.getfixturevalue("tiny_folder"))


@pytest.fixture(scope="module")
def answers(model: str, request: pytest.FixtureRequest) -> list[Completion]:
    lm: LM = load("nano") if model == "nano" else request.getfixturevalue("tiny")
    return lm.generate(PROMPTS, SamplingParams(max_tokens=16))


@pytest.mark.long
def test_ring_by_hand(model, answers):
    done = run("ring_by_hand", "--mesh", "2x1", "--emulate-devices", "2", "--model", model)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-3:] == [f"{p!r} -> {a.text!r}" for p, a in zip(PROMPTS, answers, strict=True)]
    assert sum("drafts accepted" in line for line in lines) >= sum(a.rounds for a in answers)


@pytest.mark.long
def test_serving_loop(model, answers):
    done = run("serving_loop", "--model", model)
    assert done.returncode == 0, done.stderr
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert f"{prompt!r} -> {answer.text!r} ({answer.finish_reason}, {answer.rounds} rounds)" in done.stdout
    assert "'unwanted' ended by abort" in done.stdout and "streamed: " in done.stdout


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("ring_by_hand", ["--mesh", "2z1"], "mesh '2z1': expected pipe ranks x expert ranks"),
        ("serving_loop", ["--mesh", "2x2", "--emulate-devices", "2"], "mesh 2x2 needs 4 devices, but there are 2"),
    ],
)
def test_a_wrong_mesh_is_exit_code_2(name, arguments, message):
    done = run(name, *arguments)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
