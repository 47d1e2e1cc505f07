"""`dspark-jax eplb`: plan, report and check on real files; every fault and exit code 2."""

import json
import subprocess
import sys
import warnings

import numpy as np
import pytest
import yaml

from dspark_jax import cli
from dspark_jax.config import to_hf
from dspark_jax.eplb import LoadBalancerConfig, StatisticsRecorder, assign, load_config, save_config
from helpers.checkpoints import DRAFT, TARGET

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
        (["report", "{statistics}", "--iter-start", "90"], "no recorded iteration lies in [90, )"),
        (["report", "{statistics}", "--plot", "{tmp}/x.txt"], "the ending is '.txt'"),
        (["report", "{statistics}", "--config", "{tmp}/absent.yaml"], "cannot be read"),
        (["plan", "{statistics}", "--output", "{tmp}/x", "--policy", "magic"], "policy is 'magic'"),
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
    assert done.returncode == 0 and "fits 6 layers and 2 draft stages on 2 expert ranks" in done.stdout, done.stderr
    save_config(LoadBalancerConfig(18, {}), path)
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "draft stage layers [6, 7] are missing" in done.stderr
