"""GGUF files of Llama-type models: the same numbers as from a folder, tokenizer from the file's tables, faults."""

import shutil
import sys
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from gguf.quants import dequantize, quantize
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from dspark_jax import SamplingParams, load
from dspark_jax.checkpoint.gguf_file import open_gguf
from dspark_jax.checkpoint.reader import read_checkpoint
from dspark_jax.errors import CheckpointError, ConfigError
from helpers.dense import dense

# A byte-level vocabulary: control tokens, single bytes, and what the merges make.
BYTES = ["Ġ", "Ċ", *(chr(33 + i) for i in range(87))]
MERGES = ["a b", "ab c", "Ġ a", "1 2"]
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *BYTES, "ab", "abc", "Ġa", "12"]
NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def file_name(key: str) -> str:
    stem = key.removesuffix(".weight")
    if stem in (ends := {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}):
        return f"{ends[stem]}.weight"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.weight"


def write(path: Path, *, tensors=lambda t: None, fields=lambda f: None) -> Path:
    """The tiny Llama as llama.cpp's converter writes it, after `tensors` and `fields` have changed dicts of them."""
    config = dense("llama").config
    numbers = {
        "block_count": config["num_hidden_layers"], "context_length": 256, "embedding_length": 36,
        "feed_forward_length": 40, "attention.head_count": 6, "attention.head_count_kv": 3, "rope.dimension_count": 6,
    }  # fmt: skip
    metadata = {f"llama.{key}": value for key, value in numbers.items()}
    metadata |= {"llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.freq_base": 1e4}
    metadata |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.tokens": TOKENS}
    metadata |= {"tokenizer.ggml.token_type": [3] * 3 + [1] * 93, "tokenizer.ggml.merges": MERGES}
    metadata |= {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.add_bos_token": False}
    metadata |= {"architecture": "llama", "tokenizer.chat_template": "{{ messages }}"}
    found = {}
    for key, value in dense("llama").weights.items():
        value = value.astype(np.float32)
        for part, heads in (("q_proj", 6), ("k_proj", 3)):
            if part in key:  # llama.cpp: convert_hf_to_gguf.py, LlamaModel.permute
                value = value.reshape(heads, 2, 3, 36).swapaxes(1, 2).reshape(value.shape)
        found[file_name(key)] = value
    fields(metadata)
    tensors(found)
    writer = gguf.GGUFWriter(path, metadata.pop("architecture"))
    for key, value in metadata.items():
        kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        kinds.get(type(value), writer.add_array)(key, value)
    for key, value in found.items():
        writer.add_tensor(key, np.ascontiguousarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def test_the_same_parameters_as_from_a_folder(file: Path, tmp_path: Path):
    found = open_gguf(file, dtype=jnp.float32)
    wanted = read_checkpoint(dense("llama").write(tmp_path), dtype=jnp.float32)
    assert found.loaded.config.rms_norm_eps == pytest.approx(1e-5)
    for name in ("num_key_value_heads", "head_dim", "tie_word_embeddings", "rope_theta", "vocab_size", "eos_token_ids"):
        assert getattr(found.loaded.config, name) == getattr(wanted.config, name)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, found.loaded.params), wanted.params)
    assert found.chat is not None and found.chat.names == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}


