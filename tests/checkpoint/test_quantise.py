"""Quantising: codes and scales by the rule, the published names, and nano through it and back."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dspark_jax import LM, SamplingParams, cli, load
from dspark_jax.agreement import Agreement, agreement, chooser
from dspark_jax.api import model_folder
from dspark_jax.checkpoint import layout
from dspark_jax.checkpoint.files import open_files, stored_bytes
from dspark_jax.checkpoint.quantised import dequantised, published_format, quantised
from dspark_jax.checkpoint.reader import read_checkpoint
from dspark_jax.checkpoint.writer import write_checkpoint
from dspark_jax.config_dense import v4_config
from dspark_jax.errors import CheckpointError, ConfigError
from dspark_jax.evaluate import read_prompts
from dspark_jax.parallel.mesh import make_mesh
from helpers.checkpoints import DRAFT, TARGET, random_params
from helpers.micro import MICRO
from helpers.quantised import fp4_quantised, fp8_quantised, write_quantised

CONFIG = replace(TARGET, hidden_size=144, moe_intermediate_size=48, q_lora_rank=130)
PROMPTS = Path(__file__).parents[1] / "data" / "nano_prompts.jsonl"


def same_bytes(found, expected) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))


@pytest.mark.parametrize(("kind", "slow"), [("fp4", fp4_quantised), ("fp8", fp8_quantised)])
@pytest.mark.parametrize("shape", [(130, 258), (128, 256), (3, 34)])
def test_codes_and_scales_by_the_rule(kind, slow, shape):
    rng = np.random.default_rng(1)
    weight = (rng.normal(size=shape) * np.exp(4 * rng.normal(size=shape))).astype(np.float32)
    weight[:, :2] = 0
    weight[0] = 0
    same_bytes(quantised(kind, weight), slow(weight))


def test_ties_go_to_the_even_code_and_extremes_stay_numbers():
    ties = np.array([[0.25, 0.75, 1.25, 1.75, 2.5, -3.5, -5, 6]], np.float32)
    codes, scale = quantised("fp4", ties)
    found = dequantised("fp4", codes.view(np.uint8), scale.view(np.uint8))
    np.testing.assert_array_equal(found, [[0, 1, 1, 2, 2, -4, -4, 6]])
    assert scale.view(np.uint8) == 127  # 2^0 is enough for the 6
    for kind in ("fp4", "fp8"):
        for value in (2e38, 1e-38):
            codes, scale = quantised(kind, np.full((2, 4), value, np.float32))
            found = dequantised(kind, codes.view(np.uint8), scale.view(np.uint8))
            assert np.isfinite(found).all() and abs(found[0, 0] / value - 1) < 0.26


def test_the_published_tensors_are_written(tmp_path):
    write_quantised(tmp_path / "a", CONFIG, DRAFT)
    write_checkpoint(
        tmp_path / "b", CONFIG, DRAFT, random_params(CONFIG, DRAFT), quantise=True, max_shard_bytes=100_000
    )
    a, b = (open_files(tmp_path / name) for name in "ab")
    assert not b.faults and len(b._open) > 3
    assert {n: (i.dtype, i.shape) for n, i in b.tensors.items()} == {n: (i.dtype, i.shape) for n, i in a.tensors.items()}
    index = json.loads((tmp_path / "b/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(stored_bytes(b).values()) and index["weight_map"].keys() == b.tensors.keys()
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in "ab"]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]
    assert configs[0]["expert_dtype"] == configs[1]["expert_dtype"] == "fp4"


def test_what_cannot_be_quantised(tmp_path):
    params = random_params(TARGET, DRAFT)
    with pytest.raises(ConfigError, match="moe_intermediate_size is 5; expected an even number for fp4 experts"):
        write_checkpoint(tmp_path, TARGET, DRAFT, params, quantise=True)
    params = random_params(CONFIG, DRAFT)
    for path, variable in nnx.to_flat_state(params):
        if path == ("target", "layers", 1, "attn", "wq_a", "weight"):
            variable.set_value(variable.get_value().at[2, 3].set(jnp.inf))
    with pytest.raises(CheckpointError, match=r"layers\.1\.attn\.wq_a\.weight is not finite"):
        write_checkpoint(tmp_path, CONFIG, DRAFT, params, quantise=True)
    assert not any(tmp_path.glob("model*"))


# The shipped model


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    """nano in the published files' formats, written by the command line."""
    folder = tmp_path_factory.mktemp("quantised") / "nano"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(sys, "argv", ["dspark-jax", "quantise", "nano", "--out", str(folder), "--json"])
        cli.main()
    assert not stop.value.code
    return folder


def by_key(params: nnx.State) -> dict[str, np.ndarray]:
    values = {path: np.asarray(v.get_value()) for path, v in nnx.to_flat_state(params)}
    return {k: a for e in layout.entries(params) for k, a in zip(e.keys, e.save(values[e.path]), strict=True)}


