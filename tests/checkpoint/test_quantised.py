"""fp8 and fp4 checkpoints in the published layout: every code and scale, both ways of keeping them, and what is refused."""

import gc
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from dspark_jax.checkpoint import layout
from dspark_jax.checkpoint.files import TensorFiles
from dspark_jax.checkpoint.quantised import dequantised
from dspark_jax.checkpoint.reader import open_checkpoint, read_checkpoint
from dspark_jax.checkpoint.writer import write_checkpoint
from dspark_jax.errors import CheckpointError, ConfigError
from dspark_kernels.block_scaled import BlockScaled, widened
from helpers.checkpoints import DRAFT, TARGET, edit_config, write_tiny
from helpers.quantised import fp4_quantised, fp8_quantised, write_quantised

# Several blocks in a row, and last blocks that are not whole.
CONFIG = replace(TARGET, hidden_size=144, moe_intermediate_size=48, q_lora_rank=130)
EXPERT, DENSE = "layers.0.ffn.experts.1.w1", "mtp.0.ffn.shared_experts.w2"


def number(code: int, exponent_bits: int, mantissa_bits: int) -> float:
    """A small float by its definition: sign, exponent, mantissa."""
    bias = 2 ** (exponent_bits - 1) - 1
    sign = -1.0 if code >> (exponent_bits + mantissa_bits) else 1.0
    exponent, mantissa = (code >> mantissa_bits) % 2**exponent_bits, (code % 2**mantissa_bits) / 2**mantissa_bits
    return sign * (math.ldexp(mantissa, 1 - bias) if exponent == 0 else math.ldexp(1 + mantissa, exponent - bias))


FP8_NUMBERS = np.array([number(code, 4, 3) for code in range(256)])
FP4_NUMBERS = np.array([number(code, 2, 1) for code in range(16)])


