"""Key names and shapes against the oracle's file, the published table of V4-Flash, and the published heads' names."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dspark_jax.checkpoint import layout
from dspark_jax.config import DraftConfig, TargetConfig
from helpers.checkpoints import DRAFT, TARGET, random_params, with_head
from helpers.goldens import configs


def table(config: TargetConfig, draft: DraftConfig | None) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and kind by key; fails where two parameters share a key."""
    _, params = layout.skeleton(config, draft, dtype=jnp.float32, axis=None)
    pairs = [(key, (e.shape, e.dtype)) for e in layout.entries(params) for key in e.keys]
    assert len({key for key, _ in pairs}) == len(pairs)
    return dict(pairs)


def test_keys_and_shapes_are_those_of_the_oracle(golden_file):
    data = np.load(golden_file.path)
    expected = {key[2:]: data[key].shape for key in data.files if key.startswith("P/")}
    assert {key: shape for key, (shape, _) in table(*configs(golden_file.cfg)).items()} == expected
    kinds = table(*configs(golden_file.cfg))
    assert {key for key, (_, kind) in kinds.items() if kind == "int"} == {k for k in expected if "tid2eid" in k}


def test_v4_flash_shapes_follow_the_published_table():
    """The shapes of the published headers (unpacked), for the first layers of each kind and three stages."""
    config = TargetConfig(
        vocab_size=129280,
        hidden_size=4096,
        num_hidden_layers=3,
        num_attention_heads=64,
        head_dim=512,
        q_lora_rank=1024,
        o_groups=8,
        o_lora_rank=1024,
        n_routed_experts=256,
        num_experts_per_tok=6,
        moe_intermediate_size=2048,
        compress_ratios=(0, 4, 128),
        num_hash_layers=1,
    )
    draft = DraftConfig(block_size=5, noise_token_id=128799, target_layer_ids=(0, 1, 2), num_stages=3)
    found = table(config, draft)
    published = {
        "embed.weight": ((129280, 4096), "weight"),
        "head.weight": ((129280, 4096), "weight"),
        "norm.weight": ((4096,), "weight"),
        "hc_head_fn": ((4, 16384), "fp32"),
        "layers.0.ffn.gate.tid2eid": ((129280, 6), "int"),
        "layers.1.attn.compressor.wkv.weight": ((1024, 4096), "weight"),
        "layers.1.attn.compressor.ape": ((4, 1024), "fp32"),
        "layers.1.attn.compressor.norm.weight": ((512,), "weight"),
        "layers.1.attn.indexer.wq_b.weight": ((8192, 1024), "weight"),
        "layers.1.attn.indexer.weights_proj.weight": ((64, 4096), "weight"),
        "layers.1.attn.indexer.compressor.wgate.weight": ((256, 4096), "weight"),
        "layers.1.attn.indexer.compressor.ape": ((4, 256), "fp32"),
        "layers.1.attn.indexer.compressor.norm.weight": ((128,), "weight"),
        "layers.2.attn.compressor.wgate.weight": ((512, 4096), "weight"),
        "layers.2.attn.compressor.ape": ((128, 512), "fp32"),
        "mtp.0.attn.wq_a.weight": ((1024, 4096), "weight"),
        "mtp.0.attn.wq_b.weight": ((32768, 1024), "weight"),
        "mtp.0.attn.wkv.weight": ((512, 4096), "weight"),
        "mtp.1.attn.wo_a.weight": ((8192, 4096), "weight"),
        "mtp.1.attn.wo_b.weight": ((4096, 8192), "weight"),
        "mtp.1.attn.attn_sink": ((64,), "fp32"),
        "mtp.1.ffn.gate.weight": ((256, 4096), "weight"),
        "mtp.1.ffn.gate.bias": ((256,), "fp32"),
        "mtp.1.ffn.experts.255.w1.weight": ((2048, 4096), "weight"),
        "mtp.1.ffn.experts.255.w2.weight": ((4096, 2048), "weight"),
        "mtp.1.ffn.shared_experts.w2.weight": ((4096, 2048), "weight"),
        "mtp.1.hc_attn_fn": ((24, 16384), "fp32"),
        "mtp.1.hc_ffn_base": ((24,), "fp32"),
        "mtp.1.hc_ffn_scale": ((3,), "fp32"),
        "mtp.0.main_proj.weight": ((4096, 12288), "weight"),
        "mtp.0.main_norm.weight": ((4096,), "weight"),
        "mtp.2.norm.weight": ((4096,), "weight"),
        "mtp.2.hc_head_scale": ((1,), "fp32"),
        "mtp.2.markov_head.markov_w1.weight": ((129280, 256), "weight"),
        "mtp.2.markov_head.markov_w2.weight": ((129280, 256), "weight"),
        "mtp.2.confidence_head.proj.weight": ((1, 4352), "weight"),
    }
    assert {key: found.get(key) for key in published} == published