@pytest.mark.long
def test_nano_is_as_near_as_its_formats_allow(exported):
    before, after = (by_key(read_checkpoint(f, dtype=jnp.float32).params) for f in (model_folder("nano"), exported))
    assert before.keys() == after.keys()
    kinds = {"fp4": 0, "fp8": 0, None: 0}
    for key, value in before.items():
        kind = published_format(key)
        kinds[kind] += 1
        if kind is None:
            np.testing.assert_array_equal(after[key], value, err_msg=key)
            continue
        # Half a step of the format at most, relative to the number or to its block's largest one.
        step, width = (1 / 4, 32) if kind == "fp4" else (1 / 16, 128)
        error = np.abs(after[key] - value)
        if kind == "fp4":
            largest = np.repeat(np.abs(value.reshape(len(value), -1, width)).max(-1), width, 1)
            assert (error <= np.maximum(step * np.abs(value), largest / 3 / 4) + 1e-9).all(), key
        else:
            assert (error <= np.maximum(step * np.abs(value), np.abs(value).max() * 2.0**-17) + 1e-9).all(), key
        assert error.max() > 0, key
    experts, blocks = 16, 9
    assert kinds["fp4"] == 3 * experts * blocks and kinds["fp8"] > 8 * blocks


@pytest.fixture(scope="module")
def both(exported) -> list[LM]:
    """The export with numbers and with codes on the device."""
    return [load(exported, weights="dequantised"), load(exported, weights="quantised")]


@pytest.mark.long
def test_both_ways_of_keeping_nanos_experts_give_the_same_tokens(both):
    assert [v4_config(lm.config, "nano").expert_weights for lm in both] == ["dense", "fp4"]
    texts = [both[0].encode(p.prompt) for p in read_prompts(PROMPTS)]
    ids = np.array([text[:40] for text in texts if len(text) >= 40][:4], np.int32)
    numbers, codes = (np.asarray(chooser(lm)(ids)) for lm in both)
    np.testing.assert_array_equal(numbers, codes)
    assert len(set(numbers.reshape(-1).tolist())) > 40


@pytest.mark.long
def test_both_ways_of_keeping_nanos_experts_decode_the_same(both):
    prompts = [p.prompt for p in read_prompts(PROMPTS)[:8]]
    numbers, codes = ([out.tokens for out in lm.generate(prompts, SamplingParams(max_tokens=64))] for lm in both)
    assert numbers == codes


# What the tokens lose


class Answers:
    """As much of an `LM` as `agreement` uses: a real target, and texts that were written down."""

    config, gamma = MICRO, 2

    def __init__(self, seed: int, texts: dict[str, list[int]], expert: int = 1):
        self._graph, _ = layout.skeleton(MICRO, None, dtype=jnp.float32, axis="expert")
        self._params = random_params(MICRO, None, seed)
        self.mesh, self.texts, self.seed = make_mesh(1, expert), texts, seed

    def generate(self, prompts: list[str], params: SamplingParams) -> list[Any]:
        found = [(tuple(map(int, prompt)), tuple(self.texts[prompt])[: params.max_tokens]) for prompt in prompts]
        rounds = {"rounds": 2 + self.seed, "verified_by_position": (1, 1), "accepted_by_position": (1, 0)}
        rest = {"verify_lengths": (2,), "wasted": 1}
        return [SimpleNamespace(prompt_tokens=p, tokens=t, **rounds, **rest) for p, t in found]

    @cached_property
    def likeliest(self) -> Callable[[list[int]], int]:
        """Behind one text, alone; with other padding than `agreement`'s."""
        graph, _ = layout.skeleton(MICRO, None, dtype=jnp.float32, axis=None)

        @jax.jit
        def run(params, ids):
            target = nnx.merge(graph, params).target
            return jnp.argmax(target.logits(target.sequence(ids).hidden[0]), axis=-1)

        return lambda ids: int(run(self._params, jnp.array([ids + [3] * (9 - len(ids))]))[len(ids) - 1])


@pytest.mark.long
def test_agreement_is_counted_token_by_token():
    texts = {"03": [1, 2, 4, 0], "1": [3, 3, 1, 2, 4], "240": [4, 1], "4": [2, 0, 4]}
    other = Answers(1, texts | {"1": [0]}, expert=2)
    found = agreement(Answers(0, texts), other, list(texts), max_tokens=4, batch=3)  # type: ignore[arg-type]
    behind = [([*map(int, p), *t[:i]], token) for p, t in texts.items() for i, token in enumerate(t[:4])]
    expected = sum(other.likeliest(ids) == token for ids, token in behind)
    assert 0 < expected < len(behind) == 13
    assert found == Agreement(4, 13, expected, 3, (13 - 4) / 8, (10 - 4) / 12)
    assert found.as_dict()["top1"] == expected / 13


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nano", "--out", "absent/folder"), "there is no folder 'absent'"),
        (("nano", "--out", "out", "--max-tokens", "0"), "--max-tokens is 0; expected at least 1"),
        (("nano", "--out", "out", "--prompts", "absent.jsonl"), "cannot be read"),
        (("{nano}", "--out", "{nano}"), "is the model itself or a file"),
        (("nano", "--out", "out", "--mesh", "1x8"), "--mesh is for the comparison, and without --prompts there is none"),
        (("bare", "--out", "out"), "no tokenizer.json; copy it from the published model"),
    ],
)
def test_the_command_refuses(arguments, said, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bare").mkdir()
    monkeypatch.setattr(
        sys, "argv", ["dspark-jax", "quantise", *(a.replace("{nano}", str(model_folder("nano"))) for a in arguments)]
    )
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2 and said in capsys.readouterr().err and not (tmp_path / "out").exists()
