"""Llama-type models in a GGUF file (SmolLM2): weights dequantised, tokenizer and chat template made from the file's tables.

Format: llama.cpp's GGUF version 3, read by the package `gguf` (extra `gguf`).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from dspark_jax.chat import ChatTemplate
from dspark_jax.checkpoint import layout
from dspark_jax.checkpoint.files import listed
from dspark_jax.checkpoint.reader import LoadedCheckpoint
from dspark_jax.config_dense import DenseConfig, dense_from_hf
from dspark_jax.errors import CheckpointError, raise_all

# config.json's names by those of the file, behind "llama."
_NUMBERS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
_TENSORS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_ENDS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_CONTROL, _USER = 3, 4  # kinds of tokens that are no result of merges


class GGUFModel(NamedTuple):
    """What a file holds; parameters are read when they are placed."""

    loaded: LoadedCheckpoint
    tokenizer: Tokenizer
    chat: ChatTemplate | None


def open_gguf(path: Path, *, dtype: Any) -> GGUFModel:
    """Opens a file and checks all but the values of its weights.

    Raises:
      CheckpointError: the file is no GGUF file or damaged, of another architecture or tokenizer, the package is missing, or
        tensors are missing, misshapen or unexpected: all such faults in one message.
      ConfigError: the sizes are impossible.
    """
    try:
        import gguf
    except ImportError:
        raise CheckpointError(f"{path}: needs the package gguf; install it with: pip install 'dspark-jax[gguf]'") from None
    try:
        reader = gguf.GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        tensors = {tensor.name: tensor for tensor in reader.tensors}
    except Exception as error:  # the package lets through whatever numpy says of a file that is cut off
        raise CheckpointError(f"{path}: not a sound GGUF file ({error}); download it again") from error
    config = _config(fields, "output.weight" not in tensors, str(path))
    tokenizer, faults = _tokenizer(fields, config)
    if (turned := fields.get("llama.rope.dimension_count", config.head_dim)) != config.head_dim:
        faults.append(f"llama.rope.dimension_count is {turned}; only all {config.head_dim} channels of a head are supported")
    layers = len({name.split(".")[1] for name in tensors if name.startswith("blk.")})
    if layers != config.num_hidden_layers:  # before a module of an absurd size is laid out
        faults.append(f"llama.block_count is {config.num_hidden_layers}, and the file has tensors of {layers} layers")
        raise_all(CheckpointError, str(path), faults)
    graph, params = layout.skeleton(config, None, dtype=dtype, axis=None)
    entries = layout.entries(params)
    faults += listed(_tensor_faults(entries, tensors))
    raise_all(CheckpointError, str(path), faults)
    assert tokenizer is not None
    values = {
        entry.path: _Deferred(path, config, entry, tensors[_name(entry.keys[0])], jnp.dtype(dtype)) for entry in entries
    }
    nnx.replace_by_pure_dict(params, nnx.traversals.unflatten_mapping(values))
    return GGUFModel(LoadedCheckpoint(config, None, graph, params), tokenizer, _chat(fields, tokenizer))


class _Deferred:
    """A parameter that is dequantised when `np.asarray` asks for it, and not kept."""

    def __init__(self, path: Path, config: DenseConfig, entry: layout.Entry, tensor: Any, dtype: np.dtype):
        self._path, self._config, self._entry, self._tensor = path, config, entry, tensor
        transposed = entry.load([np.broadcast_to(np.float32(0), entry.shape)])
        self.shape, self.dtype = transposed.shape, dtype

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        from gguf.quants import dequantize

        key = self._entry.keys[0]
        found = dequantize(self._tensor.data, self._tensor.tensor_type).astype(np.float32, copy=False)
        for name, heads in (("q_proj", self._config.num_attention_heads), ("k_proj", self._config.num_key_value_heads)):
            found = halves(found, heads) if name in key else found
        with np.errstate(over="ignore"):
            found = self._entry.load([found]).astype(dtype or self.dtype)
        if not np.isfinite(found).all():
            raise CheckpointError(f"{self._path}: {self._tensor.name} is not finite as {found.dtype.name}; load it as float32")
        return found


def halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Output channels of a query or key map [heads * c, in] in transformers' order.

    Llama files hold the channels that are rotated together, i and i + c/2, side by side.
    """
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _config(fields: dict[str, Any], tied: bool, source: str) -> DenseConfig:
    architecture = fields.get("general.architecture")
    if architecture != "llama":
        raise CheckpointError(f"{source}: general.architecture is {architecture!r}; of GGUF files only 'llama' is supported")
    found: dict[str, Any] = {"model_type": "llama", "tie_word_embeddings": tied}
    found |= {name: fields[f"llama.{key}"] for key, name in _NUMBERS.items() if f"llama.{key}" in fields}
    found["vocab_size"] = len(fields.get("tokenizer.ggml.tokens", ())) or None
    if fields.get("llama.rope.scaling.type", "none") != "none":
        found["rope_scaling"] = {"rope_type": fields["llama.rope.scaling.type"]}
    found["eos_token_id"] = fields.get("tokenizer.ggml.eos_token_id")
    if fields.get("tokenizer.ggml.add_bos_token"):
        found["bos_token_id"] = fields.get("tokenizer.ggml.bos_token_id")
    return dense_from_hf(found, source)