@pytest.mark.parametrize(
    ("kind", "own"),
    [
        ("markov", {}),
        ("gated", {"gate_proj.weight": (3, 8 + 3), "gate_proj.bias": (3,)}),
        ("rnn", {"joint_proj.weight": (9, 2 * 3 + 8), "joint_proj.bias": (9,)}),
        ("none", None),
    ],
)
def test_sequential_heads_have_their_published_names(kind, own):
    found, prefix = table(TARGET, with_head(kind)), "mtp.1.markov_head."
    heads = {key.removeprefix(prefix): shape for key, (shape, _) in found.items() if key.startswith(prefix)}
    low_rank = {"markov_w1.weight": (13, 3), "markov_w2.weight": (13, 3)}
    assert heads == ({} if own is None else low_rank | own)
    assert found["mtp.1.confidence_head.proj.weight"] == ((1, 8 if own is None else 8 + 3), "weight")


def test_a_target_alone_has_no_stages():
    keys = table(TARGET, None)
    assert keys and not any(key.startswith("mtp.") for key in keys)


@pytest.mark.parametrize("kind", ["markov", "gated", "rnn", "none"])
def test_save_undoes_load(kind):
    params = random_params(TARGET, with_head(kind))
    values = {path: np.asarray(v.get_value()) for path, v in nnx.to_flat_state(params)}
    for entry in layout.entries(params):
        saved = entry.save(values[entry.path])
        assert [a.shape for a in saved] == [entry.shape] * len(entry.keys)
        np.testing.assert_array_equal(entry.load(saved), values[entry.path], err_msg=entry.keys[0])


def test_linear_maps_are_stored_out_in():
    """`y = W x` with the stored W is `x @ weight` with the module's, grouped output projection included."""
    params = random_params(TARGET, DRAFT)
    values = {path: np.asarray(v.get_value()) for path, v in nnx.to_flat_state(params)}
    stored = {key: a for e in layout.entries(params) for key, a in zip(e.keys, e.save(values[e.path]), strict=True)}
    x = np.arange(8, dtype=np.float32)
    weight = values["target", "layers", 0, "attn", "wq_a", "weight"]
    np.testing.assert_allclose(stored["layers.0.attn.wq_a.weight"] @ x, x @ weight, rtol=1e-6)
    expert = values["target", "layers", 0, "ffn", "experts", "w1"][3]
    np.testing.assert_allclose(stored["layers.0.ffn.experts.3.w1.weight"] @ x, x @ expert, rtol=1e-6)
    grouped = values["target", "layers", 0, "attn", "wo_a"]  # [groups, inputs, rank]
    rank = TARGET.o_lora_rank
    for group in range(TARGET.o_groups):
        rows = stored["layers.0.attn.wo_a.weight"][group * rank : (group + 1) * rank]
        np.testing.assert_allclose(rows @ x, x @ grouped[group], rtol=1e-6)
