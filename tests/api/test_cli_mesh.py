"""`--mesh` and `--emulate-devices`: the same answers on a mesh, and every fault before any work."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from dspark_jax import LM, ConfigError, SamplingParams, cli
from dspark_jax.cli_devices import chosen_mesh, stage_ranges
from dspark_jax.cli_engine import EngineRunner
from dspark_jax.parallel.mesh import make_mesh
from dspark_jax.parallel.mesh_config import MeshConfig
from helpers.mesh_model import GAMMA, engine, lm

OPTIONS = ("generate", "--prompt", "abc", "--max-tokens", "20")


def no_batch(*_, **__):
    """In place of `load`, where an engine must answer."""
    pytest.fail("the model was loaded for the batch interface")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """Runs the command line in this process on the tiny model: exit code, stdout, stderr."""

    def go(*arguments: str, devices: int | None = None, load=lambda *_, **__: lm(), engines=None):
        monkeypatch.setattr("dspark_jax.api.load", load)
        if devices is not None:
            everything = jax.devices()
            monkeypatch.setattr(jax, "devices", lambda *_: everything[:devices])
        monkeypatch.setattr(
            "dspark_jax.cli_engine.Engine",
            # Called as other tests call it: the engines are shared.
            engines or (lambda *_, speculate, **__: engine(2, 1) if speculate else engine(2, 1, speculate=False)),
        )
        monkeypatch.setattr(sys, "argv", ["dspark-jax", *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        printed = capsys.readouterr()
        return stop.value.code or 0, printed.out, printed.err

    return go


@pytest.mark.long
@pytest.mark.parametrize("compare", [False, True])
def test_json_on_a_mesh_has_the_keys_and_the_answer_of_one_device(run, compare):
    options = (*OPTIONS, "--compare") if compare else OPTIONS
    code, out, err = run(*options, "--json", "--mesh", "2x1", devices=2, load=no_batch)
    assert code == 0 and err == ""
    found = json.loads(out)
    single = json.loads(run(*OPTIONS, "--json")[1])
    assert list(found) == list(single)
    same = ("text", "token_ids", "drafted", "finish_reason", "rounds", "tokens_per_round", "acceptance_by_position")
    assert {key: found[key] for key in same} == {key: single[key] for key in same}
    assert 1 <= found["rounds"] < 20 and len(found["acceptance_by_position"]) == GAMMA and found["tokens_per_second"] > 0
    assert not compare or (found["identical"] is True and found["plain_tokens_per_second"] > 0)


@pytest.mark.long
def test_text_on_a_mesh_is_streamed_and_summed_up(run):
    (answer,) = lm().generate(["abc"], SamplingParams(max_tokens=20))
    code, out, err = run(*OPTIONS, "--mesh", "2x1", devices=2, load=no_batch)
    assert code == 0 and err == ""
    text, _, summary = out.partition("\n\n")
    assert text == "abc" + answer.text and len(answer.tokens) > 5
    assert "tokens/s with the drafter" in summary and "without the drafter" not in summary


@pytest.mark.long
def test_no_draft_and_sampling_on_a_mesh(run):
    arguments = (*OPTIONS, "--json", "--temperature", "0.9", "--seed", "5")
    found = json.loads(run(*arguments, "--mesh", "2x1", devices=2, load=no_batch)[1])
    params = SamplingParams(temperature=0.9, seed=5, max_tokens=20)
    assert found["token_ids"] == list(lm().generate(["abc"], params)[0].tokens)
    plain = json.loads(run(*arguments, "--no-draft", "--mesh", "2x1", devices=2, load=no_batch)[1])
    assert plain["rounds"] == plain["tokens"] - 1 and plain["plain_tokens_per_second"] == plain["tokens_per_second"]


@pytest.mark.long
def test_a_bad_prompt_is_refused_before_compilation(run, monkeypatch):
    monkeypatch.setattr("dspark_jax.serve.engine.Engine.warmup", lambda *_: pytest.fail("compiled"))
    code, out, err = run("generate", "--prompt", "a" * 99, "--mesh", "2x1", devices=2, load=no_batch)
    assert code == 2 and out == "" and "the prompt has 100 tokens; expected at most 63" in err


@pytest.mark.long
def test_a_runner_answers_several_prompts_side_by_side(monkeypatch):
    monkeypatch.setattr("dspark_jax.cli_engine.Engine", lambda *_, **__: engine(2, 1))
    runner = EngineRunner("tiny", make_mesh(2, 1))
    prompts, rounds = ["abc", "q", "stone"], []
    params = SamplingParams(max_tokens=9)
    found = runner.generate(prompts, params, speculate=True, on_round=rounds.append)
    assert [c.tokens for c in found] == [lm().generate([prompt], params)[0].tokens for prompt in prompts]
    assert sum(len(r.tokens) for r in rounds) == sum(len(c.tokens) for c in found)
    assert runner.draft_config is engine(2, 1).draft_config and runner.decode([0, 1]) == "ab"


@pytest.mark.long
def test_a_runner_asks_for_the_stages_given_and_the_fewest_slots(monkeypatch):
    asked = []
    monkeypatch.setattr("dspark_jax.cli_engine.Engine", lambda *_, **options: asked.append(options) or engine(2, 1))
    runner = EngineRunner("tiny", make_mesh(2, 2), ((0, 1), (1, 4)))
    runner.compile(["abc"], SamplingParams(), speculate=[True, False])
    assert [(o["slots"], o["stages"], o["speculate"]) for o in asked] == [(4, ((0, 1), (1, 4)), s) for s in (True, False)]


@pytest.mark.long
def test_expert_ranks_alone_take_the_batch_interface(run):
    meshes = []
    load = lambda model, *, mesh, **_: meshes.append(mesh) or lm()  # noqa: E731
    go = run(*OPTIONS, "--json", "--mesh", "1x2", devices=2, load=load)
    assert go[0] == 0
    assert [dict(mesh.shape) for mesh in meshes] == [{"pipe": 1, "expert": 2}]


@pytest.mark.parametrize("command", ["generate", "evaluate"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mesh", "2z1"], "mesh '2z1': expected pipe ranks x expert ranks, as in 2x4"),
        (["--mesh", "0x1"], "pipe is 0; expected an integer of at least 1"),
        (["--mesh", "4x4"], "mesh 4x4 needs 16 devices, but there are 8; choose a smaller mesh, or emulate them on a CPU"
         " with --emulate-devices 16"),
        (["--mesh", "2x2"], "mesh 2x2 takes 4 of 8 devices; choose a mesh of 8"),
        (["--mesh", "2x1", "--emulate-devices", "4"], "--emulate-devices is 4, and mesh 2x1 takes 2; expected"
         " --emulate-devices 2, or another --mesh"),
        (["--emulate-devices", "3"], "--emulate-devices is 3, and mesh 1x1 takes 1"),
        (["--mesh", "2x1", "--emulate-devices", "2"], "emulate_devices(2) came too late"),
        (["--emulate-devices", "0"], "Invalid value for '--emulate-devices'"),
    ],
)  # fmt: skip
def test_a_mesh_that_does_not_fit_is_one_message_and_exit_code_2(run, tmp_path, command, arguments, message):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "abc"}\n')
    given = ["--prompt", "abc"] if command == "generate" else ["--prompts", str(file)]
    code, out, err = run(command, *given, *arguments)
    assert code == 2 and out == "" and message in err and "Traceback" not in err


def test_without_options_jax_need_not_start(monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda *_: pytest.fail("asked for devices"))
    assert chosen_mesh(None, None) == (MeshConfig(), None)


def test_stages_of_a_mesh_file():
    assert stage_ranges(MeshConfig(2, 1), "nano") is None
    assert stage_ranges(MeshConfig(2, 1, "0-3,4-5"), "nano") == ((0, 4), (4, 6))
    assert stage_ranges(MeshConfig(2, 1, "5,1"), "nano") == ((0, 5), (5, 6))
    with pytest.raises(ConfigError) as error:
        stage_ranges(MeshConfig(2, 3, "1,1,1"), "nano")
    for words in ("3 stages given for 2 pipe ranks", "expert is 3; expected a divisor", "sum to 3"):
        assert words in str(error.value)


@pytest.mark.long
def test_emulated_from_a_fresh_process(tiny: LM, tiny_folder, tmp_path):
    """The whole way: a mesh file with stages, devices made before JAX starts, weights from a folder."""
    mesh = tmp_path / "mesh.yaml"
    mesh.write_text(f"pipe: 2\nexpert: 1\nstages: 1,{tiny.config.num_hidden_layers - 1}\n")
    command = [sys.executable, "-m", "dspark_jax.cli", "generate", "--model", str(tiny_folder), "--prompt", "ABC"]
    command += ["--max-tokens", "12", "--mesh", str(mesh), "--emulate-devices", "2", "--json"]
    environment = {k: v for k, v in os.environ.items() if k != "NPROC"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    (answer,) = tiny.generate(["ABC"], SamplingParams(max_tokens=12))
    assert json.loads(done.stdout)["token_ids"] == list(answer.tokens)


@pytest.mark.parametrize("command", [["generate", "--prompt", "abc"], ["evaluate"], ["profile"], ["bench", "serve"]])
def test_a_drafter_of_its_own_reaches_the_engine(run, monkeypatch, tmp_path, command):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "abc"}\n')
    given = ["--prompts", str(file)] if command[-1] in ("evaluate", "serve") else []
    asked = []

    def make(model, *_, **options):
        asked.append((model, options["drafter"], options["draft_tokens"]))
        raise ConfigError("seen")

    monkeypatch.setattr("dspark_jax.serve.engine.Engine", make)
    go = run(*command, *given, "--target", "big", "--drafter", "small", "--draft-tokens", "3", "--mesh", "2x1",
             devices=2, load=no_batch, engines=make)  # fmt: skip
    assert go[0] == 2 and "seen" in go[2] and asked == [("big", Path("small"), 3)]
