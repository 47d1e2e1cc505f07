"""Reading and writing checkpoints: round trips, and one clear error for each kind of damage."""

import json
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models

from dspark_jax.checkpoint import layout, values
from dspark_jax.checkpoint.reader import CheckpointNotice, read_checkpoint, read_tokenizer
from dspark_jax.checkpoint.writer import write_checkpoint
from dspark_jax.errors import CheckpointError, ConfigError, DSparkError
from helpers.checkpoints import DRAFT, TARGET, edit_config, edit_tensors, random_params, with_head, write_tiny

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def error_of(folder: Path, **options) -> str:
    """The text of the one error that reading raises; it must name the folder."""
    with pytest.raises(DSparkError) as caught:
        read_checkpoint(folder, dtype=jnp.float32, **options)
    assert str(folder) in str(caught.value)
    return str(caught.value)


def flat(params: nnx.State) -> dict:
    return {path: v.get_value() for path, v in nnx.to_flat_state(params)}


def assert_same(found: nnx.State, expected: nnx.State) -> None:
    found, expected = flat(found), flat(expected)
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_array_equal(np.asarray(found[path], np.float32), np.asarray(value, np.float32), err_msg=path)


# Round trips


@pytest.mark.parametrize("draft", [DRAFT, with_head("gated"), with_head("rnn"), with_head("none"), None], ids=str)
def test_round_trip_keeps_every_bit(draft, tmp_path):
    params = write_tiny(tmp_path, draft)
    loaded = read_checkpoint(tmp_path, dtype=jnp.float32)
    assert (loaded.config, loaded.draft) == (TARGET, draft)
    assert_same(loaded.params, params)
    model = nnx.merge(loaded.graph, loaded.params)
    assert model.target.axis == "expert" and (model.draft is None) == (draft is None)


def test_loaded_dtypes(tiny):
    loaded = read_checkpoint(tiny, dtype=jnp.bfloat16, axis=None)
    values = flat(loaded.params)
    wanted = {"weight": jnp.bfloat16, "fp32": jnp.float32, "int": jnp.int32}
    for entry in layout.entries(loaded.params):
        assert values[entry.path].dtype == wanted[entry.dtype], entry.path
        assert isinstance(values[entry.path], jax.Array)
    model = nnx.merge(loaded.graph, loaded.params)
    assert model.target.dtype == jnp.bfloat16 and model.target.axis is None
    assert_same(loaded.params, random_params(TARGET, DRAFT))


def test_place_receives_every_parameter(tiny):
    seen = []

    def place(path, value):
        seen.append(path)
        return jnp.array(value)

    assert set(flat(read_checkpoint(tiny, dtype=jnp.float32, place=place).params)) == set(seen)


def test_file_dtypes_and_metadata(tiny):
    with safe_open(tiny / SINGLE, framework="numpy") as file:
        dtypes = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
        assert file.metadata() == {"format": "pt"}
    assert dtypes["layers.0.attn.wq_a.weight"] == dtypes["layers.0.ffn.experts.3.w2.weight"] == "BF16"
    assert dtypes["layers.0.hc_attn_fn"] == dtypes["mtp.0.ffn.gate.bias"] == dtypes["hc_head_scale"] == "F32"
    assert dtypes["layers.0.ffn.gate.tid2eid"] == "I64"
    assert set(dtypes.values()) == {"BF16", "F32", "I64"}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_other_file_dtypes_load(dtype, tmp_path):
    params = write_tiny(tmp_path, dtype=dtype)
    loaded = read_checkpoint(tmp_path, dtype=jnp.float32).params
    if dtype == "float32":
        assert_same(loaded, params)
    for path, value in flat(params).items():
        np.testing.assert_allclose(np.asarray(flat(loaded)[path]), np.asarray(value), rtol=1e-3, atol=1e-6)


def test_sharded_round_trip_equals_one_file(tiny, tmp_path):
    folder = tmp_path / "sharded"
    params = write_tiny(folder, max_shard_bytes=2000)
    index = json.loads((folder / INDEX).read_text())
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 3 and {s.name for s in shards} == set(index["weight_map"].values())
    assert all(sum(a.nbytes for a in load_file(s).values()) <= 2000 for s in shards)
    whole = load_file(tiny / SINGLE)
    assert index["metadata"]["total_size"] == sum(a.nbytes for a in whole.values())
    parts = {name: array for shard in shards for name, array in load_file(shard).items()}
    assert parts.keys() == whole.keys() and all((parts[k] == whole[k]).all() for k in whole)
    assert_same(read_checkpoint(folder, dtype=jnp.float32).params, params)


