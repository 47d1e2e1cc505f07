"""Folders of dense models: config.json in and out, what other files say, weights, and every fault in one message."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tokenizers import processors

from dspark_jax.checkpoint.reader import open_checkpoint, read_checkpoint
from dspark_jax.checkpoint.writer import write_checkpoint
from dspark_jax.config_dense import DenseConfig, dense_from_hf, dense_to_hf
from dspark_jax.errors import CheckpointError, ConfigError
from dspark_jax.presets import model_configs
from helpers.checkpoints import edit_config, edit_tensors
from helpers.dense import FAMILIES, dense, letters

QWEN3_4B = {  # as published
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2560, "initializer_range": 0.02,
    "intermediate_size": 9728, "max_position_embeddings": 40960, "max_window_layers": 36, "model_type": "qwen3",
    "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip


@pytest.fixture(params=FAMILIES)
def name(request) -> str:
    return request.param


@pytest.fixture
def folder(name: str, tmp_path: Path) -> Path:
    return dense(name).write(tmp_path / name)


def test_published_config():
    config = dense_from_hf(QWEN3_4B)
    assert config == DenseConfig(
        vocab_size=151936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, rms_norm_eps=1e-6, qk_norm=True,
        rope_theta=1000000, tie_word_embeddings=True, bos_token_id=151643, eos_token_ids=(151645,),
    )  # fmt: skip
    assert dense_from_hf(dense_to_hf(config)) == config
    several = replace(config, qk_norm=False, bos_token_id=None, eos_token_ids=(1, 7))
    assert dense_from_hf(dense_to_hf(several)) == several


def test_what_old_llama_files_leave_out_and_what_transformers_5_writes(name: str):
    written = dense(name).config
    config = dense_from_hf(written)
    assert "rope_theta" not in written and config.rope_theta == {"qwen3": 1e6, "llama": 1e4}[name]
    assert (config.qk_norm, config.tie_word_embeddings) == ((True, True) if name == "qwen3" else (False, False))
    old = {key: value for key, value in QWEN3_4B.items() if key not in ("num_key_value_heads", "head_dim")}
    llama = dense_from_hf(old | {"model_type": "llama"})
    assert (llama.num_key_value_heads, llama.head_dim, llama.qk_norm) == (32, 80, False)
    with pytest.raises(ConfigError, match="lacks num_key_value_heads, head_dim"):
        dense_from_hf(old)


def test_faults_of_config_json_come_together():
    wrong = QWEN3_4B | {
        "hidden_size": "2560", "vocab_size": 2**31, "rms_norm_eps": 0,
        "tie_word_embeddings": 1, "eos_token_id": ["a"], "attention_bias": True,
        "use_sliding_window": True, "rope_scaling": {"type": "yarn", "factor": 4.0}, "quantization_config": {"bits": 4},
        "layer_types": ["full_attention", "sliding_attention"],
    }  # fmt: skip
    with pytest.raises(ConfigError) as found:
        dense_from_hf(wrong, "here")
    for part in (
        "here: 10 faults",
        "vocab_size is 2147483648; expected a positive integer of at most 2147483647",
        "hidden_size is '2560'; expected a positive integer",
        "rms_norm_eps is 0; expected a positive number",
        "tie_word_embeddings is 1; expected true or false",
        "eos_token_id is ('a',); expected",
        "attention_bias is True; only False is supported for qwen3",
        "use_sliding_window is True",
        "rope_scaling is of type 'yarn'; only unscaled rotary positions",
        "quantization_config is {'bits': 4}",
        "layer_types is ['full_attention', 'sliding_attention']",
    ):
        assert part in str(found.value)
    with pytest.raises(ConfigError, match="sliding_window is 4096; only full attention"):
        dense_from_hf(QWEN3_4B | {"model_type": "llama", "sliding_window": 4096, "use_sliding_window": None})
    with pytest.raises(ConfigError) as found:
        dense_from_hf(QWEN3_4B | {"num_key_value_heads": 5, "head_dim": 3, "bos_token_id": 151936})
    for part in ("5; expected a divisor of num_attention_heads = 32", "head_dim is 3", "bos_token_id holds [151936]"):
        assert part in str(found.value)
    with pytest.raises(ConfigError, match="model_type is 'qwen2'; expected one of 'qwen3', 'llama'"):
        dense_from_hf(QWEN3_4B | {"model_type": "qwen2"})


def test_round_trip_in_shards(name: str, folder: Path, tmp_path: Path):
    first = read_checkpoint(folder, dtype=jnp.float32)
    write_checkpoint(tmp_path / "copy", first.config, None, first.params, dtype="float32", max_shard_bytes=20_000)
    assert len(list((tmp_path / "copy").glob("*.safetensors"))) > 3
    again = read_checkpoint(tmp_path / "copy", dtype=jnp.float32)
    assert again.config == first.config
    jax.tree.map(np.testing.assert_array_equal, again.params, first.params)
    index = json.loads((tmp_path / "copy" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == dense(name).weights.keys()
    flat = {".".join(map(str, path[1:])): v.get_value() for path, v in nnx.to_flat_state(first.params)}
    for key, value in dense(name).weights.items():  # linear maps are turned round
        turned = value.ndim == 2 and key != "model.embed_tokens.weight"
        np.testing.assert_array_equal(flat[key], value.T if turned else value)
    with pytest.raises(CheckpointError, match="quantise is for DeepSeek-V4-style models"):
        write_checkpoint(tmp_path / "copy", first.config, None, first.params, quantise=True)


def test_tensors_that_transformers_ignores(folder: Path, name: str):
    def add(tensors: dict) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(3, np.float32)
        if name == "qwen3":  # tied: a copy of the embedding
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]

    before = read_checkpoint(folder, dtype=jnp.float32).params
    edit_tensors(folder, add)
    jax.tree.map(np.testing.assert_array_equal, read_checkpoint(folder, dtype=jnp.float32).params, before)


def test_faults_of_weights_come_together(folder: Path, name: str):
    def damage(tensors: dict) -> None:
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.0.mlp.gate_proj.weight"] = tensors["model.layers.0.mlp.gate_proj.weight"].T
        tensors["model.layers.2.self_attn.q_proj.bias"] = np.ones(3, np.float32)
        tensors["model.norm.weight"] = np.ones(tensors["model.norm.weight"].shape, np.int64)
        tensors["model.embed_tokens.weight"][3, 4] = np.nan

    edit_tensors(folder, damage)
    with pytest.raises(CheckpointError) as found:
        open_checkpoint(folder, dtype=jnp.float32)
    expected = [
        "model.layers.1.mlp.up_proj.weight is missing",
        "model.layers.0.mlp.gate_proj.weight has shape",
        "model.layers.2.self_attn.q_proj.bias is unexpected",
        "model.norm.weight has dtype I64; expected BF16, F16 or F32",
        "model.embed_tokens.weight holds 1 NaN or infinite values, the first at [3, 4]",
    ]
    if name == "llama":
        edit_tensors(folder, lambda t: t.pop("lm_head.weight"))
        with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing"):
            open_checkpoint(folder, dtype=jnp.float32)
    assert f"{len(expected)} faults" in str(found.value)
    for part in expected:
        assert part in str(found.value)


def test_values_are_checked_when_they_are_read(folder: Path):
    edit_tensors(folder, lambda t: t["model.norm.weight"].__setitem__(0, np.inf))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight holds 1 NaN or infinite"):
        read_checkpoint(folder, dtype=jnp.float32)
    with pytest.raises(CheckpointError, match=r"weights is 'quantised'.*a dense model has none"):
        open_checkpoint(folder, dtype=jnp.float32, weights="quantised")


def test_what_the_tokenizer_and_generation_config_say(tmp_path: Path):
    plain = letters()
    folder = dense("llama").write(tmp_path / "model", plain)
    assert open_checkpoint(folder, dtype="float32").config.bos_token_id is None
    plain.post_processor = processors.TemplateProcessing(single="! $A", special_tokens=[("!", 1)])  # type: ignore[assignment]
    plain.save(str(folder / "tokenizer.json"))
    assert open_checkpoint(folder, dtype="float32").config.bos_token_id == 1
    (folder / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False}))
    assert open_checkpoint(folder, dtype="float32").config.bos_token_id is None
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 9]}))
    assert open_checkpoint(folder, dtype="float32").config.eos_token_ids == (2, 9)
    edit_config(folder, eos_token_id=None)
    (folder / "generation_config.json").unlink()
    assert open_checkpoint(folder, dtype="float32").config.eos_token_ids == ()


def test_commands_for_other_models_say_so(folder: Path):
    with pytest.raises(ConfigError, match="expected 'deepseek_v4' here: dense models run by `load`"):
        model_configs(str(folder))