def golden(codes: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Section 5.1 of the reference, in float64, rounded once to float32 (which changes nothing below 2^128)."""
    exponents = scale.view(np.uint8).astype(int) - 127
    if codes.dtype == np.int8:
        o, i = np.indices((codes.shape[0], 2 * codes.shape[1]))
        byte = codes.view(np.uint8)[o, i // 2]
        value, exponent = FP4_NUMBERS[np.where(i % 2, byte >> 4, byte & 15)], exponents[o, i // 32]
    else:
        o, i = np.indices(codes.shape)
        value, exponent = FP8_NUMBERS[codes.view(np.uint8)], exponents[o // 128, i // 128]
    with np.errstate(over="ignore"):
        return np.ldexp(value, exponent).astype(np.float32)


def same_bits(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(np.asarray(found).view(np.uint32), np.asarray(expected, np.float32).view(np.uint32))


def every(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Every code that is a number, with every scale that is one."""
    scales = np.arange(255, dtype=np.uint8)
    if kind == "fp4":
        return np.tile(np.arange(256, dtype=np.uint8).view(np.int8)[:240].reshape(15, 16), (17, 1)), scales[:, None]
    numbers = np.array([c for c in range(256) if c & 0x7F != 0x7F], np.uint8)
    blocks = [np.resize(numbers, (2, 128)) for _ in scales]
    return np.concatenate(blocks, axis=1).view(jnp.float8_e4m3fn), scales[None]


@pytest.mark.parametrize("kind", ["fp4", "fp8"])
def test_every_code_and_scale_by_the_formula(kind):
    codes, scale = every(kind)
    expected = golden(codes, scale)
    same_bits(dequantised(kind, codes.view(np.uint8), scale), expected)
    on_device = BlockScaled(jnp.asarray(codes.view(np.uint8).T if kind == "fp4" else codes.T), jnp.asarray(scale.T))
    found = np.asarray(jax.jit(widened, static_argnums=1)(on_device, jnp.float32)).T
    scales = np.repeat(scale, 32, 1)[:, :32] if kind == "fp4" else np.repeat(np.repeat(scale, 128, 1), 2, 0)
    normal = (np.abs(expected) >= 2.0**-126) & (scales > 0) | (expected == 0)
    assert normal.mean() > 0.9
    same_bits(np.ascontiguousarray(found)[normal], expected[normal])
    assert np.isin(found[~normal], [0, *expected[~normal]]).all() and (np.abs(found) <= np.abs(expected)).all()
    narrow = np.asarray(jax.jit(widened, static_argnums=1)(on_device, jnp.bfloat16)).T.astype(np.float32)
    same_bits(narrow[normal], expected[normal])  # bfloat16 loses nothing


@pytest.mark.parametrize("quantise", [fp4_quantised, fp8_quantised])
@pytest.mark.parametrize("shape", [(130, 258), (128, 256), (3, 34)])
def test_blocks_of_any_matrix_by_the_formula(quantise, shape):
    rng = np.random.default_rng(0)
    weight = (rng.normal(size=shape) * np.exp(4 * rng.normal(size=shape))).astype(np.float32)
    codes, scale = quantise(weight)
    assert len(set(scale.view(np.uint8).reshape(-1).tolist())) > 1 or scale.size == 1
    expected, kind = golden(codes, scale), "fp4" if codes.dtype == np.int8 else "fp8"
    same_bits(dequantised(kind, codes.view(np.uint8), scale.view(np.uint8)), expected)
    stored = codes.view(np.uint8).T if kind == "fp4" else codes.T
    on_device = BlockScaled(jnp.asarray(stored), jnp.asarray(scale.view(np.uint8).T))
    same_bits(np.asarray(widened(on_device, jnp.float32)).T.copy(), expected)


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> tuple[Path, dict]:
    folder = tmp_path_factory.mktemp("quantised")
    return folder, write_quantised(folder, CONFIG, DRAFT)


@pytest.fixture
def folder(written, tmp_path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(written[0], tmp_path / "model"))


def expected_numbers(tensors: dict) -> dict:
    """What the files' tensors stand for, by key."""
    found = {}
    for key, value in tensors.items():
        scale = tensors.get(f"{key.removesuffix('.weight')}.scale") if key.endswith(".weight") else None
        if not key.endswith(".scale"):
            found[key] = value if scale is None else golden(value, scale)
    return found


def stored(params: nnx.State) -> dict:
    """Arrays by checkpoint key."""
    values = {path: np.asarray(v.get_value()) for path, v in nnx.to_flat_state(params)}
    entries = layout.entries(params)
    return {k: a for e in entries for k, a in zip(e.keys, e.save(values[e.path]), strict=True)}


def test_a_folder_in_the_published_layout_is_dequantised_bit_for_bit(written):
    path, tensors = written
    kinds = {key: value.dtype.name for key, value in tensors.items()}
    assert kinds[f"{EXPERT}.weight"] == "int8" and kinds["layers.0.attn.wo_a.weight"] == "float8_e4m3fn"
    assert tensors["layers.1.attn.wq_b.scale"].shape == (1, 2) and tensors[f"{EXPERT}.scale"].shape == (48, 5)
    loaded = read_checkpoint(path, dtype=jnp.float32)
    assert loaded.config == CONFIG and loaded.draft == DRAFT
    found, expected = stored(loaded.params), expected_numbers(tensors)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_array_equal(found[key], value.astype(np.float32), err_msg=key)
    narrow = stored(read_checkpoint(path, dtype=jnp.bfloat16).params)
    for key, value in expected.items():
        if key.endswith("weight"):
            np.testing.assert_array_equal(narrow[key].astype(np.float32), value.astype(np.float32), err_msg=key)


@pytest.mark.parametrize("kind", ["fp4", pytest.param("fp8", marks=pytest.mark.long)])
def test_experts_that_stay_quantised_are_the_files_bytes(kind, written, tmp_path):
    path, tensors = written
    if kind == "fp8":
        path = tmp_path
        tensors = write_quantised(path, CONFIG, DRAFT, experts="fp8")
    loaded = read_checkpoint(path, dtype=jnp.float32, weights="quantised-all")
    assert loaded.config == replace(CONFIG, expert_weights=kind, linear_weights="fp8")
    found, dense = stored(loaded.params), expected_numbers(tensors)
    for key, value in tensors.items():
        name = key.rpartition(".")[0]
        if f"{name}.scale" in found:  # also attention's and the like, of which the tiny model cuts two by no block
            np.testing.assert_array_equal(found[key].view(np.uint8), value.view(np.uint8), err_msg=key)
        elif not key.endswith(".scale"):
            np.testing.assert_array_equal(found[key], dense[key].astype(np.float32), err_msg=key)
    experts = nnx.merge(loaded.graph, loaded.params).draft.mtp[1].ffn.experts.weights()
    for part, weight in zip(("w1", "w3", "w2"), experts, strict=True):
        for e, matrix in enumerate(np.asarray(widened(weight, jnp.float32))):
            np.testing.assert_array_equal(matrix.T, dense[f"mtp.1.ffn.experts.{e}.{part}.weight"])


@pytest.mark.parametrize("kind", ["fp4", pytest.param("fp8", marks=pytest.mark.long)])
def test_the_writer_gives_quantised_experts_back(kind, tmp_path):
    write_quantised(tmp_path / "a", CONFIG, DRAFT, experts=kind)
    first = read_checkpoint(tmp_path / "a", dtype=jnp.bfloat16, weights="quantised")
    write_checkpoint(tmp_path / "b", first.config, first.draft, first.params, max_shard_bytes=200_000)
    second = read_checkpoint(tmp_path / "b", dtype=jnp.bfloat16, weights="quantised")
    assert second.config == first.config and json.loads((tmp_path / "b/config.json").read_text())["expert_dtype"] == kind
    for (path, a), (_, b) in zip(nnx.to_flat_state(first.params), nnx.to_flat_state(second.params), strict=True):
        assert a.get_value().dtype == b.get_value().dtype
        np.testing.assert_array_equal(np.asarray(a.get_value()), np.asarray(b.get_value()), err_msg=str(path))


# One parameter at a time


def test_reading_holds_one_parameter_at_a_time(written, monkeypatch):
    """Only the tensors of the parameter that is asked for, each once; and it is not kept."""
    opened = open_checkpoint(written[0], dtype=jnp.float32, weights="quantised")
    leaves = {path: v.get_value() for path, v in nnx.to_flat_state(opened.params)}
    seen = []
    real = TensorFiles.read
    monkeypatch.setattr(TensorFiles, "read", lambda self, name: seen.append(name) or real(self, name))
    for path, leaf in leaves.items():
        seen.clear()
        array = np.asarray(leaf)
        assert (array.shape, array.dtype) == (leaf.shape, leaf.dtype), path
        keys = {k for e in layout.entries(opened.params) if e.path == path for k in e.keys}
        assert {k.replace(".scale", ".weight") for k in seen} == {k.replace(".scale", ".weight") for k in keys}
        assert len(seen) == len(set(seen)) and not any(isinstance(v, np.ndarray) for v in vars(leaf).values())


# What is refused


def edit(folder: Path, change) -> None:
    """Changes tensors of a sharded folder with 8-bit floats; `change` gets all of them."""
    from safetensors import safe_open

    index = json.loads((folder / "model.safetensors.index.json").read_text())
    raw = {}
    with_dtype = {"F8_E4M3": jnp.float8_e4m3fn, "F8_E8M0": jnp.float8_e8m0fnu}
    for file in sorted(set(index["weight_map"].values())):
        data = (folder / file).read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        with safe_open(folder / file, framework="numpy") as handle:
            for name, entry in header.items():
                if entry.get("dtype") in with_dtype:
                    first, last = (8 + length + at for at in entry["data_offsets"])
                    codes = np.frombuffer(data[first:last], np.uint8).reshape(entry["shape"])
                    raw[name] = codes.copy().view(with_dtype[entry["dtype"]])
                elif name != "__metadata__":
                    raw[name] = handle.get_tensor(name)
        (folder / file).unlink()
    (folder / "model.safetensors.index.json").unlink()
    change(raw)
    save_file({k: np.ascontiguousarray(v) for k, v in raw.items()}, folder / "model.safetensors", metadata={"format": "pt"})


def damage(t: dict) -> None:
    """One of each kind."""
    t.pop("layers.0.attn.wq_b.scale")
    t.pop(f"{EXPERT}.scale")
    t["layers.1.attn.wq_a.scale"] = t["layers.1.attn.wq_a.scale"][:, :1]
    t["layers.1.attn.wo_b.scale"] = np.ones(t["layers.1.attn.wo_b.scale"].shape, np.float32)
    t["layers.1.ffn.experts.0.w2.weight"] = t["layers.1.ffn.experts.0.w2.weight"][:, :-1]
    t["layers.2.attn.wkv.weight"] = t["layers.2.attn.wkv.weight"].astype(jnp.float8_e5m2)
    t["mtp.0.attn.wq_a.weight"] = t["mtp.0.attn.wq_a.weight"].view(np.int8)
    t["mtp.1.ffn.experts.3.w3.scale"].view(np.uint8)[1, 2] = 255
    t[f"{DENSE}.weight"].view(np.uint8)[4, 5] = 0xFF


SAID = (
    "layers.0.attn.wq_b.scale is missing: layers.0.attn.wq_b.weight has dtype F8_E4M3, which needs scales",
    "layers.1.attn.wq_a.scale has shape [2, 1]; expected [2, 2]",
    "layers.1.attn.wo_b.scale has dtype F32; expected F8_E8M0",
    "layers.2.attn.wkv.weight has dtype F8_E5M2; expected BF16, F16 or F32, or F8_E4M3 with scales",
    "mtp.0.attn.wq_a.weight has dtype I8; expected BF16, F16 or F32, or F8_E4M3 with scales",
    "layers.1.ffn.experts.0.w2.weight has shape [144, 23]; expected [144, 24]",
    "mtp.1.ffn.experts.3.w3.scale holds 1 scales of byte 255 (NaN), the first at [1, 2]",
    f"{DENSE}.weight holds 1 NaN codes, the first at [4, 5]",
)


@pytest.mark.parametrize("weights", ["dequantised", "quantised"])
def test_all_faults_of_quantised_tensors_come_in_one_error(weights, folder):
    edit(folder, damage)
    placed: list = []
    with pytest.raises(CheckpointError) as error:
        read_checkpoint(folder, dtype=jnp.float32, weights=weights, place=lambda path, _: placed.append(path))  # type: ignore[arg-type]
    for words in (*SAID, f"{EXPERT}.scale is missing"):
        assert words in str(error.value)
    assert placed == []


@pytest.mark.parametrize("weights", [pytest.param("dequantised", marks=pytest.mark.long), "quantised"])
def test_values_that_are_no_numbers_are_all_named_when_the_first_is_met(weights, folder):
    def change(t):
        for key in ("layers.0.ffn.experts.0.w1.scale", "mtp.1.ffn.experts.3.w3.scale"):
            t[key].view(np.uint8)[1, 2] = 255

    edit(folder, change)
    gc.collect()
    before = len(jax.live_arrays())
    for read in (read_checkpoint, lambda *a, **k: [np.asarray(x) for x in jax.tree.leaves(open_checkpoint(*a, **k).params)]):
        with pytest.raises(CheckpointError, match=r"2 faults.*\n.*mtp\.1\.ffn.*\n.*layers\.0\.ffn.*first at \[1, 2\]"):
            read(folder, dtype=jnp.float32, weights=weights)
    gc.collect()
    assert len(jax.live_arrays()) == before


def test_numbers_beyond_the_wanted_dtype(folder):
    edit(folder, lambda t: t[f"{DENSE}.scale"].view(np.uint8).fill(254))
    with pytest.raises(CheckpointError, match=rf"{DENSE}\.weight exceeds the range of bfloat16"):
        read_checkpoint(folder, dtype=jnp.bfloat16)


def test_another_quantisation_is_refused_by_its_name(folder):
    other = {"quant_method": "awq", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [32, 32]}
    edit_config(folder, quantization_config=other, expert_dtype="nf4")
    with pytest.raises(CheckpointError) as error:
        read_checkpoint(folder, dtype=jnp.float32)
    for words in ("quant_method is 'awq'; only 'fp8'", "weight_block_size is [32, 32]; only [128, 128]", "'nf4'"):
        assert words in str(error.value)


def test_there_must_be_one_format_to_keep(folder, tmp_path):
    write_tiny(tmp_path / "plain")
    with pytest.raises(CheckpointError, match=r"experts\.0\.w1\.weight has dtype BF16: use 'dequantised'"):
        read_checkpoint(tmp_path / "plain", weights="quantised")
    weight = f"{EXPERT}.weight"

    def change(t):
        t[weight], t[f"{EXPERT}.scale"] = fp8_quantised(golden(t[weight], t[f"{EXPERT}.scale"]))

    edit(folder, change)
    with pytest.raises(CheckpointError, match=f"has dtype I8, {EXPERT}.weight has dtype F8_E4M3: use 'dequantised'"):
        read_checkpoint(folder, weights="quantised")
    read_checkpoint(folder)  # each as it is stored
    with pytest.raises(ConfigError, match="weights is 'packed'; expected 'dequantised' or 'quantised' or 'quantised-all'"):
        read_checkpoint(folder, weights="packed")  # type: ignore[arg-type]
