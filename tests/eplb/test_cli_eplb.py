"""`dspark-jax eplb`: plan, report, check, collect and apply on real files; every fault and exit code 2."""

import json
import subprocess
import sys
import warnings

import numpy as np
import pytest
import yaml

from dspark_jax import cli
from dspark_jax.config import to_hf
from dspark_jax.eplb import (
    ExpertCounter,
    LoadBalancerConfig,
    StatisticsRecorder,
    assign,
    load_config,
    read_statistics,
    save_config,
)
from dspark_jax.parallel.mesh import make_mesh
from dspark_jax.parallel.mesh_config import load_mesh
from helpers import placed_model
from helpers.checkpoints import DRAFT, TARGET
from helpers.placed_model import base_engine

EXPERTS, LAYERS = TARGET.n_routed_experts, TARGET.num_hidden_layers + DRAFT.num_stages  # 4 experts, layers 0 … 4


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """Runs `dspark-jax eplb …` in this process: exit code, stdout, stderr with the warnings."""

    def go(*arguments):
        monkeypatch.setattr(sys, "argv", ["dspark-jax", "eplb", *map(str, arguments)])
        with warnings.catch_warnings(record=True) as seen, pytest.raises(SystemExit) as stop:
            warnings.simplefilter("always")
            cli.main()
        printed = capsys.readouterr()
        return stop.value.code or 0, printed.out, printed.err + "".join(f"warning: {w.message}\n" for w in seen)

    return go


@pytest.fixture
def statistics(tmp_path):
    rng = np.random.default_rng(0)
    for rank in (0, 1):
        recorder = StatisticsRecorder(EXPERTS, 2, 10, 14)
        for iteration in range(10, 14):
            counts = rng.integers(1, 90, (LAYERS, EXPERTS)) * [4, 1, 1, 1]
            recorder.add(iteration, counts)
        recorder.write(tmp_path / "statistics", rank)
    return tmp_path / "statistics"


