"""`dspark-jax plan-stages`: tables and JSON for presets, the shipped model and folders; every fault and exit code 2."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dspark_jax import cli
from dspark_jax.cli_mesh import size
from dspark_jax.config import to_hf
from dspark_jax.parallel.planner import given_stages, plan_stages
from dspark_jax.presets import PRESETS, model_configs, v4_flash
from helpers.checkpoints import DRAFT, TARGET
from helpers.standalone import TARGET as DENSE
from helpers.standalone import open_pair

MESHES = Path(__file__).resolve().parents[2] / "configs" / "meshes"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """Runs `dspark-jax plan-stages …` in this process: exit code, stdout, stderr."""

    def go(*arguments):
        monkeypatch.setattr(sys, "argv", ["dspark-jax", "plan-stages", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        printed = capsys.readouterr()
        return stop.value.code or 0, printed.out, printed.err

    return go


@pytest.fixture
def folder(tmp_path):
    """A model folder with nothing but config.json."""
    found = tmp_path / "model"
    found.mkdir()
    (found / "config.json").write_text(json.dumps(to_hf(TARGET, DRAFT)))
    return found


def test_table(run):
    code, out, err = run("--model", "v4-flash", "--mesh", "2x4")
    assert code == 0 and err == ""
    assert max(map(len, out.splitlines()[:5])) <= 80
    plan = plan_stages(*v4_flash(), 2, rows=192, context=8192, expert=4)
    rows = [line.split() for line in out.splitlines()[3:5]]
    for rank, ((first, end), row) in enumerate(zip(plan.ranges, rows, strict=True)):
        assert row[:2] == [str(rank), f"{first}-{end - 1}"]
        assert row[4:8] == [f"{1e3 * t:.3f}" for t in (*plan.costs[rank], plan.costs[rank].total)]
        assert row[8] == f"{plan.share[rank]:.1%}"
        assert " ".join(row[9:11]) == size(plan.memory.own[rank])
        assert " ".join(row[11:]) == size(plan.memory.padding[rank])
    assert rows[0][2:4] == ["2/11/10", "0"] and rows[1][2:4] == ["0/10/10", "3"]
    assert "192 rows a tick (32 requests in each of 2 microbatches), context 8192, bfloat16, 4 expert ranks" in out
    assert f"mean over slowest {plan.balance:.3f}" in out
    assert f"16 request slots of {size(plan.memory.cache + plan.memory.request)}" in out
    assert f"each hop: {size(plan.memory.item)} a device" in out


def test_json_of_given_stages(run, folder):
    found = run("--model", folder, "--mesh", "2x2", "--stages", "0-0,1-2", "--rows", 24, "--context", 32, "--json")
    assert found[0] == 0 and found[2] == ""
    plan = given_stages(TARGET, DRAFT, "1,2", rows=24, context=32, expert=2)
    expected = {"model": str(folder), "mesh": "2x2", "given": True, **plan.as_dict()}
    assert json.loads(found[1]) == json.loads(json.dumps(expected))
    assert [(r["first"], r["end"]) for r in expected["ranks"]] == [(0, 1), (1, 3)]


def test_expert_slots_take_memory(run, folder):
    one, more = (
        json.loads(run("--model", folder, "--mesh", "1x2", "--json", "--num-slots", n)[1])["memory"] for n in (4, 6)
    )
    layers = TARGET.num_hidden_layers + DRAFT.num_stages
    expert = 3 * TARGET.hidden_size * TARGET.moe_intermediate_size * 2  # bf16
    assert more["parameters"] - one["parameters"] == layers * expert  # a slot more on either rank


def test_mesh_files(run, folder, tmp_path):
    plain = json.loads(run("--model", folder, "--mesh", MESHES / "2x1.yaml", "--json")[1])
    assert plain["mesh"] == "2x1" and not plain["given"] and plain["context"] == 32 and plain["rows"] == 32
    mesh = tmp_path / "own.yaml"
    mesh.write_text("pipe: 2\nstages: [1, 2]\n")
    given = json.loads(run("--model", folder, "--mesh", mesh, "--json")[1])
    assert given["given"] and [r["end"] for r in given["ranks"]] == [1, 3]
    other = json.loads(run("--model", folder, "--mesh", mesh, "--json", "--stages", "2,1")[1])
    assert [r["end"] for r in other["ranks"]] == [2, 3]


def test_a_dense_model_with_a_drafter(run):
    folder, _, _ = open_pair("deepspec_tiny/vanilla")
    arguments = ("--model", DENSE, "--mesh", "2x1", "--context", "64", "--stages", "4,2")
    code, out, err = run(*arguments, "--drafter", folder, "--json")
    found = json.loads(out)
    assert code == 0 and err == "" and found["draft_stages"] == 2 and found["ranks"][1]["drafter"] > 0
    code, out, err = run(*arguments)
    assert code == 0 and " 4-5 " in out and " - " in out and err == ""
    for extra, message in (("--draft-tokens", "is for --drafter"), ("--num-slots", "a dense model has no experts")):
        code, out, err = run(*arguments, extra, "3")
        assert code == 2 and message in err
    code, out, err = run("--model", "v4-flash", "--mesh", "2x1", "--drafter", folder)
    assert code == 2 and "is for dense models; v4-flash's drafter is embedded" in err


def test_a_model_without_a_drafter(run, folder):
    (folder / "config.json").write_text(json.dumps(to_hf(TARGET, None)))
    code, out, _ = run("--model", folder, "--mesh", "3x1")
    assert (
        code == 0
        and "8 rows a tick (8 requests in each of 3 microbatches), context 32, bfloat16, 1 expert rank;" in out
    )
    assert [line.split()[3] for line in out.splitlines()[3:6]] == ["0"] * 3


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (["--mesh", "4x3"], ["4 pipe ranks for 3 layers", "expert is 3; expected a divisor"]),
        (["--mesh", "2x1", "--stages", "0-0,2-3"], ["layer 1 in front of rank 1", "rank 1 (2-3) is out of range"]),
        (["--mesh", "2x1", "--stages", "1,1,1"], ["3 stages given for 2 pipe ranks"]),
        (
            ["--mesh", "2x1", "--rows", "0", "--context", "33"],
            ["rows is 0; expected", "context is 33; expected 2 … 32"],
        ),
        (["--mesh", "2x1", "--dtype", "int4"], ["dtype is 'int4'; expected float32, bfloat16, float16"]),
        (["--mesh", "1x2", "--num-slots", "5"], ["num_slots is 5; expected at least 4, the routed experts, and a multiple"]),
        (["--mesh", "2z1"], ["mesh '2z1': expected pipe ranks x expert ranks"]),
        (["--mesh", "0x1"], ["pipe is 0; expected an integer of at least 1"]),
        (["--mesh", "{tmp}/absent.yaml"], ["absent.yaml: cannot be read"]),
        ([], ["Missing option '--mesh'"]),
        (["--mesh", "2x1", "--rows", "many"], ["Invalid value for '--rows'"]),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(run, folder, tmp_path, arguments, messages):
    code, out, err = run("--model", folder, *(a.format(tmp=tmp_path) for a in arguments))
    assert code == 2 and out == "" and "Traceback" not in err
    assert all(message in err for message in messages), err


def test_models_that_there_are_not(run, folder):
    code, out, err = run("--model", "v4-flsh", "--mesh", "1x1")
    assert code == 2 and out == "" and "a shipped model (nano)" in err and "(v4-flash, v4-pro)" in err
    (folder / "config.json").write_text(json.dumps(to_hf(TARGET, DRAFT) | {"dspark_target_layer_ids": [2, 3]}))
    code, out, err = run("--model", folder, "--mesh", "1x1")
    assert code == 2 and f"{folder}/config.json: dspark_target_layer_ids is [2, 3]" in err
    (folder / "config.json").unlink()
    code, out, err = run("--model", folder, "--mesh", "1x1")
    assert code == 2 and "no config.json" in err


def test_presets_are_the_published_configurations():
    for name, make in PRESETS.items():
        target, draft = make()
        assert draft.faults(target) == [] and model_configs(name) == (target, draft)
        last = target.num_hidden_layers - 1
        assert draft.target_layer_ids == (last - 2, last - 1, last)
        ratios = target.compress_ratios
        assert all(r == (4 if i % 2 == 0 else 128) for i, r in enumerate(ratios) if i >= 2)
    flash, pro = (PRESETS[name]()[0].compress_ratios for name in ("v4-flash", "v4-pro"))
    # Window only, compressed sparse, heavily compressed.
    assert [flash.count(r) for r in (0, 4, 128)] == [2, 21, 20]
    assert [pro.count(r) for r in (0, 4, 128)] == [0, 30, 31]


def test_configurations_of_a_folder_and_of_the_shipped_model(folder):
    assert model_configs(str(folder)) == (TARGET, DRAFT)
    target, draft = model_configs("nano")
    assert target.num_hidden_layers == 6 and draft is not None and draft.num_stages == 3


def test_jax_is_not_imported(folder):
    code = (
        "import sys, dspark_jax.cli as c\n"
        "sys.argv = ['dspark-jax', 'plan-stages', *sys.argv[1:]]\n"
        "try: c.main()\n"
        "finally: assert 'jax' not in sys.modules"
    )
    for model in (folder, "nano", "v4-pro"):
        command = [sys.executable, "-c", code, "--model", str(model), "--mesh", "2x2"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0 and "each hop" in done.stdout, done.stderr
        assert done.stderr == ""


def test_sizes_as_text():
    sizes = (0, 999, 1000, 999_949, 999_950, 12_345_678, 3_301_200_000_000, 10**16)
    shown = ["0 B", "999 B", "1.0 kB", "999.9 kB", "1.0 MB", "12.3 MB", "3.3 TB", "10000.0 TB"]
    assert [size(n) for n in sizes] == shown
