"""Wrong uses, as a newcomer makes them: one message and exit code 2 on the command line, a precise exception in Python."""

import gc
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import jax
import pytest

from dspark_jax import Engine, SamplingParams, api, cli, load
from dspark_jax.cli_guard import guarded
from dspark_jax.config import DraftConfig, TargetConfig
from dspark_jax.eplb.config import load_config
from dspark_jax.errors import CheckpointError, ConfigError, DeviceMemoryError, DSparkError, RequestError
from dspark_jax.evaluate import evaluate
from dspark_jax.parallel.mesh import make_mesh
from dspark_jax.parallel.mesh_config import MeshConfig, load_mesh
from dspark_jax.testing import LookupDrafter, LookupTarget
from dspark_jax.trace import trace_rounds
from helpers.lookup_lm import agreeing, alphabet, lookup_config, lookup_lm

FILES = {
    "prompts.jsonl": '{"prompt": "a"}\n',
    "bad.jsonl": '{"prompt": "a"}\n{"promt": "b"}\nnope\n',
    "key.yaml": "pipes: 2\nexpert: 1\n",
    "cut.yaml": "pipe: [\n",
    "types.yaml": "pipe: two\nexpert: 0\n",
    "stages.yaml": "pipe: 8\nexpert: 1\nstages: 1,2\n",
    "few.yaml": "num_slots: 3\n",
    "ids.yaml": "num_slots: 16\ninitial_global_assignments:\n  0: [99]\n",
    "online.yaml": "num_slots: 16\nlayer_updates_per_iter: 2\n",
    "twice.yaml": "num_slots: 16\nnum_slots: 32\n",
    "slot.yaml": "num_slot: 16\n",
    "empty.json": "{}",
    "cut.json": "[1, 2",
    "broken/config.json": "{",
    "v41/config.json": '{"model_type": "deepseek_v41"}',
    "bare/config.json": '{"model_type": "deepseek_v4"}',
    "statistics/readme": "",
    "long.txt": "word = 1\n" * 1000,
    "number.jsonl": '{"prompt": 3}\n["a"]\n',
    "text.yaml": "2x4\n",
    "bool.yaml": "pipe: true\nexpert: 8\n",
    "stage.yaml": "pipe: 2\nexpert: 4\nstages: [1, x]\n",
    "layer.yaml": "num_slots: 16\ninitial_global_assignments:\n  zero: [1]\n",
    "lots.yaml": "num_slots: lots\n",
    "hot.json": '{"temperatures": "hot"}',
}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The working folder, with the files above."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


# -- the command line (8 devices are emulated) -----------------------------------------------------------------------------

