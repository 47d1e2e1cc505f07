"""Folders that transformers wrote: its names, the mixture that `save_pretrained` makes by default, and its config.json."""

import json
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from dspark_jax.checkpoint import layout
from dspark_jax.checkpoint.reader import read_checkpoint
from dspark_jax.errors import CheckpointError, ConfigError
from helpers.checkpoints import DRAFT, TARGET, edit_config, edit_tensors, write_tiny

# Names as `DeepseekV4ForCausalLM.save_pretrained` of transformers 5.24 writes them: of a window layer, a heavily compressed
# one and a compressed sparse one, where they differ from the published ones under the same "layers.N.".
OWN = {
    "attn.attn_sink": "self_attn.sinks",
    "attn.wq_a.weight": "self_attn.q_a_proj.weight",
    "attn.wq_b.weight": "self_attn.q_b_proj.weight",
    "attn.wkv.weight": "self_attn.kv_proj.weight",
    "attn.wo_a.weight": "self_attn.o_a_proj.weight",
    "attn.wo_b.weight": "self_attn.o_b_proj.weight",
    "attn.q_norm.weight": "self_attn.q_a_norm.weight",
    "attn.kv_norm.weight": "self_attn.kv_norm.weight",
    "attn.compressor.ape": "self_attn.compressor.position_bias",
    "attn.compressor.wkv.weight": "self_attn.compressor.kv_proj.weight",
    "attn.compressor.wgate.weight": "self_attn.compressor.gate_proj.weight",
    "attn.compressor.norm.weight": "self_attn.compressor.kv_norm.weight",
    "attn.indexer.wq_b.weight": "self_attn.compressor.indexer.q_b_proj.weight",
    "attn.indexer.weights_proj.weight": "self_attn.compressor.indexer.scorer.weights_proj.weight",
    "attn.indexer.compressor.ape": "self_attn.compressor.indexer.position_bias",
    "attn.indexer.compressor.wkv.weight": "self_attn.compressor.indexer.kv_proj.weight",
    "attn.indexer.compressor.wgate.weight": "self_attn.compressor.indexer.gate_proj.weight",
    "attn.indexer.compressor.norm.weight": "self_attn.compressor.indexer.kv_norm.weight",
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn.gate.weight": "mlp.gate.weight",
    "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
    "ffn.gate.tid2eid": "mlp.gate.tid2eid",
    "ffn.shared_experts.w1.weight": "mlp.shared_experts.gate_proj.weight",
    "ffn.shared_experts.w2.weight": "mlp.shared_experts.down_proj.weight",
    "ffn.shared_experts.w3.weight": "mlp.shared_experts.up_proj.weight",
    **{f"hc_{part}_{name}": f"{part}_hc.{name}" for part in ("attn", "ffn") for name in ("fn", "base", "scale")},
}
ENDS = {
    "embed.weight": "model.embed_tokens.weight",
    "head.weight": "lm_head.weight",
    "norm.weight": "model.norm.weight",
    **{f"hc_head_{name}": f"model.hc_head.hc_{name}" for name in ("fn", "base", "scale")},
}
# What the default `save_original_format=True` writes, where it is neither.
MIXED = {"attn.kv_norm.weight": "attn.norm.weight"}
CONFIG = {
    "compress_ratios": None,
    "num_hash_layers": None,
    "qk_rope_head_dim": None,
    "rope_scaling": None,
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    "layer_types": ["sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"],
    "mlp_layer_types": ["hash_moe", "moe", "moe"],
    "rope_parameters": {
        "main": {"partial_rotary_factor": 0.5, "rope_theta": 10000.0, "rope_type": "default"},
        "compress": {
            "attention_factor": 1.0, "beta_fast": 32, "beta_slow": 1, "factor": 16.0, "partial_rotary_factor": 0.5,
            "original_max_position_embeddings": 65536, "rope_theta": 160000.0, "rope_type": "yarn",
        },
    },
}  # fmt: skip


def split(key: str) -> tuple[str, str]:
    """"layers.N." or "", and the rest."""
    layer = re.match(r"layers\.\d+\.|", key)
    assert layer is not None
    return layer[0], key[layer.end() :]


