"""Checkpoints in DeepSeek-V4's quantised layout: fp8 linear maps, fp4 or fp8 experts, shards with an index."""

import json
from pathlib import Path
from typing import Literal

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models

from dspark_jax.checkpoint import layout
from dspark_jax.config import DraftConfig, TargetConfig, to_hf
from helpers.checkpoints import random_params

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
# The linear maps that are fp8 in the published files.
FP8 = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "w1", "w2", "w3", "main_proj")


def fp8_quantised(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """e4m3 codes (out, in) and e8m0 scales by blocks of 128 × 128."""
    rows, columns = weight.shape
    codes = np.zeros(weight.shape, jnp.float8_e4m3fn)
    scale = np.zeros((-(-rows // 128), -(-columns // 128)), np.uint8)
    for i, j in np.ndindex(scale.shape):
        block = np.s_[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128]
        exponent = _exponent(np.abs(weight[block]).max() / 448)
        codes[block] = np.ldexp(weight[block], -exponent).astype(jnp.float8_e4m3fn)
        scale[i, j] = exponent + 127
    return codes, scale.view(jnp.float8_e8m0fnu)


def fp4_quantised(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Packed e2m1 codes (out, in / 2) and e8m0 scales (out, in / 32)."""
    rows, columns = weight.shape
    codes = np.zeros(weight.shape, np.uint8)
    scale = np.zeros((rows, -(-columns // 32)), np.uint8)
    for row, block in np.ndindex(scale.shape):
        part = np.s_[row, block * 32 : (block + 1) * 32]
        exponent = _exponent(np.abs(weight[part]).max() / 6)
        value = np.ldexp(weight[part], -exponent)
        nearest = np.abs(np.abs(value)[:, None] - E2M1).argmin(axis=1)
        codes[part] = nearest + 8 * (value < 0)
        scale[row, block] = exponent + 127
    return (codes[:, 0::2] | codes[:, 1::2] << 4).view(np.int8), scale.view(jnp.float8_e8m0fnu)


def _exponent(value: float) -> int:
    """The least e with 2^e of at least `value`."""
    mantissa, exponent = np.frexp(value)
    return int(exponent - (mantissa == 0.5))


def random_tensors(config: TargetConfig, draft: DraftConfig | None, seed: int = 0) -> dict[str, np.ndarray]:
    """Numbers by checkpoint key; rows of linear maps of norm one, so that activations stay moderate."""
    params = random_params(config, draft, seed)
    values = {path: np.asarray(v.get_value()) for path, v in nnx.to_flat_state(params)}
    found = {}
    for entry in layout.entries(params):
        for key, value in zip(entry.keys, entry.save(values[entry.path]), strict=True):
            linear = entry.dtype == "weight" and value.ndim == 2 and not key.startswith("embed")
            found[key] = value / np.sqrt(np.float32(value.shape[1])) if linear else value
    return found


def write_quantised(
    folder: Path,
    config: TargetConfig,
    draft: DraftConfig | None,
    *,
    experts: Literal["fp4", "fp8"] = "fp4",
    seed: int = 0,
    shards: int = 2,
) -> dict[str, np.ndarray]:
    """Writes a random model, its tokenizer included; returns what the files hold by key."""
    tensors: dict[str, np.ndarray] = {}
    for key, value in random_tensors(config, draft, seed).items():
        name, _, last = key.rpartition(".")
        if last == "weight" and name.rpartition(".")[2] in FP8 and "compressor" not in key:
            fp4 = experts == "fp4" and ".experts." in key
            tensors[key], tensors[f"{name}.scale"] = (fp4_quantised if fp4 else fp8_quantised)(value)
        elif last == "weight":
            tensors[key] = value.astype(jnp.bfloat16)
        else:
            tensors[key] = value.astype(np.int64 if last == "tid2eid" else np.float32)
    write_shards(folder, tensors, shards)
    blocks = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
    published = {"expert_dtype": experts, "quantization_config": {**blocks, "activation_scheme": "dynamic"}}
    (folder / "config.json").write_text(json.dumps(to_hf(config, draft) | published | {"num_nextn_predict_layers": 1}))
    words = {f"w{i}": i for i in range(config.vocab_size)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    return tensors


def write_shards(folder: Path, tensors: dict[str, np.ndarray], shards: int = 2) -> None:
    """Weight files and their index; neighbours in the order of names go to different files."""
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(tensors)
    files = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        part = {n: np.ascontiguousarray(tensors[n]) for n in names if files[n] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
