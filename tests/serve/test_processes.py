"""One engine in two processes: the same tokens as one device, requests at process 0 alone, and nothing that hangs."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from dspark_jax import SamplingParams, load
from dspark_jax.decode.item import Control
from dspark_jax.serve.processes import pack, unpack
from helpers.mesh_model import engine, forward, model
from helpers.mesh_requests import requests
from helpers.runner import scaled_error

SCRIPT = Path(__file__).parent.parent / "helpers" / "two_processes.py"
ROOT = SCRIPT.parent.parent.parent


def launch(*arguments: str, timeout: float = 300) -> subprocess.CompletedProcess:
    """`dspark-jax launch` as a user calls it, without the suite's settings for devices; a hang is an error."""
    environment = {k: v for k, v in os.environ.items() if k != "NPROC"}
    flags = environment["XLA_FLAGS"].split()
    environment["XLA_FLAGS"] = " ".join(f for f in flags if "device_count" not in f)
    environment["PYTHONPATH"] = f"{ROOT / 'tests'}{os.pathsep}{ROOT}"
    command = [sys.executable, "-m", "dspark_jax.cli", "launch", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=timeout)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("processes")
    np.savez(path / "weights.npz", *jax.tree.leaves(model()[1]))
    return path


@pytest.mark.parametrize(
    ("mesh", "emulated"),
    [
        pytest.param((2, 1), 1, marks=pytest.mark.long),
        pytest.param((1, 2), 1, marks=pytest.mark.long),
        pytest.param((2, 2), 2, marks=pytest.mark.long),
    ],
    ids=lambda x: f"{x[0]}x{x[1]}" if isinstance(x, tuple) else str(x),
)
def test_two_processes_give_the_tokens_of_one_device(folder, mesh, emulated):
    pipe, expert = map(str, mesh)
    options = ("--processes", "2", "--mesh", f"{pipe}x{expert}", "--emulate-devices", str(emulated))
    done = launch(*options, "--", str(SCRIPT), str(folder), pipe, expert)
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((folder / f"process{i}.json").read_text()) for i in (0, 1))
    assert first["processes"] == 2 and first["local"] == second["local"] == emulated
    prompts, params = zip(*requests(), strict=True)
    alone = engine(1, 1).generate(prompts, params)
    assert [tuple(a) for a in first["answers"]] == [(list(c.tokens), c.finish_reason) for c in alone]
    assert {c.finish_reason for c in alone} == {"stop", "length"} and first["busy"] is False
    # A refused request and an aborted one leave the others alone; a device that waited goes on.
    assert "the prompt is empty" in first["refused"] and first["aborted"] == "abort"
    prompt, tokens, top = first["logprobs"]
    expected = forward(tuple(prompt), tuple(tokens))
    best = np.argsort(-expected, axis=1)[:, :4]
    assert len(tokens) == 8 and [[i for i, _ in row] for row in top] == best.tolist()
    assert scaled_error([[v for _, v in row] for row in top], np.take_along_axis(expected, best, axis=1)) < 1e-5
    assert first["streamed"] == list(alone[1].tokens) and first["again"] == list(alone[3].tokens)
    assert first["later"] == list(alone[5].tokens)
    assert second["here"] == ["requests enter at process 0, and this is process 1; call follow() here"] * 4
    assert first["compiled"] == second["compiled"] == []


@pytest.mark.long
def test_a_load_is_served_by_two_processes(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "def read_lines(path):"}) + "\n")
    options = ("--processes", "2", "--mesh", "2x1", "--emulate-devices", "1")
    done = launch(*options, "--", "bench", "serve", f"--prompts={prompts}", "--requests=3", "--max-tokens=9", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["tokens"], report["mesh"], len(report["busy"])) == (27, "2x1", 2) and min(report["busy"]) > 0


FAILING = """
import sys, time
from pathlib import Path
from dspark_jax.parallel.distributed import initialize
initialize()
import jax
print("process", jax.process_index(), "of", jax.process_count(), flush=True)
Path(f"{sys.argv[0]}.{jax.process_index()}").touch()
if jax.process_index() == int(sys.argv[1]):
    while not Path(f"{sys.argv[0]}.{1 - jax.process_index()}").exists():
        time.sleep(0.05)
    sys.exit(7)
time.sleep(600)
"""