A, B, MESH = "generate --prompt a", "bench serve --prompts prompts.jsonl", "--mesh 1x8 --placement"
COMMANDS = {
    # wrong names
    "generat --prompt a": "No such command 'generat'. Did you mean 'generate'?",
    "bench nothing": "No such command 'nothing'",
    f"{A} --max-token 3": "No such option: --max-token (Possible options: --draft-tokens, --max-tokens",
    f"{A} --model nanno": "model 'nanno' not found; expected the name of a shipped model (nano)",
    f"{A} --model v4-flash": "model 'v4-flash' is a preset without weights",
    f"{A} --scheduler fastest": "scheduler is 'fastest'; expected fixed:LENGTH",
    f"{A} --verify sometimes": "verify is 'sometimes'; expected 'rejection'",
    f"{A} --weights int4": "'int4' is not one of 'dequantised', 'quantised', 'quantised-all'",
    f"{A} --mesh key.yaml": "key.yaml: unknown key 'pipes'; expected pipe, expert, stages; did you mean 'pipe'?",
    f"{A} {MESH} slot.yaml": "unknown key 'num_slot'; expected num_slots",
    "plan-stages --model v5 --mesh 2x4": "a preset without weights (v4-flash, v4-pro)",
    "inspect v4-flsh": "a preset without weights (v4-flash, v4-pro)",
    "inspect v4-flash --dtype int8": "dtype is 'int8'; expected float32, bfloat16, float16",
    # wrong types and values
    f"{A} --max-tokens many": "Invalid value for '--max-tokens'",
    f"{A} --max-tokens 0": "max_tokens = 0; expected an integer >= 1",
    f"{A} --temperature=-1": "temperature = -1.0; expected a finite number >= 0",
    f"{A} --temperature nan": "temperature = nan; expected a finite number >= 0",
    f"{A} --top-p 7": "top_p = 7.0; expected a number in (0, 1]",
    f"{A} --seed=-1": "seed = -1; expected an integer in [0, 2**32)",
    f"{A} --scheduler fixed:9": "the fixed length is 9; expected 0 … 5, the drafts of a block",
    "profile --slots 4 --buckets 100": "buckets has 100; expected at most 24, the rows of 4 whole blocks",
    "generate --prompt-file long.txt": "(max_len is 1024, one position is for the answer): shorten it\n",
    f"{A} --scheduler fixed:x": "scheduler is 'fixed:x'; expected fixed:LENGTH",
    f"{A} --mesh types.yaml": "types.yaml: 2 faults",
    "inspect v4-flash --memory nan": "memory is nan; expected GiB of a device",
    f"{B} --rate 0": "rate = 0.0; expected a finite number of requests a second > 0",
    "profile --buckets 8,x": "--buckets is '8,x'; expected positive numbers of rows",
    "eplb collect --prompts prompts.jsonl --out o --iterations 5-2": "--iterations is '5-2'; expected \"START-STOP\"",
    f"{A} --max-tokens 100000000000": "max_tokens = 100000000000; expected an integer >= 1 and below 2**31",
    f"{A} --mesh text.yaml": "text.yaml: holds '2x4'; expected the keys pipe, expert",
    f"{A} --mesh bool.yaml": "bool.yaml: pipe is True; expected an integer of at least 1",
    f"{A} --mesh stage.yaml": "stage.yaml: stages is [1, 'x']; expected layer ranges such as 0-20,21-42",
    f"{A} {MESH} layer.yaml": "initial_global_assignments['zero']: the key is no layer index",
    f"{A} {MESH} lots.yaml": "num_slots is 'lots'; expected an integer",
    f"{A} --scheduler threshold:2": "threshold is 2.0; expected a number <= 1",
    f"{A} --scheduler threshold:0.5 --temperatures hot.json": "temperatures is 'hot'; expected a list of finite numbers",
    f"{B} --rate nan": "rate = nan; expected a finite number of requests a second > 0",
    "bench mesh --parts smok": "--parts has 'smok'; expected some of smoke, equality",
    # what is missing, and what does not go together
    "generate": "expected exactly one of --prompt and --prompt-file, got neither",
    "evaluate": "Missing option '--prompts'",
    f"{A} --compare --no-draft": "it cannot go with --no-draft; remove one",
    f"{A} --logprobs 3": "--logprobs has nowhere to appear in the text; add --json",
    f"{A} --scheduler stale-size": "give a file of them",
    f"{A} --placement few.yaml": "add --mesh, such as --mesh 1x2",
    f"{A} --draft-tokens 3": "draft_tokens is 3, without a drafter whose drafts it could count; leave it out",
    f"{A} --drafter statistics": "drafters with files of their own are for dense targets",
    f"{A} --chat": "--chat needs a model with a chat template, and there is none; leave it out",
    "launch --processes 2 -- launch --processes 2 -- generate": "expected one that runs a model, such as generate",
    # missing and damaged files
    "evaluate --prompts number.jsonl": "line 1: the prompt is 3 (int); expected a text that is not empty",
    "calibrate --prompts prompts.jsonl --out statistics": "--out 'statistics' is a folder; expected the path of a file",
    "profile --out statistics": "--out 'statistics' is a folder; expected the path of a file",
    "eplb collect --prompts prompts.jsonl --out prompts.jsonl/x": "prompts.jsonl' is a file; expected a folder",
    "generate --prompt-file absent.txt": "--prompt-file 'absent.txt' cannot be read: No such file",
    f"{A} --model broken": "broken/config.json: not valid JSON",
    f"{A} --model v41": "'deepseek_v41' (V4.1 is another architecture",
    f"{A} --model bare": "bare/config.json: lacks vocab_size, hidden_size",
    f"{A} --mesh absent.yaml": "absent.yaml: cannot be read (No such file or directory)",
    f"{A} --mesh cut.yaml": "cut.yaml: not valid YAML",
    f"{A} {MESH} absent.yaml": "absent.yaml: cannot be read",
    f"{A} {MESH} twice.yaml": "the key 'num_slots' is there twice, the second time in line 2",
    f"{A} --scheduler stale-size --profile empty.json": "expected an object with the keys of one form",
    f"{A} --scheduler threshold:0.5 --temperatures cut.json": "cut.json: is not JSON",
    "evaluate --prompts bad.jsonl": 'line 2 has no "prompt"',
    "calibrate --prompts prompts.jsonl --out no/where.json": "there is no folder 'no'; make it, or choose another path",
    f"{B} --plot lines.xyz": "ends in '.xyz'; expected one of",
    "eplb plan statistics --output plan.yaml": "meta_info.json: cannot be read",
    # impossible meshes and placements
    f"{A} --mesh 2by4": "mesh '2by4': expected pipe ranks x expert ranks, as in 2x4",
    f"{A} --mesh 3x1": "mesh 3x1 takes 3 of 8 devices",
    f"{A} --mesh 16x1": "mesh 16x1 needs 16 devices, but there are 8",
    f"{A} --mesh 0x1": "pipe is 0; expected an integer of at least 1",
    f"{A} --mesh stages.yaml": "the layer counts [1, 2] sum to 3; the model has 6 layers",
    f"{A} --mesh 8x1": "8 pipe ranks for 6 layers; expected at most one rank a layer",
    f"{A} --mesh 8x1 --emulate-devices 4": "--emulate-devices is 4, and mesh 8x1 takes 8",
    f"{A} {MESH} few.yaml": "num_slots is 3; expected a multiple of the 8 expert ranks",
    f"{A} {MESH} ids.yaml": "the list holds expert ids [99]; expected ids in [0, 16)",
    f"{A} {MESH} online.yaml": "layer_updates_per_iter is 2; static EPLB only",
    f"{B} --mesh 2x4 --slots 3": "slots is 3; expected a positive multiple of pipe × expert = 8",
    "evaluate --prompts prompts.jsonl --mesh 8x1": "8 pipe ranks for 6 layers; expected at most one rank a layer",
    "quantise nano --out q --prompts prompts.jsonl --mesh 8x1": "has pipe = 8; use 1x8: the tokens are the same on every mesh",
    "plan-stages --model v4-flash --mesh 2x4 --stages 0-3,5-9": "layers 10-42 behind the last rank are on no rank",
    "launch --processes 3 --mesh 2x1 -- generate": "mesh 2x1 has 2 devices; expected a multiple of --processes 3",
}