def test_rewriting_leaves_no_file_of_the_earlier_model(tmp_path):
    write_tiny(tmp_path, max_shard_bytes=2000)
    (tmp_path / "tokenizer.json").write_text("{}")
    params = write_tiny(tmp_path, None)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", SINGLE, "tokenizer.json"]
    assert_same(read_checkpoint(tmp_path, dtype=jnp.float32).params, params)


def test_writer_refuses_what_could_not_be_read_back(tiny):
    before = (tiny / SINGLE).read_bytes()
    params = random_params(TARGET, DRAFT)
    with pytest.raises(CheckpointError, match=r"draft\.mtp\.0.* has no place in this configuration"):
        write_checkpoint(tiny, TARGET, None, params)
    with pytest.raises(CheckpointError, match=r"experts\.w1 makes 4 tensors .* wants 6 tensors"):
        write_checkpoint(tiny, replace(TARGET, n_routed_experts=6), DRAFT, params)
    with pytest.raises(CheckpointError, match="dtype is 'int8'"):
        write_checkpoint(tiny, TARGET, DRAFT, params, dtype="int8")
    for path, variable in nnx.to_flat_state(params):
        if path[-2:] == ("norm", "weight") and path[0] == "target":
            variable.set_value(variable.get_value().at[0].set(jnp.nan))
    with pytest.raises(CheckpointError, match=r"norm\.weight is not finite as bfloat16"):
        write_checkpoint(tiny, TARGET, DRAFT, params)
    assert (tiny / SINGLE).read_bytes() == before
    assert sorted(p.name for p in tiny.iterdir()) == ["config.json", SINGLE]


# The drafter that config.json and the weights agree on


def test_mtp_tensors_without_dspark_keys_load_as_a_target_with_one_notice(tiny):
    edit_config(tiny, dspark_block_size=None)
    with pytest.warns(CheckpointNotice, match="no dspark_block_size") as notices:
        loaded = read_checkpoint(tiny, dtype=jnp.float32)
    assert len(notices) == 1 and loaded.draft is None
    assert all(path[0] == "target" for path in flat(loaded.params))