@pytest.fixture
def model(tmp_path):
    """A folder with nothing but config.json."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(to_hf(TARGET, DRAFT)))
    return folder


def test_plan_check_and_report(run, statistics, model, tmp_path):
    path = tmp_path / "map.yaml"
    code, out, err = run("plan", statistics, "--output", path, "--num-slots", 6, "--model", model)
    assert code == 0 and err == "" and "5 layers, 6 slots on 2 expert ranks" in out
    assert yaml.safe_load(path.read_text()).keys() == {
        "num_slots", "initial_global_assignments", "layer_updates_per_iter",
    }  # fmt: skip
    code, out, err = run("check", path, "--model", model, "--ep", 2)
    assert code == 0 and err == "" and "fits 3 layers and 2 draft stages on 2 expert ranks" in out
    assert "6 slots, 3 a rank (50.0% more expert weights), at most 3 replicas of an expert" in out
    picture = tmp_path / "load.png"
    code, out, err = run("report", statistics, "--config", path, "--plot", picture, "--model", model)
    assert code == 0 and err == "" and picture.read_bytes().startswith(b"\x89PNG")
    lines = out.splitlines()
    assert lines[0].split() == "mean std std imbalance imbalance in sum in sum".split()
    assert lines[1].split() == "layer rows before after before after before after".split()
    assert [line.split()[0] for line in lines[2:]] == ["0", "1", "2", "3", "4", "target", "draft", "all"]
    before, after = (float(lines[-1].split()[i]) for i in (-2, -1))
    assert after < before


def test_report_as_json(run, statistics, tmp_path):
    code, out, err = run("report", statistics, "--ep", 4, "--json")
    found = json.loads(out)
    assert code == 0 and err == "" and found["expert_ranks"] == 4 and found.keys() == {"expert_ranks", "before"}
    assert found["before"]["layers"].keys() == {"0", "1", "2", "3", "4"}
    path = tmp_path / "map.yaml"
    save_config(LoadBalancerConfig(8), path)
    found = json.loads(run("report", statistics, "--config", path, "--ep", 4, "--json", "--iter-start", 12)[1])
    assert found["after"]["all"].keys() == {"mean", "std", "imbalance", "total"}
    assert found["before"]["all"]["mean"] == pytest.approx(found["after"]["all"]["mean"])


@pytest.mark.parametrize("policy", ["search", "deepseek", "tensorrt"])
def test_policies_and_windows_of_plan(run, statistics, tmp_path, policy):
    from dspark_jax.eplb import read_statistics

    path = tmp_path / "map.yaml"
    arguments = ("--ep", 4, "--num-slots", 8, "--policy", policy, "--iter-start", 11, "--iter-stop", 13)
    assert run("plan", statistics, "--output", path, *arguments)[0] == 0
    load = read_statistics(statistics).window(11, 13).load()
    rows = load_config(path).initial_global_assignments
    assert list((rows or {}).values()) == [tuple(row) for row in assign(load, 8, 4, policy=policy).tolist()]


def test_check_prints_every_fault(run, model, tmp_path):
    path = tmp_path / "map.yaml"
    rows = {layer: [0, 1, 2, 3, 0, 1] for layer in range(4)}
    save_config(LoadBalancerConfig(6, rows | {1: [0, 1, 2]}, layer_updates_per_iter=1), path)
    drafter = tmp_path / "drafter"
    drafter.mkdir()
    other = to_hf(TARGET, DRAFT) | {"num_hidden_layers": 4, "compress_ratios": [0, 8, 4, 4, 0, 0]}
    (drafter / "config.json").write_text(json.dumps(other))
    code, out, err = run("check", path, "--model", model, "--ep", 2, "--draft-model", drafter)
    assert code == 2 and out == "" and err.startswith(f"dspark-jax: error: {path}: 5 faults\n")
    for part in (
        "layer_updates_per_iter is 1; static EPLB only",
        "num_hidden_layers is 4 in the draft's config and 3 in the target's",
        "draft stage layers [4] are missing",
        "layer 1: the list has 3 entries; expected num_slots = 6",
        "layer 1: experts [3] have no slot",
    ):
        assert part in err
    assert run("check", path, "--model", model, "--ep", 1)[0] == 0  # inactive


def test_check_warns_of_what_has_no_effect(run, model, tmp_path):
    path = tmp_path / "map.yaml"
    save_config(LoadBalancerConfig(4, dict.fromkeys(range(6), range(4))), path)
    code, out, err = run("check", path, "--model", model, "--ep", 2)
    assert code == 0 and "fits" in out and "layers [5], which are ignored" in err
    code, out, err = run("check", path, "--model", model, "--ep", 1)
    assert code == 0 and out == "" and "ignored, because experts are balanced over ranks" in err


def test_plan_without_draft_statistics_is_refused_for_a_model_with_a_drafter(run, model, tmp_path):
    recorder = StatisticsRecorder(EXPERTS, 2, 0, 1)
    recorder.add(0, np.ones((3, EXPERTS), np.int32))
    recorder.write(tmp_path / "statistics")
    output = tmp_path / "map.yaml"
    code, out, err = run("plan", tmp_path / "statistics", "--ep", 2, "--output", output, "--model", model)
    assert code == 2 and out == "" and "draft stage layers [3, 4] are missing" in err and not output.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["report", "{tmp}/absent"], "no such folder"),
        (["report", "{statistics}", "--ep", "0"], "--ep is 0; expected at least 1"),
        (["report", "{statistics}", "--iter-start", "90"], "no iteration from 90 on was recorded"),
        (["report", "{statistics}", "--plot", "{tmp}/x.txt"], "the ending is '.txt'"),
        (["report", "{statistics}", "--config", "{tmp}/absent.yaml"], "cannot be read"),
        (["plan", "{statistics}", "--output", "{tmp}/x", "--policy", "magic"], "policy is 'magic'"),
        (["plan", "{statistics}", "--output", "{tmp}/x", "--ep", "3"], "one slot for each of the 4 experts makes no multiple"),
        (["plan", "{statistics}", "--output", "{tmp}/x", "--ep", "4", "--num-slots", "6"], "use 4 or 8"),
        (["plan", "{statistics}", "--output", "{tmp}/absent/x"], "cannot be written"),
        (["plan", "{statistics}", "--output", "{tmp}/x", "--model", "nano"], "count 4 experts a layer, the model has 16"),
        (["plan", "{statistics}"], "Missing option '--output'"),
        (["check", "{tmp}/absent.yaml", "--model", "{model}", "--ep", "2"], "absent.yaml: cannot be read"),
        (["check", "{tmp}/absent.yaml", "--model", "{model}", "--ep", "-1"], "--ep is -1; expected at least 1"),
        (["check", "{tmp}/x", "--model", "{tmp}/none", "--ep", "2"], "none' not found; expected the name of a shipped"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(run, statistics, model, tmp_path, arguments, message):
    filled = [a.format(tmp=tmp_path, statistics=statistics, model=model) for a in arguments]
    code, out, err = run(*filled)
    assert code == 2 and out == "" and message in err and "Traceback" not in err


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": text, "kind": kind} for text, kind in (("abc", "x"), ("defg", "x"), ("h", "y"))]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def shared_engine(monkeypatch):
    """The commands get the engine of the other tests in place of one that they would compile."""
    engine = base_engine(1, 2)
    seen = {}

    def make(model, **options):
        seen.update(options, model=model)
        c = engine.config
        engine.expert_counter = ExpertCounter(
            engine.ring.spec.expert_layers, 2, c.n_routed_experts, c.num_experts_per_tok, options["count_experts"]
        )
        return engine

    monkeypatch.setattr("dspark_jax.serve.engine.Engine", make)
    # The option takes all devices of a process, and this one has more.
    monkeypatch.setattr("dspark_jax.cli_eplb_run.chosen_mesh", lambda *_: (load_mesh("1x2"), make_mesh(1, 2)))
    yield seen
    while engine.busy:  # a command ends with its window, and others get the engine idle
        engine.step()
    engine.set_placement(None)


@pytest.mark.long
def test_collect_writes_what_plan_reads(run, shared_engine, prompts, tmp_path):
    folder = tmp_path / "new"
    command = ["collect", "--prompts", prompts, "--out", folder, "--mesh", "1x2", "--max-tokens", 9]
    code, out, err = run(*command, "--kind", "x", "--iterations", "1-4")
    assert code == 0 and err == "" and "iterations 1 … 3 of 4, 4 layers, 2 expert ranks" in out
    assert shared_engine["model"] == "nano" and shared_engine["count_experts"] == (1, 4)
    assert dict(shared_engine["mesh"].shape) == {"pipe": 1, "expert": 2}
    assert read_statistics(folder).iterations == [1, 2, 3]
    for key in base_engine(1, 2).ring.spec.expert_layers[0]:
        assert read_statistics(folder).by_iteration(key).shape == (3, 8)
    assert run("plan", folder, "--output", tmp_path / "map.yaml", "--num-slots", 10)[0] == 0
    assert len(load_config(tmp_path / "map.yaml").initial_global_assignments or ()) == 4


@pytest.mark.parametrize("window", ["4-4", "4", "a-b", "-1-3"])
def test_collect_refuses_a_window_that_is_none(run, prompts, tmp_path, window):
    code, out, err = run("collect", "--prompts", prompts, "--out", tmp_path / "new", "--iterations", window)
    assert code == 2 and out == "" and 'expected "START-STOP" with START < STOP' in err


@pytest.mark.long
def test_apply_compares_tokens_and_loads(run, shared_engine, prompts, model, tmp_path):
    path = tmp_path / "map.yaml"
    (model / "config.json").write_text(json.dumps(to_hf(placed_model.CONFIG, placed_model.DRAFT)))
    rows = placed_model.rotated(2).slot_to_expert
    save_config(LoadBalancerConfig(16, dict(enumerate(rows.tolist()))), path)
    command = ["apply", path, "--prompts", prompts, "--mesh", "1x2", "--max-tokens", 9, "--model", model]
    code, out, err = run(*command)
    assert code == 0 and err == "" and "3 of 3 answers have the same tokens" in out
    assert [line.split()[0] for line in out.splitlines()[2:9]] == ["0", "1", "2", "3", "target", "draft", "all"]
    base_engine(1, 2).set_placement(None)
    found = json.loads(run(*command, "--json")[1])
    assert (found["answers"], found["same_tokens"], found["expert_ranks"]) == (3, 3, 2)
    assert found["before"]["all"]["mean"] == found["after"]["all"]["mean"] > 0


def test_generate_with_a_placement_needs_a_mesh(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["dspark-jax", "generate", "--prompt", "a", "--placement", "map.yaml"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2 and "add --mesh, such as --mesh 1x2" in capsys.readouterr().err


def test_apply_refuses_what_does_not_fit_before_anything_runs(run, prompts, model, tmp_path, monkeypatch):
    monkeypatch.setattr("dspark_jax.serve.engine.Engine", None)
    path = tmp_path / "map.yaml"
    save_config(LoadBalancerConfig(6, {}), path)
    code, out, err = run("apply", path, "--prompts", prompts, "--mesh", "2x4", "--model", model)
    assert code == 2 and out == "" and "draft stage layers [3, 4] are missing" in err
    code, out, err = run("apply", path, "--prompts", prompts, "--mesh", "8x1", "--model", model)
    assert code == 2 and out == "" and "one expert rank, where no placement has an effect" in err


def test_the_shipped_model_is_checked_without_jax(tmp_path):
    path = tmp_path / "map.yaml"
    save_config(LoadBalancerConfig(18), path)
    code = (
        "import sys, dspark_jax.cli as c\n"
        "sys.argv = ['dspark-jax', 'eplb', 'check', *sys.argv[1:], '--model', 'nano', '--ep', '2']\n"
        "try: c.main()\n"
        "finally: assert 'jax' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "fits 6 layers and 3 draft stages on 2 expert ranks" in done.stdout, done.stderr
    save_config(LoadBalancerConfig(18, {}), path)
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "draft stage layers [6, 7, 8] are missing" in done.stderr