def run(arguments: list[str], monkeypatch, capsys) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["dspark-jax", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    out, err = capsys.readouterr()
    return stop.value.code or 0, out, err  # type: ignore[return-value]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_line_says_what_is_wrong(command, folder, monkeypatch, capsys):
    code, out, err = run(command.split(), monkeypatch, capsys)
    assert code == 2 and out == "" and COMMANDS[command] in err
    assert "Traceback" not in err and len(re.findall(r"(?m)^(dspark-jax: error|Error): ", err)) == 1


def exhausted(*_, **__):
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 123456789 bytes.")


def test_too_little_memory(folder, monkeypatch, capsys):
    monkeypatch.setattr(jax, "device_put", exhausted)
    code, out, err = run(f"{A}".split(), monkeypatch, capsys)
    assert code == 2 and out == "" and "Traceback" not in err
    assert err.startswith("dspark-jax: error: out of memory placing the weights (RESOURCE_EXHAUSTED: ") and "fewer slots" in err
    for make in (load, Engine):
        with pytest.raises(DeviceMemoryError, match=r"out of memory placing the weights .*123456789 bytes"):
            make("nano")
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(api, "load", exhausted)  # anywhere else
    code, _, err = run(f"{A}".split(), monkeypatch, capsys)
    assert code == 2 and err.startswith("dspark-jax: error: out of memory (RESOURCE_EXHAUSTED: ")


def test_paths_that_cannot_be_used(folder, capsys):
    for path, said in (("prompts.jsonl/x", "Not a directory"), ("statistics", "Is a directory")):
        with pytest.raises(SystemExit) as stop:
            guarded(Path(path).read_text)()
        assert stop.value.code == 2
        assert capsys.readouterr().err == f"dspark-jax: error: {path!r}: {said}; check the path and its permissions\n"
    with pytest.raises(OSError, match="no path"):  # a fault of the program keeps its traceback
        guarded(raising(OSError("no path")))()
    with pytest.raises(RuntimeError, match="not memory"):
        guarded(raising(RuntimeError("not memory")))()


def raising(error: Exception):
    def command():
        raise error

    return command


@pytest.fixture
def interruptible():
    """Processes that a test starts take SIGINT also where the tests themselves ignore it, as behind `make test &`."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_in_the_middle(folder, interruptible):
    os.mkfifo(folder / "slow.txt")  # the command waits for this file's content
    command = [sys.executable, "-m", "dspark_jax.cli", "generate", "--prompt-file", "slow.txt"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    limit = time.monotonic() + 60
    writer = None
    while writer is None and time.monotonic() < limit:
        try:
            writer = os.open(folder / "slow.txt", os.O_WRONLY | os.O_NONBLOCK)  # fails until somebody reads
        except OSError:
            time.sleep(0.02)
    assert writer is not None
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    os.close(writer)
    assert (process.returncode, out, err) == (130, "", "dspark-jax: interrupted\n")


def test_ctrl_c_while_modules_are_imported(tmp_path, interruptible):
    (tmp_path / "typer.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    process = subprocess.Popen(
        [sys.executable, "-m", "dspark_jax"], env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (-signal.SIGINT, "", "")  # of which a shell makes 130
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"dspark-jax": "dspark_jax.__main__:main"}


# -- Python ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lm():
    return lookup_lm(alphabet(), agreeing(alphabet()), max_position_embeddings=512)


DATA_MODEL = jax.make_mesh((1, 1), ("data", "model"), (jax.sharding.AxisType.Auto,) * 2)
WRONG_MODELS = {
    "load a number": (lambda: load(3), CheckpointError, "model is 3; expected the name of a shipped model"),
    "load a wrong name": (lambda: load("nanno"), CheckpointError, "did you mean 'nano'?"),
    "engine of a wrong name": (lambda: Engine("nanno"), CheckpointError, "did you mean 'nano'?"),
    "integer weights": (lambda: load("nano", dtype="int8"), ConfigError, "dtype is int8; expected float32"),
    "no dtype at all": (lambda: load("nano", dtype="float99"), ConfigError, "dtype is 'float99'; expected float32"),
    "weights": (lambda: load("nano", weights="int4"), ConfigError, "weights is 'int4'; expected 'dequantised'"),
    "weights that are not quantised": (lambda: load("nano", weights="quantised"), CheckpointError, "use 'dequantised'"),
    "short": (lambda: load("nano", max_len=1), ConfigError, "max_len is 1; expected 2 … 1024"),
    "a length as text": (lambda: load("nano", max_len="long"), ConfigError, "max_len is 'long'; expected 2 … 1024"),
    "a length as text, engine": (lambda: Engine("nano", max_len="x"), ConfigError, "max_len is 'x'; expected a number"),
    "mesh as text": (lambda: load("nano", mesh="2x1"), ConfigError, "mesh is '2x1'; expected what make_mesh"),
    "mesh as text, engine": (lambda: Engine("nano", mesh="2x1"), ConfigError, "mesh is '2x1'; expected what make_mesh"),
    "axes of other names": (lambda: load("nano", mesh=DATA_MODEL), ConfigError, "; expected what make_mesh(2, 4) gives"),
    "axes of other names, engine": (lambda: Engine("nano", mesh=DATA_MODEL), ConfigError, "; expected what make_mesh(2, 4)"),
    "two stages": (lambda: load("nano", mesh=make_mesh(2, 1)), ConfigError, "pipe is 2; this version generates on one"),
    "five expert ranks": (lambda: load("nano", mesh=make_mesh(1, 5)), ConfigError, "expert is 5; expected a divisor of"),
    "no devices": (lambda: make_mesh(0, 1), ConfigError, "both axes must be at least 1"),
    "too many devices": (lambda: make_mesh(3, 3), ConfigError, "needs 9 devices, but there are 8"),
    "axes as text": (lambda: make_mesh("2x1"), ConfigError, "pipe is '2x1', expert is 1; expected two integers"),
    "mesh of a number": (lambda: load_mesh(3), ConfigError, "mesh is 3; expected pipe ranks x expert ranks"),
    "mesh of a wrong key": (lambda: load_mesh({"pip": 2}), ConfigError, "unknown key 'pip'"),
    "mesh of a wrong type": (lambda: MeshConfig("2"), ConfigError, "pipe is '2'; expected an integer"),
    "slots": (lambda: Engine("nano", mesh=make_mesh(2, 1), slots=3), ConfigError, "slots is 3; expected a positive multiple"),
    "slots as text": (lambda: Engine("nano", slots="many"), ConfigError, "slots is 'many'; expected a positive multiple"),
    "placement of a number": (lambda: load_config(3), ConfigError, "load balancer is 3; expected a YAML file's path"),
    "chunk": (lambda: Engine("nano", chunk=0), ConfigError, "chunk is 0; expected at least 1"),
    "rounds": (lambda: Engine("nano", rounds_per_call=0), ConfigError, "rounds is 0; expected at least 1"),
    "log-probabilities": (lambda: Engine("nano", max_logprobs=50), ConfigError, "logprobs is 50; expected None (off) or 0"),
    "stages": (lambda: Engine("nano", mesh=make_mesh(2, 1), stages="1,2"), ConfigError, "[1, 2] sum to 3; the model has 6"),
    "window": (lambda: Engine("nano", count_experts=(5, 2)), DSparkError, "the window of iterations is [5, 2)"),
    "chunk as text": (lambda: Engine("nano", chunk="x"), ConfigError, "chunk is 'x' (str); expected an integer"),
    "half a round": (lambda: Engine("nano", rounds_per_call=1.5), ConfigError, "rounds_per_call is 1.5 (float); expected an"),
    "log-probabilities as text": (lambda: Engine("nano", max_logprobs="x"), ConfigError, "max_logprobs is 'x' (str); expected"),
    "drafting as text": (lambda: Engine("nano", speculate="no"), ConfigError, "speculate is 'no' (str); expected True or"),
    "buckets as text": (lambda: Engine("nano", buckets="8"), ConfigError, "buckets is '8' (str); expected a list of numbers"),
    "a window of a number": (lambda: Engine("nano", count_experts=3), ConfigError, "count_experts is 3 (int); expected the"),
    "stages of numbers": (lambda: Engine("nano", stages=[1, 2]), ConfigError, 'stages is [1, 2] (list); expected "0-20,21-42"'),
    "drafter of a number": (lambda: Engine("nano", drafter=3), CheckpointError, "drafter is 3 (int); expected the name"),
    "profile of a number": (
        lambda: load("nano", scheduler="early-stop", profile=3), ConfigError, "profile is 3 (int); expected the path of a file"
    ),
    "temperatures in a list": (
        lambda: load("nano", scheduler="fixed:1", temperatures=[1, 2]), ConfigError, "temperatures is [1, 2] (list); expected"
    ),
    "too many drafts": (lambda: Engine("nano", scheduler="fixed:9"), ConfigError, "fixed length is 9; expected 0 … 5"),
    "scheduler": (lambda: load("nano", scheduler=3), ConfigError, "scheduler is 3; expected a Schedule, or one of"),
    "target": (lambda: TargetConfig(**{**vars(lookup_config()), "hidden_size": "8"}), ConfigError, "hidden_size is '8'"),
}  # fmt: skip
REQUESTS = {
    "a text for a list": ("text", None, "prompts is 'text' (str); expected a list of texts"),
    "nothing": ([], None, "prompts is empty; expected at least one prompt"),
    "a number": ([3], None, "the prompt is 3 (int); expected a text or a list of token ids"),
    "an id beyond": ([[9999]], None, "the prompt holds 9999; expected token ids in 0 … 15"),
    "no ids": ([[]], None, "the prompt is empty; expected at least one token id"),
    "too long": ([[1] * 600], None, "the prompt has 600 tokens; expected at most 511"),
    "two parameters": (["a"], [SamplingParams()] * 2, "params has 2 entries for 1 prompt;"),
    "a dict": (["a"], {"temperature": 0}, "params is {'temperature': 0} (dict); expected SamplingParams"),
    "hot": (["a"], SamplingParams(temperature="hot"), "temperature = 'hot'; expected a finite number"),
    "stops": (["a"], SamplingParams(stop_token_ids=("x",)), "stop_token_ids holds ['x']"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_MODELS)
def test_models_engines_and_meshes_raise_precisely(name):
    make, kind, said = WRONG_MODELS[name]
    gc.collect()  # arrays of earlier tests must not go in the middle of this one
    before = len(jax.live_arrays())
    with pytest.raises(kind) as error:
        make()
    assert type(error.value) is kind or kind is DSparkError
    assert said in str(error.value)
    del error
    assert len(jax.live_arrays()) == before


@pytest.mark.parametrize("name", REQUESTS)
def test_requests_raise_precisely(name, lm):
    prompts, params, said = REQUESTS[name]
    with pytest.raises(RequestError, match=re.escape(said)):
        lm.generate(prompts, params)


def test_what_examines_a_model_raises_precisely(lm):
    with pytest.raises(RequestError, match="speculate is 'no'; expected True, False, or None"):
        lm.generate(["a"], speculate="no")
    with pytest.raises(RequestError, match="rounds is 0; expected an integer >= 1"):
        trace_rounds(lm, "a", rounds=0)
    with pytest.raises(RequestError, match=r"prompts holds 'a' \(str\); expected EvalPrompt objects"):
        evaluate(lm, ["a"], SamplingParams())  # type: ignore[list-item]
    for sizes, said in (({"vocab": 0}, "vocab = 0"), ({"vocab": 4, "order": 3}, "order = 3; expected 1 or 2")):
        with pytest.raises(ValueError, match=said):
            LookupTarget.random(**sizes)
    with pytest.raises(ValueError, match="block_size = 0; expected an integer >= 1"):
        LookupDrafter.random(vocab=4, block_size=0)


def test_drafting_without_a_drafter_and_unknown_parameters():
    with pytest.raises(RequestError, match="this model has no drafter"):
        lookup_lm(alphabet(), None).generate(["a"], speculate=True)
    with pytest.raises(TypeError, match="min_p"):
        SamplingParams(min_p=0.1)  # type: ignore[call-arg]
    faults = DraftConfig(0, 0, (9,), 1).faults(lookup_config())
    assert len(faults) == 2 and "dspark_target_layer_ids is [9]" in faults[1]
