"""`inspect_model` and `dspark-jax inspect`: published sizes, bytes as they are really allocated, and what is refused."""

import json
import sys
from dataclasses import replace

import jax
import pytest

from dspark_jax import cli
from dspark_jax.api import model_folder
from dspark_jax.config import to_hf
from dspark_jax.errors import CheckpointError, ConfigError
from dspark_jax.inspect_model import inspect_model
from dspark_jax.parallel.mesh import make_mesh
from dspark_jax.parallel.mesh_config import MeshConfig
from dspark_jax.presets import v4_flash
from dspark_jax.serve.engine import Engine
from helpers.checkpoints import DRAFT, TARGET
from helpers.quantised import write_quantised

EVEN = replace(TARGET, moe_intermediate_size=6)  # fp4 codes come in pairs


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """Runs `dspark-jax inspect …` in this process: exit code, stdout, stderr."""

    def go(*arguments):
        monkeypatch.setattr(sys, "argv", ["dspark-jax", "inspect", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        printed = capsys.readouterr()
        return stop.value.code or 0, printed.out, printed.err

    return go


def on_device(tree, device) -> int:
    """Bytes of all shards that a device holds."""
    shards = [s for x in jax.tree.leaves(tree) for s in x.addressable_shards if s.device == device]
    return sum(s.data.nbytes for s in shards)


def check_allocated(found, engine: Engine) -> None:
    state, memory = engine.ring.init_state(), found.plan.memory
    assert engine.plan.memory == memory and engine.plan.ranges == found.plan.ranges
    for device in engine.mesh.devices.flat:
        assert on_device(engine._params, device) == memory.parameters
        assert on_device(state.caches, device) == memory.cache * memory.slots
        assert on_device((state.requests, state.generation), device) == memory.request * memory.slots
        assert on_device(state.item, device) == memory.item
    assert found.needed == memory.total + found.widened and engine.slots == found.slots


def test_nano_takes_what_is_allocated():
    found = inspect_model("nano", dtype="float32", slots=2, context=256)
    check_allocated(found, Engine("nano", slots=2, max_len=256))
    file = model_folder("nano") / "model.safetensors"
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    assert found.stored is not None and sum(found.stored.values()) == file.stat().st_size - header


@pytest.mark.parametrize(("weights", "kind"), [("dequantised", "dense"), ("quantised", "fp4")])
def test_a_mesh_takes_what_is_allocated(weights, kind, tmp_path):
    tensors = write_quantised(tmp_path, EVEN, DRAFT)
    eplb = {"num_slots": 6}
    found = inspect_model(tmp_path, "2x2", eplb=eplb, weights=weights, dtype="float32", slots=8, context=32)
    engine = Engine(tmp_path, mesh=make_mesh(2, 2), slots=8, max_len=32, weights=weights, placement=eplb)
    check_allocated(found, engine)
    assert found.expert_weights == engine.config.expert_weights == kind and found.num_slots == 6
    expert = 3 * EVEN.hidden_size * EVEN.moe_intermediate_size * 4
    assert found.widened == (0 if kind == "dense" else 3 * expert)  # slots of one of two expert ranks
    packed = {k for k, t in tensors.items() if t.dtype.name == "int8"}
    numbers = {
        name: sum(
            t.size * (2 if k in packed else 1)
            for k, t in tensors.items()
            if k.startswith("mtp.") == (name == "draft") and not k.endswith((".scale", "tid2eid"))
        )
        for name in ("target", "draft")
    }
    assert (found.target_parameters, found.draft_parameters) == (numbers["target"], numbers["draft"])


@pytest.mark.parametrize(
    ("preset", "target", "active"),
    [("v4-flash", 284e9, 13e9), ("v4-pro", 1.6e12, 49e9)],  # as published
)
def test_presets_have_the_published_sizes(preset, target, active):
    found = inspect_model(preset, "2x4")
    assert found.target_parameters == pytest.approx(target, rel=0.02)
    assert found.target_active == pytest.approx(active, rel=0.025)
    assert found.stored is None and 0 < found.draft_active < found.draft_parameters < 0.08 * target


def test_room_is_what_still_fits():
    at = {"mesh": MeshConfig(2, 4, "24,19"), "context": 4096}  # another load may be cut in another way
    found = inspect_model("v4-flash", memory=86, **at)
    assert found.fits and found.slots == 64 and found.most_slots % 8 == 0
    full, over = (inspect_model("v4-flash", memory=86, slots=found.most_slots + n, **at) for n in (0, 8))
    assert full.fits and not over.fits and full.most_slots == over.most_slots == found.most_slots


def test_text_and_json(run, tmp_path):
    code, out, err = run("v4-flash", "--mesh", "2x4", "--memory", "75")
    assert code == 0 and err == ""
    for words in ("284.3B parameters, 13.3B of them active", "drafter  19.8B", "layers 23-42 and 3 draft stages", "not fit"):
        assert words in out
    assert out.rstrip().endswith("What helps: more devices, --weights quantised.")
    fits = run("v4-flash", "--mesh", "2x4", "--memory", "75", "--weights", "quantised-all")[1]
    assert "experts kept as fp4 codes, linear maps as fp8" in fits and "It fits: memory for" in fits
    (tmp_path / "config.json").write_text(json.dumps(to_hf(TARGET, None)))
    options = ("--slots", 4, "--context", 16, "--dtype", "float32", "--memory", 1)
    code, out, err = run(tmp_path, "--mesh", "2x2", *options, "--json")
    expected = inspect_model(tmp_path, "2x2", slots=4, context=16, dtype="float32", memory=1).as_dict()
    assert code == 0 and err == "" and json.loads(out) == json.loads(json.dumps(expected))
    assert expected["stored"] is None and expected["draft_parameters"] == 0 and expected["fits"]
    assert "drafter  none" in run(tmp_path, *options)[1]


def test_a_mesh_file_names_the_stages(tmp_path):
    (tmp_path / "mesh.yaml").write_text("pipe: 2\nexpert: 4\nstages: 0-20,21-42\n")
    assert inspect_model("v4-flash", tmp_path / "mesh.yaml").plan.ranges == ((0, 21), (21, 43))


def test_impossible_values_come_together():
    with pytest.raises(ConfigError) as error:
        inspect_model("nano", weights="int4", dtype="int8", memory=-1)
    for words in ("3 faults", "weights is 'int4'", "dtype is 'int8'", "memory is -1"):
        assert words in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("v5",), "or a preset without weights (v4-flash, v4-pro)"),
        (("v4-flash", "--mesh", "2x7"), "expert is 7; expected a divisor of the model's 256 routed experts"),
        (("v4-flash", "--mesh", "2x2", "--slots", "6"), "slots is 6; expected a positive multiple of pipe × expert = 4"),
        (("v4-flash", "--mesh", "1x2", "--eplb", "absent.yaml"), "absent.yaml: cannot be read"),
        (("nano", "--weights", "quantised"), "has dtype BF16: use 'dequantised'"),
        (("nano", "--context", "5000"), "context is 5000; expected 2 … 1024"),
    ],
)
def test_what_is_refused(run, arguments, said):
    code, out, err = run(*arguments)
    assert code == 2 and out == "" and said in err and "Traceback" not in err


def test_headers_are_checked_and_config_alone_has_no_codes(tmp_path):
    write_quantised(tmp_path / "broken", EVEN, DRAFT)
    next((tmp_path / "broken").glob("model-00002*")).unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors is missing"):
        inspect_model(tmp_path / "broken")
    (tmp_path / "config.json").write_text(json.dumps(to_hf(v4_flash()[0], None)))
    with pytest.raises(ConfigError, match="holds no weights that could say how they are quantised"):
        inspect_model(tmp_path, weights="quantised")