def test_quantised_tensors_and_tied_embeddings(tmp_path: Path):
    kinds = gguf.GGMLQuantizationType
    rng = np.random.default_rng(0)
    numbers = {
        "embedding_length": 32, "feed_forward_length": 64, "block_count": 1, "attention.head_count": 2,
        "attention.head_count_kv": 2, "rope.dimension_count": 16,
    }  # fmt: skip
    path, weights = tmp_path / "quantised.gguf", {}

    def fields(found: dict) -> None:
        found.update({f"llama.{key}": value for key, value in numbers.items()})
        found["tokenizer.ggml.add_bos_token"] = True

    def tensors(found: dict) -> None:
        found.clear()
        matrices = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (32, 32))
        matrices |= {"ffn_gate": (64, 32), "ffn_up": (64, 32), "ffn_down": (32, 64)}
        found |= {f"blk.0.{name}.weight": rng.normal(size=shape).astype(np.float32) for name, shape in matrices.items()}
        found |= {f"{name}.weight": np.ones(32, np.float32) for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm")}
        found["token_embd.weight"] = rng.normal(size=(96, 32)).astype(np.float32)
        weights.update(found)

    write(path, fields=fields, tensors=tensors)
    plain = open_gguf(path, dtype=jnp.float32).loaded
    assert plain.config.tie_word_embeddings and plain.config.bos_token_id == 1
    # The same file with 4-bit matrices, made by the package: their values are those of `dequantize`.
    packed = tmp_path / "packed.gguf"
    writer = gguf.GGUFWriter(packed, "llama")
    for key, field in gguf.GGUFReader(path).fields.items():
        if not key.startswith(("GGUF.", "general.architecture")):
            writer.add_key_value(key, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None)
    for key, value in weights.items():
        if value.ndim == 2:
            writer.add_tensor(key, quantize(value, kinds.Q4_1), raw_dtype=kinds.Q4_1)
        else:
            writer.add_tensor(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = open_gguf(packed, dtype=jnp.float32).loaded
    flat = {".".join(map(str, path)): np.asarray(v.get_value()) for path, v in nnx.to_flat_state(found.params)}
    for key, name in (("mlp.down_proj", "ffn_down"), ("self_attn.v_proj", "attn_v")):
        value = weights[f"blk.0.{name}.weight"]
        codes = dequantize(quantize(value, kinds.Q4_1), kinds.Q4_1)
        np.testing.assert_array_equal(flat[f"target.model.layers.0.{key}.weight"], codes.T)
        assert 0 < np.abs(codes - value).max() < 0.4


def test_tokenizer(file: Path):
    tokenizer = open_gguf(file, dtype=jnp.float32).tokenizer
    reference = Tokenizer(models.BPE({t: i for i, t in enumerate(TOKENS)}, [tuple(m.split()) for m in MERGES]))
    split = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)])
    reference.pre_tokenizer = split  # type: ignore[assignment]
    reference.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    text = "abc ab 1212a"
    ids = tokenizer.encode(text).ids
    assert ids == reference.encode(text).ids and tokenizer.decode(ids) == text
    assert TOKENS.index("abc") in ids and TOKENS.index("12") not in ids  # digits stay apart
    assert tokenizer.encode("<|im_end|>a").ids == [2, TOKENS.index("a")]
    assert tokenizer.decode([2, *ids]) == text


def test_generates(file: Path):
    lm = load(file, dtype=jnp.float32, max_len=64)
    assert lm.encode("<|im_end|>")[0] != 2  # a prompt cannot forge a control token
    golden = dense("llama")
    (answer,) = lm.generate([golden.prompt], SamplingParams(max_tokens=len(golden.answer)), ignore_eos=True)
    assert list(answer.tokens) == golden.answer


def test_faults(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refused(match: str, kind: type[Exception] = CheckpointError, **edits) -> str:
        with pytest.raises(kind, match=match) as found:
            open_gguf(write(tmp_path / "x.gguf", **edits), dtype=jnp.float32)
        return str(found.value)

    def damage(found: dict) -> None:
        del found["blk.1.ffn_up.weight"]
        found["blk.0.attn_k.weight"] = found["blk.0.attn_k.weight"].T
        found["rope_freqs.weight"] = np.ones(3, np.float32)

    text = refused("4 faults", tensors=damage, fields=lambda f: f.update({"tokenizer.ggml.pre": "llama-bpe"}))
    for part in (
        "blk.1.ffn_up.weight is missing",
        "blk.0.attn_k.weight has shape [36, 18]; expected [18, 36]",
        "rope_freqs.weight is unexpected",
        "tokenizer.ggml.pre is 'llama-bpe'; only 'smollm' is supported",
    ):
        assert part in text
    refused("general.architecture is 'qwen3'", fields=lambda f: f.update(architecture="qwen3"))
    refused("lacks intermediate_size", ConfigError, fields=lambda f: f.pop("llama.feed_forward_length"))
    scaled = {"llama.rope.scaling.type": "yarn"}
    refused("rope_scaling is of type 'yarn'", ConfigError, fields=lambda f: f.update(scaled))
    refused(r"block_count is 1000000000, and .* 3 layers", fields=lambda f: f.update({"llama.block_count": 10**9}))
    refused("rope.dimension_count is 4", fields=lambda f: f.update({"llama.rope.dimension_count": 4}))
    refused("merges do not belong", fields=lambda f: f.update({"tokenizer.ggml.merges": ["a §"]}))
    with pytest.raises(ConfigError, match="weights is 'quantised'; a GGUF file is dequantised"):
        load(file, weights="quantised")
    bad = write(tmp_path / "nan.gguf", tensors=lambda t: t["output_norm.weight"].__setitem__(0, np.nan))
    with pytest.raises(CheckpointError, match=r"output_norm\.weight is not finite as float32"):
        load(bad, dtype=jnp.float32, max_len=64)
    short = Path(shutil.copy(file, tmp_path / "short.gguf"))
    for size in (file.stat().st_size // 2, 100, 0):
        with short.open("r+b") as stream:
            stream.truncate(size)
        with pytest.raises(CheckpointError, match=r"short\.gguf: not a sound GGUF file"):
            load(short)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(CheckpointError, match=r"pip install 'dspark-jax\[gguf\]'"):
        load(file)