def own(tensors: dict) -> dict:
    """Transformers' names, experts fused."""
    found: dict = {}
    for key, value in tensors.items():
        layer, name = split(key)
        if not re.search(r"\.experts\.", key):
            found[f"model.{layer}{OWN[name]}" if layer else ENDS[key]] = value
    for layer in range(TARGET.num_hidden_layers):
        w1, w2, w3 = (
            np.stack([tensors[f"layers.{layer}.ffn.experts.{e}.{w}.weight"] for e in range(TARGET.n_routed_experts)])
            for w in ("w1", "w2", "w3")
        )
        found[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = np.concatenate([w1, w3], axis=1)
        found[f"model.layers.{layer}.mlp.experts.down_proj"] = w2
    return found


def mixed(tensors: dict) -> dict:
    """The names that `save_pretrained` writes by default."""
    found = {}
    for key, value in tensors.items():
        layer, name = split(key)
        ends = {k: v for k, v in ENDS.items() if k != "head.weight"}
        found[f"model.{layer}{MIXED.get(name, name)}" if layer else ends.get(key, key)] = value
    return found


def rewritten(folder: Path, names) -> nnx.State:
    """A tiny target in `folder` under other names; returns its parameters."""
    params = write_tiny(folder, None)
    tensors = load_file(folder / "model.safetensors")
    save_file({k: np.ascontiguousarray(v) for k, v in names(tensors).items()}, folder / "model.safetensors")
    return params


@pytest.mark.parametrize("names", [own, mixed])
def test_both_sets_of_names_load_to_the_same_model(names, tmp_path):
    params = rewritten(tmp_path, names)
    edit_config(tmp_path, **CONFIG)
    loaded = read_checkpoint(tmp_path, dtype=jnp.float32)
    assert loaded.config == TARGET and loaded.draft is None
    for (path, a), (_, b) in zip(nnx.to_flat_state(loaded.params), nnx.to_flat_state(params), strict=True):
        np.testing.assert_array_equal(np.asarray(a.get_value()), np.asarray(b.get_value()), err_msg=str(path))


def test_faults_have_published_names_and_fused_experts_are_parts(tmp_path):
    rewritten(tmp_path, own)

    def edit(t):
        t.pop("model.layers.1.mlp.experts.down_proj")
        t["norm.weight"] = t["model.norm.weight"]
        t["model.layers.0.self_attn.other.weight"] = t["model.norm.weight"]
        fused = "model.layers.2.mlp.experts.gate_up_proj"
        t[fused] = t[fused][:, :, :-1]

    edit_tensors(tmp_path, edit)
    with pytest.raises(CheckpointError) as error:
        read_checkpoint(tmp_path)
    for words in (
        "layers.1.ffn.experts.3.w2.weight is missing",
        "model.norm.weight and norm.weight are both norm.weight; expected one",
        "layers.0.attn.other.weight is unexpected",
        "layers.2.ffn.experts.0.w3.weight has shape [5, 7]; expected [5, 8]",
    ):
        assert words in str(error.value)


def test_a_lost_file_is_one_fault(tmp_path):
    rewritten(tmp_path, own)
    whole = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    lost = {name for name in whole if "layers.1." in name}
    save_file({k: v for k, v in whole.items() if k not in lost}, tmp_path / "a.safetensors")
    where = {name: "b.safetensors" if name in lost else "a.safetensors" for name in whole}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    with pytest.raises(CheckpointError, match=r"b\.safetensors is missing; download it again$"):
        read_checkpoint(tmp_path)


def test_drafters_stages_beside_transformers_names(tmp_path):
    write_tiny(tmp_path, DRAFT)
    edit_tensors(tmp_path, lambda t: t.update({"model.norm.weight": t.pop("norm.weight")}))
    assert read_checkpoint(tmp_path).draft == DRAFT


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layer_types": ["sliding_attention", "linear", "linear"]}, "lacks compress_ratios"),
        ({"rope_parameters": {"main": {}, "compress": {"rope_type": "longrope"}}}, "'longrope'; only 'yarn'"),
        ({"rope_parameters": {"main": {}, "compress": {"rope_type": "yarn", "attention_factor": 1.3}}}, "factor is 1.3"),
        ({"layer_types": ["sliding_attention"]}, "compress_ratios has 1 entries"),
    ],
)
def test_an_impossible_config_is_refused(change, said, tmp_path):
    rewritten(tmp_path, own)
    edit_config(tmp_path, **CONFIG)
    edit_config(tmp_path, **change)
    with pytest.raises(ConfigError, match=said):
        read_checkpoint(tmp_path)


def test_all_names_of_the_layout_are_covered():
    """Every parameter of the tiny model, which has every kind of layer, has a name in the table above."""
    _, params = layout.skeleton(TARGET, None, dtype=jnp.float32, axis=None)
    keys = {k for e in layout.entries(params) for k in e.keys if ".experts." not in k}
    assert {k.split(".", 2)[2] if k.startswith("layers.") else k for k in keys} == OWN.keys() | ENDS.keys()