def test_stage_count_comes_from_the_weights(tiny):
    edit_config(tiny, num_nextn_predict_layers=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_checkpoint(tiny, dtype=jnp.float32).draft.num_stages == 2


def test_dspark_keys_without_stages(tmp_path):
    write_tiny(tmp_path, None)
    edit_config(tmp_path, dspark_block_size=3, dspark_noise_token_id=0, dspark_target_layer_ids=[1])
    assert "the checkpoint has 0 mtp.* stages" in error_of(tmp_path)


def test_gap_in_the_stages(tiny):
    def edit(tensors):
        for key in [k for k in tensors if k.startswith("mtp.1.")]:
            tensors[key.replace("mtp.1.", "mtp.2.")] = tensors.pop(key)

    edit_tensors(tiny, edit)
    assert "numbered [0, 2]; expected 0 … 1" in error_of(tiny)


def test_draft_config_contradicts_the_target(tiny):
    edit_config(tiny, dspark_target_layer_ids=[1, 3], dspark_noise_token_id=13)
    text = error_of(tiny)
    assert "dspark_target_layer_ids is [1, 3]" in text and "dspark_noise_token_id is 13" in text


# Damaged and contradictory weights: each kind, and several at once


def test_missing_tensors_are_all_named(tiny):
    names = ("norm.weight", "layers.2.ffn.experts.3.w2.weight", "mtp.1.hc_head_fn")
    edit_tensors(tiny, lambda t: [t.pop(name) for name in names])
    text = error_of(tiny)
    for name in names:
        assert f"- {name} is missing" in text
    assert "3 faults" in text


def test_long_lists_are_cut_with_a_count(tiny):
    edit_tensors(tiny, lambda t: [t.pop(k) for k in list(t) if ".experts." in k and k.startswith("layers.")])
    text = error_of(tiny)
    assert text.count("is missing") == 10 and f"and {3 * 4 * 3 - 10} more of this kind" in text
    assert text.index("layers.0.ffn") < text.index("more of this kind")


def test_unexpected_tensors(tiny):
    edit_tensors(tiny, lambda t: t.update({"layers.3.attn_norm.weight": np.ones(8, np.float32)}))
    assert "layers.3.attn_norm.weight is unexpected" in error_of(tiny)


def test_wrong_shape_names_both_shapes(tiny):
    edit_tensors(tiny, lambda t: t.update({"layers.0.attn.wq_a.weight": t["layers.0.attn.wq_a.weight"].T}))
    assert "layers.0.attn.wq_a.weight has shape [8, 6]; expected [6, 8]" in error_of(tiny)


def test_config_that_contradicts_the_weights(tiny):
    edit_config(tiny, q_lora_rank=7, n_routed_experts=5)
    text = error_of(tiny)
    assert "layers.0.attn.wq_a.weight has shape [6, 8]; expected [7, 8]" in text
    assert "layers.0.ffn.experts.4.w1.weight is missing" in text


def test_wrong_dtypes(tiny):
    edit_tensors(
        tiny,
        lambda t: t.update(
            {
                "norm.weight": t["norm.weight"].astype(np.float64),
                "layers.0.ffn.gate.tid2eid": t["layers.0.ffn.gate.tid2eid"].astype(np.float32),
            }
        ),
    )
    text = error_of(tiny)
    assert "norm.weight has dtype F64; expected BF16, F16 or F32" in text
    assert "layers.0.ffn.gate.tid2eid has dtype F32; expected I64 or I32" in text


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite(value, tiny):
    def edit(t):
        t["layers.1.attn.compressor.ape"][2, 3] = value
        t["mtp.0.ffn.experts.1.w3.weight"][1, 2] = value

    edit_tensors(tiny, edit)
    text = error_of(tiny)
    assert "layers.1.attn.compressor.ape holds 1 NaN or infinite values, the first at [2, 3]" in text
    assert "mtp.0.ffn.experts.1.w3.weight holds 1 NaN or infinite values, the first at [1, 2]" in text


def test_values_beyond_the_wanted_dtype(tmp_path):
    write_tiny(tmp_path, dtype="float32")
    edit_tensors(tmp_path, lambda t: t["head.weight"].__setitem__((0, 0), 1e5))
    read_checkpoint(tmp_path, dtype=jnp.bfloat16)
    with pytest.raises(CheckpointError, match=r"head\.weight exceeds the range of float16"):
        read_checkpoint(tmp_path, dtype=jnp.float16)


@pytest.mark.parametrize("expert", [4, -1])
def test_hash_table_ids_out_of_range(expert, tiny):
    edit_tensors(tiny, lambda t: t["layers.0.ffn.gate.tid2eid"].__setitem__((5, 1), expert))
    assert f"layers.0.ffn.gate.tid2eid holds expert {expert} at [5, 1]; expected ids in [0, n_rout" in error_of(tiny)


def test_hash_table_with_a_repeated_expert(tiny):
    edit_tensors(tiny, lambda t: t["layers.0.ffn.gate.tid2eid"].__setitem__(7, [2, 2]))
    assert "layers.0.ffn.gate.tid2eid names an expert twice in row 7 ([2, 2])" in error_of(tiny)


def test_faults_of_different_kinds_come_in_one_error_and_nothing_is_placed(tiny):
    def edit(t):
        t.pop("norm.weight")
        t["bogus"] = np.zeros(1, np.float32)
        t["head.weight"] = t["head.weight"][:5]
        t["embed.weight"] = t["embed.weight"].astype(np.float64)
        t["hc_head_base"][0] = np.nan
        t["layers.0.ffn.gate.tid2eid"][3] = [0, 9]

    edit_tensors(tiny, edit)
    placed = []
    text = error_of(tiny, place=lambda path, value: placed.append(path))
    for part in (
        "6 faults",
        "norm.weight is missing",
        "bogus is unexpected",
        "head.weight has shape [5, 8]; expected [13, 8]",
        "embed.weight has dtype F64",
        "hc_head_base holds 1 NaN",
        "tid2eid holds expert 9 at [3, 1]",
    ):
        assert part in text
    assert placed == []


def test_a_large_checkpoint_with_faulty_headers_is_not_read(tiny, monkeypatch):
    def edit(t):
        t.pop("norm.weight")
        t["hc_head_base"][0] = np.nan

    edit_tensors(tiny, edit)
    monkeypatch.setattr(values, "_SCAN_BYTES", 100)
    text = error_of(tiny)
    assert "norm.weight is missing" in text and "hc_head_base" not in text


# Damaged files


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda raw: raw[:-7], "truncated"),
        (lambda raw: raw[: len(raw) // 100], "truncated"),
        (lambda raw: b"", "truncated: 0 bytes"),
        (lambda raw: raw[:8] + b"!" + raw[9:], "invalid JSON"),
        (lambda raw: b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "cannot be read"),
        (lambda raw: raw + b"tail", "cannot be read"),
    ],
    ids=["tail cut", "header cut", "empty", "header", "pointer", "too long"],
)
def test_damaged_files(damage, said, tiny):
    (tiny / SINGLE).write_bytes(damage((tiny / SINGLE).read_bytes()))
    text = error_of(tiny)
    assert SINGLE in text and said in text and "download it again" in text and "is missing" not in text