def _tokenizer(fields: dict[str, Any], config: DenseConfig) -> tuple[Tokenizer | None, list[str]]:
    """Byte-level BPE with SmolLM's splitting of digits, or why there is none."""
    faults = [
        f"{key} is {fields.get(key)!r}; only {only!r} is supported"
        for key, only in (("tokenizer.ggml.model", "gpt2"), ("tokenizer.ggml.pre", "smollm"))
        if fields.get(key) != only
    ]
    names = ("tokens", "token_type", "merges")
    tokens, kinds, merges = (fields.get(f"tokenizer.ggml.{name}", []) for name in names)
    if len(kinds) != config.vocab_size:
        faults.append(f"tokenizer.ggml.token_type has {len(kinds)} entries; expected {config.vocab_size}, one a token")
    if faults:
        return None, faults
    vocabulary = {token: i for i, token in enumerate(tokens)}
    pairs: list[tuple[str, str]] = []
    for merge in merges:
        left, _, right = merge.partition(" ")
        pairs.append((left, right))
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    except Exception as error:  # the library raises bare Exception
        return None, [f"tokenizer.ggml.merges do not belong to tokenizer.ggml.tokens ({error})"]
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    special = {kind: [t for t, k in zip(tokens, kinds, strict=True) if k == kind] for kind in (_CONTROL, _USER)}
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special[_CONTROL]])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in special[_USER]])
    return tokenizer, []


def _chat(fields: dict[str, Any], tokenizer: Tokenizer) -> ChatTemplate | None:
    source = fields.get("tokenizer.chat_template")
    ids = {f"{name}_token": fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
    tokens = {name: token for name, i in ids.items() if i is not None and (token := tokenizer.id_to_token(i))}
    return ChatTemplate(source, tokenizer, tokens) if isinstance(source, str) else None


def _name(key: str) -> str:
    """The file's name of a tensor."""
    stem = key.removesuffix(".weight")
    if stem in _ENDS:
        return f"{_ENDS[stem]}.weight"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{_TENSORS[rest]}.weight"


def _tensor_faults(entries: list[layout.Entry], tensors: dict[str, Any]) -> Iterator[str]:
    expected = {_name(entry.keys[0]): entry.shape for entry in entries}
    for name, shape in expected.items():
        if name not in tensors:
            yield f"{name} is missing"
        elif (found := tuple(int(n) for n in reversed(tensors[name].shape))) != shape:
            yield f"{name} has shape {list(found)}; expected {list(shape)} by the sizes that the file names"
    yield from (f"{name} is unexpected: the architecture has no place for it" for name in tensors.keys() - expected.keys())
