"""`bench round` on a dense model, whose floor is sums of its matrices, and the programs that are timed beside it."""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dspark_jax import ConfigError
from dspark_jax.bench import peers as peers_module
from dspark_jax.bench import round as bench
from dspark_jax.bench.dense_round import DENSE_SHAPES, dense_bytes, qwen3_4b
from dspark_jax.bench.peers import Peer, check_deepspec, measure_peers, peers_of
from dspark_jax.bench.round import Settings
from dspark_jax.bench.round_programs import make_programs
from dspark_jax.presets import v4_flash

ORACLE_PYTHON = Path(__file__).parents[2] / ".venv-oracles" / "bin" / "python"


def tiny() -> tuple:
    """Two layers of which the first is tapped, a layer that drafts 2 tokens."""
    target, draft = qwen3_4b()
    sizes = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"head_dim": 4, "max_position_embeddings": 256}
    target = replace(target, num_hidden_layers=2, **sizes)
    layers = replace(draft.layers, num_hidden_layers=1, **sizes)
    changes = {"block_size": 2, "mask_token_id": 10, "target_layer_ids": (0,), "markov_rank": 3}
    return target, replace(draft, layers=layers, draft_vocab_size=11, num_target_layers=2, **changes)


@pytest.fixture
def tiny_shape(monkeypatch):
    monkeypatch.setitem(DENSE_SHAPES, "qwen3-4b", tiny)


@pytest.mark.long
def test_a_dense_round_is_timed_and_says_what_plain_steps_say(tiny_shape, monkeypatch, tmp_path, capsys):
    kept = []
    monkeypatch.setattr(bench, "make_programs", lambda *a: kept.extend(make_programs(*a)) or kept)
    monkeypatch.setattr(peers_module, "SCRIPT", tmp_path / "peer.py")
    (tmp_path / "peer.py").write_text("import sys\nprint('{\"requests\": 2, \"us\": 1e9}')\nsys.exit('and then it broke')\n")
    out = tmp_path / "round.json"
    found, missing = bench.run(Settings("qwen3-4b", (2,), context=8, temperature=0.0, peers=("transformers",)), out)
    assert missing == 0 and json.loads(out.read_text()) == found
    cases = [f"qwen3-4b, float32, context 8, greedy, batch 2, {what}" for what in ("round", "plain step")]
    assert [r["case"] for r in found] == cases and [r["peers"] for r in found] == [{}, {"transformers": 1e9}]
    said = capsys.readouterr().err
    assert "batch 2, plain step: transformers: 1000000000 us" in said and "not measured: and then it broke" in said
    # Parameters of the target, then of the drafter, fp32.
    target = 11 * 8 + 2 * (2 * 8 * 16 + 2 * 8 * 8 + 3 * 8 * 12 + 2 * 8 + 2 * 4) + 8
    draft = 2 * 11 * 8 + 8 * 8 + (2 * 8 * 16 + 2 * 8 * 8 + 3 * 8 * 12 + 2 * 8 + 2 * 4) + 2 * 8 + 2 * 11 * 3 + (8 + 3) + 1
    assert [r["memory"]["weights"] for r in found] == [4 * (target + draft), 4 * target]
    assert all(r["time_us"] > 0 and r["floor_us"] is None for r in found) and found[1]["tokens_per_round"] == 1

    def text(timer) -> list[list[int]]:
        timer.begin([3, 7], 8, 0.0)
        tokens: list[list[int]] = [[], []]
        for output in timer.timed(12)[1]:
            token, count = np.asarray(output.token), np.asarray(output.count)
            for tick in range(len(token)):
                for i in range(2):
                    tokens[i] += token[tick, i, : count[tick, i]].tolist()
        return tokens

    drafting, plain = (text(program.timer) for program in kept)
    assert all(a[:12] == b and len(a) >= 12 for a, b in zip(drafting, plain, strict=True)) and drafting[0] != drafting[1]


def test_the_floor_of_qwen3_4b_is_the_sum_of_its_matrices():
    # The published model has 4,022,468,096 parameters; its head is the embedding.
    layer = 2 * 2560 * 4096 + 2 * 2560 * 1024 + 3 * 2560 * 9728 + 2 * 2560 + 2 * 128
    assert 36 * layer + 2560 + 151936 * 2560 == 4_022_468_096
    shape = qwen3_4b()
    assert dense_bytes(shape[0], None, "bfloat16", 1, 512) == {
        "weights": 2 * 4_022_468_096,
        "drafter": 0,
        "sequential head": 0,
        "context": 512 * 36 * 2 * 1024 * 2,
        "rows": 2560 * 2,
    }
    # Embedding and W1 are read by row, W2 seven times; the confidence's bias is fp32.
    drafter = 5 * layer + 5 * 2560 * 2560 + 2 * 2560 + 151936 * 2560 + 2560 + 256
    assert dense_bytes(*shape, "bfloat16", 3, 512) == {
        "weights": 2 * 4_022_468_096,
        "drafter": 2 * drafter + 4,
        "sequential head": 7 * 151936 * 256 * 2,
        "context": 3 * 512 * (36 + 5) * 2 * 1024 * 2,
        "rows": 3 * 2 * (8 * 2560 + 7 * 2560 + 7 * 256),
    }
    what = bench.subject(Settings("qwen3-4b", (1,), temperature=0.0), cpu=False)
    assert what.name == "qwen3-4b, bfloat16, context 512, greedy" and what.draft.faults(what.config) == []
    assert bench.floor_us(what, 1, True, 4e12) == pytest.approx(2632.08, abs=0.01)
    assert bench.floor_us(what, 1, False, 4e12) == pytest.approx(2030.11, abs=0.01)