def test_no_weights_at_all(tiny):
    (tiny / SINGLE).rename(tiny / "other.safetensors")
    assert "no weights (found other.safetensors, which no index names)" in error_of(tiny)


def test_a_file_without_tensors(tiny):
    save_file({}, tiny / SINGLE)
    assert "hold no tensors" in error_of(tiny)


@pytest.fixture
def sharded(tmp_path) -> Path:
    write_tiny(tmp_path / "sharded", max_shard_bytes=4000)
    return tmp_path / "sharded"


def test_missing_and_truncated_shards_are_listed_together(sharded):
    first, second, *_ = sorted(sharded.glob("model-*.safetensors"))
    first.unlink()
    second.write_bytes(second.read_bytes()[:-1])
    text = error_of(sharded)
    assert f"{first.name} is missing; download it again" in text
    assert f"{second.name} cannot be read (truncated" in text
    assert text.count("is missing") == 1  # not every tensor of the lost files again


def test_index_that_contradicts_its_files(sharded):
    index = json.loads((sharded / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    index["weight_map"]["norm.weight"], old = files[0], index["weight_map"]["norm.weight"]
    assert old != files[0]
    del index["weight_map"]["embed.weight"]
    (sharded / INDEX).write_text(json.dumps(index))
    text = error_of(sharded)
    assert f"{INDEX} puts norm.weight into {files[0]}, which does not hold it" in text
    assert f"holds embed.weight, which {INDEX} does not list" in text


def test_a_tensor_in_two_files(sharded):
    first, second, *_ = sorted(sharded.glob("model-*.safetensors"))
    name = next(iter(load_file(first)))
    edit_tensors(sharded, lambda t: t.update({name: load_file(first)[name]}), second.name)
    assert f"{name} is in {first.name} and in {second.name}; expected one" in error_of(sharded)


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ("{", "not valid JSON"),
        ("[]", "holds [] (list); expected a JSON object"),
        ("{}", "no weight_map"),
        ('{"weight_map": {"norm.weight": "../model.safetensors"}}', "expected the name of a file in the folder"),
        ('{"weight_map": {"norm.weight": 3}}', "expected the name of a file in the folder"),
    ],
)
def test_index_that_is_none(index, said, sharded):
    (sharded / INDEX).write_text(index)
    assert said in error_of(sharded)


def test_both_a_single_file_and_an_index(tiny, sharded):
    shutil.copy(tiny / SINGLE, sharded / SINGLE)
    assert f"both {SINGLE} and {INDEX}" in error_of(sharded)


def test_folder_and_config_errors(tiny, tmp_path):
    assert "no such folder" in error_of(tmp_path / "nowhere")
    (tiny / "config.json").write_bytes(b"\xff\xfe")
    assert "not valid JSON" in error_of(tiny)
    (tiny / "config.json").unlink()
    assert "no config.json" in error_of(tiny)


def test_impossible_config_is_a_config_error(tiny):
    edit_config(tiny, o_groups=3)
    with pytest.raises(ConfigError, match=r"config\.json: o_groups is 3"):
        read_checkpoint(tiny, dtype=jnp.float32)


def test_impossible_dtype(tiny):
    with pytest.raises(ConfigError, match="dtype is int8; expected float32"):
        read_checkpoint(tiny, dtype=jnp.int8)


# The tokenizer


def save_tokenizer(folder: Path, size: int) -> None:
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0"))
    tokenizer.enable_truncation(1)
    tokenizer.save(str(folder / "tokenizer.json"))


def test_tokenizer_reads_and_does_not_truncate(tiny):
    save_tokenizer(tiny, 13)
    tokenizer = read_tokenizer(tiny)
    assert tokenizer.get_vocab_size() == 13 and tokenizer.truncation is None and tokenizer.padding is None


def test_tokenizer_faults(tiny):
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        read_tokenizer(tiny)
    save_tokenizer(tiny, 14)
    with pytest.raises(CheckpointError, match=r"token 'w13' has id 13, but config\.json's vocab_size is 13"):
        read_tokenizer(tiny)
    (tiny / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a tokenizer"):
        read_tokenizer(tiny)