@pytest.mark.parametrize("process", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_failing_process_ends_the_launch_with_its_exit_code(tmp_path, process):
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    done = launch("--processes", "2", "--", str(script), str(process), timeout=60)
    assert done.returncode == 7
    assert done.stdout == "process 0 of 2\n" and "[1] process 1 of 2" in done.stderr
    assert ("process 1 has failed with exit code 7; the others are ended" in done.stderr) == (process == 1)


KILLED = FAILING.replace("sys.exit(7)", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
ONE_RANK = """
import time
from dspark_jax.parallel.distributed import initialize
initialize()
import jax
from dspark_jax import Engine
from dspark_jax.parallel.mesh import make_mesh
index = jax.process_index()
slots = 3 if index else 4  # 3 are no multiple of the expert ranks
engine = Engine("nano", mesh=make_mesh(1, 2), slots=slots)
time.sleep(600)
"""


@pytest.mark.parametrize("process", [0, 1])
def test_a_killed_process_ends_the_others_and_is_named(tmp_path, process):
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    begin = time.monotonic()
    done = launch("--processes", "2", "--", str(script), str(process), timeout=60)
    assert done.returncode == 128 + 9 and time.monotonic() - begin < 30
    assert f"process {process} was killed by SIGKILL; the others are ended" in done.stderr


@pytest.mark.long
def test_a_fault_of_one_process_ends_all_of_them(tmp_path):
    """The other one finds none in its arguments, and would run for ten minutes."""
    script = tmp_path / "one_rank.py"
    script.write_text(ONE_RANK)
    begin = time.monotonic()
    done = launch("--processes", "2", "--mesh", "1x2", "--emulate-devices", "1", "--", str(script), timeout=60)
    assert done.returncode == 1 and time.monotonic() - begin < 30
    assert "slots is 3; expected a positive multiple of pipe × expert = 2" in done.stderr
    assert "process 1 has failed with exit code 1; the others are ended" in done.stderr


REFUSED = """
import time
from dspark_jax.parallel.distributed import initialize
initialize()
import jax
from dspark_jax import Engine
from dspark_jax.errors import ConfigError
from dspark_jax.parallel.mesh import make_mesh
mesh, begin = make_mesh(1, 2), time.perf_counter()
try:
    Engine("nano", mesh=mesh, placement={"num_slots": 17, "layer_updates_per_iter": 1})
except ConfigError as error:
    said = all(words in str(error) for words in ("num_slots is 17; expected a multiple of the 2", "static EPLB only"))
    print("process", jax.process_index(), "refuses" if said else error, flush=True)
    print(f"after {time.perf_counter() - begin:.2f} s", flush=True)
"""


def test_an_impossible_placement_is_refused_by_every_process(tmp_path):
    """Each finds the faults by itself, before a collective that the other might wait in; both end."""
    script = tmp_path / "refused.py"
    script.write_text(REFUSED)
    done = launch("--processes", "2", "--mesh", "1x2", "--emulate-devices", "1", "--", str(script), timeout=60)
    assert done.returncode == 0
    assert "process 0 refuses" in done.stdout and "[1] process 1 refuses" in done.stderr
    seconds = re.findall(r"after ([\d.]+) s", done.stdout + done.stderr)
    assert len(seconds) == 2 and max(map(float, seconds)) < 2


@pytest.mark.long
def test_a_bad_command_is_one_error_and_exit_code_2():
    done = launch("--processes", "2", "--", "generate", "--mesh", "2x1", timeout=60)
    assert done.returncode == 2 and done.stdout == "" and "Traceback" not in done.stderr
    assert "expected exactly one of --prompt and --prompt-file" in done.stderr


@pytest.mark.long
def test_generate_in_two_processes_prints_one_answer():
    options = ("--processes", "2", "--mesh", "2x1", "--emulate-devices", "1")
    command = ("generate", "--prompt", "def fib(n):", "--max-tokens", "12", "--json")
    done = launch(*options, "--", *command, timeout=500)
    assert done.returncode == 0 and done.stderr == ""
    (answer,) = load("nano").generate(["def fib(n):"], SamplingParams(max_tokens=12))
    assert json.loads(done.stdout)["token_ids"] == list(answer.tokens)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--processes", "0"], "--processes is 0; expected at least 1"),
        (["--processes", "2", "--mesh", "3x1"], "mesh 3x1 has 3 devices; expected a multiple of --processes 2"),
        (["--processes", "2", "--mesh", "2x2", "--emulate-devices", "4"], "--emulate-devices is 4; expected 2"),
    ],
)
def test_an_impossible_launch_is_refused(arguments, message):
    done = launch(*arguments, "--", "generate", timeout=60)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


def test_a_record_comes_back_from_its_vector():
    """Every field, with the bits of its own type."""
    record: Control = engine(1, 1).ring.idle_control()
    rng = np.random.default_rng(0)
    for leaf in jax.tree.leaves(record):
        bits = rng.integers(0, 2**32, leaf.shape, dtype=np.uint32)
        leaf[...] = bits % 2 if leaf.dtype == bool else bits.view(leaf.dtype)
    for stop in (True, False):
        back, flag = unpack(jax.numpy.asarray(pack(record, stop)), engine(1, 1).ring.idle_control())
        assert bool(flag) is stop
        for a, b in zip(jax.tree.leaves(record), jax.tree.leaves(back), strict=True):
            assert a.dtype == b.dtype and a.tobytes() == np.asarray(b).tobytes()