def test_what_is_of_other_models_is_refused(tmp_path):
    with pytest.raises(ConfigError) as error:
        bench.subject(Settings("qwen3-4b", (1,), 4, weights="quantised", recorded=tmp_path, count_experts=True, temperature=-1))
    for name in ("--layers", "--weights quantised", "--recorded", "--count-experts"):
        assert f"{name} is for DeepSeek-V4-style models" in str(error.value)
    assert "--temperature is -1; expected a finite number" in str(error.value)
    with pytest.raises(ConfigError, match="--temperature is 0 with --recorded; expected more"):
        bench.subject(Settings("nano", (1,), recorded=tmp_path, temperature=0))
    with pytest.raises(ConfigError, match="expected the folder of a DeepSpec checkout"):
        check_deepspec(tmp_path)


def test_models_have_their_peers(tmp_path):
    every = ("transformers", "compiled", "deepspec")
    flash, draft = bench.first_layers(*v4_flash(), 4)
    (one,) = peers_of(every, flash, draft, (1, 8), 512, 1.0, tmp_path)
    assert one.job["peer"] == "deepseek_v4" and one.job["batches"] == [1, 8] and one.job["config"]["num_hidden_layers"] == 4
    assert peers_of(every, replace(flash, expert_weights="fp4"), draft, (1,), 512, 1.0, tmp_path) == []
    dense = qwen3_4b()
    assert [p.name for p in peers_of(every, *dense, (1, 8), 512, 0.0, None)] == ["transformers", "transformers compiled"]
    assert peers_of(every, *dense, (8,), 512, 0.0, tmp_path)[-1].name != "DeepSpec"  # which has one request
    last = peers_of(every, *dense, (1,), 512, 0.0, tmp_path)[-1]
    assert (last.name, last.drafting, last.job["temperature"], last.job["drafter"]["block_size"]) == ("DeepSpec", True, 0, 7)


def test_a_peer_that_fails_is_a_line(monkeypatch, tmp_path):
    script = tmp_path / "peer.py"
    monkeypatch.setattr(peers_module, "SCRIPT", script)
    script.write_text(
        "import json, os, sys, time\n"
        "job = json.loads(sys.argv[1])\n"
        "print('a library says hello', os.environ['PYTHONPATH'])\n"
        "path = [os.path.basename(folder) for folder in os.environ['PYTHONPATH'].split(os.pathsep)]\n"
        "print(json.dumps({'requests': 8, 'how': ' '.join(path), 'us': 1234.567}), flush=True)\n"
        "print(json.dumps({'requests': 64, 'how': 'b', 'error': 'out of memory'}), flush=True)\n"
        "if job['ends'] == 'late': time.sleep(60)\n"
        "if job['ends'] == 'badly': sys.exit('a warning\\nImportError: no torch')\n"
    )
    (tmp_path / "own" / "dspark_kernels").mkdir(parents=True)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}/own:{tmp_path}/others")  # a folder of this project is not for peers
    said = []
    endings = [("A", 30, False, "well"), ("B", 30, True, "badly"), ("C", 2, True, "late")]
    found = measure_peers([Peer(*rest, {"ends": end}) for *rest, end in endings], said.append)
    assert found == {(8, False): {"A others": 1234.57}, (8, True): {"B others": 1234.57, "C others": 1234.57}}
    assert said[:2] == ["batch 8, plain step: A others: 1235 us", "batch 64, plain step: A b: not measured: out of memory"]
    assert said[4] == "B: not measured: ImportError: no torch" and said[7] == "C: not measured: no end after 2 s"
    assert len(said) == 8


@pytest.mark.long
@pytest.mark.skipif(not ORACLE_PYTHON.is_file(), reason="`make oracles` makes the environment with torch")
def test_the_script_runs_where_torch_is():
    target, draft = tiny()
    flash, stages = bench.first_layers(*v4_flash(), 4)
    small = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "head_dim": 16, "q_lora_rank": 12, "o_groups": 2}
    small |= {"o_lora_rank": 6, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    flash = replace(flash, rope=replace(flash.rope, dim=8), **small)
    every = ("transformers", "compiled")
    jobs = [*peers_of(every, target, draft, (1, 3), 40, 0.0, None), *peers_of(every, flash, stages, (1, 3), 300, 0.0, None)]
    for peer in jobs:
        job = json.dumps({**peer.job, "device": "cpu", "dtype": "float32"})
        command, env = [str(ORACLE_PYTHON), "-P", str(peers_module.SCRIPT), job], {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env, check=False)
        assert done.returncode == 0, done.stderr[-500:]
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        assert {line["requests"] for line in lines} == {1, 3} and all(line["us"] > 0 for line in lines), lines
