"""The examples run as a user runs them, and show the model's own text."""

import os
import subprocess
import sys

import pytest

from dspark_jax import SamplingParams, load

PROMPTS = ["def fib(n):", "The river", "import os\n"]


def run(name: str, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", f"dspark_jax.examples.{name}", *arguments]
    # Without the suite's settings for devices: the examples must make their own.
    environment = {k: v for k, v in os.environ.items() if k != "NPROC"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=400)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return [c.text for c in load("nano").generate(PROMPTS, SamplingParams(max_tokens=16))]


def test_ring_by_hand(texts):
    done = run("ring_by_hand", "--mesh", "2x1", "--emulate-devices", "2")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-3:] == [f"{prompt!r} -> {text!r}" for prompt, text in zip(PROMPTS, texts, strict=True)]
    assert any("request 1: 2 drafts accepted" in line for line in lines)


def test_serving_loop(texts):
    done = run("serving_loop")
    assert done.returncode == 0, done.stderr
    for prompt, text in zip(PROMPTS, texts, strict=True):
        assert f"{prompt!r} -> {text!r} (length, " in done.stdout
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
