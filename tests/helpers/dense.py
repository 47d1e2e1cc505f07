"""Tiny dense models of transformers (tests/data/dense_goldens.npz): their folders and what they answer."""

import functools
import json
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from dspark_jax.checkpoint.reader import LoadedCheckpoint, read_checkpoint

FILE = Path(__file__).parent.parent / "data" / "dense_goldens.npz"
FAMILIES = ("qwen3", "llama")


@dataclass(frozen=True)
class Dense:
    """One model: config.json as transformers writes it, weights by their key, a prompt with its greedy answer, logits of
    every position and the outputs of the first two layers.
    """

    config: dict
    weights: dict[str, np.ndarray]
    prompt: list[int]
    answer: list[int]
    arrays: dict[str, np.ndarray]

    @property
    def text(self) -> list[int]:
        return self.prompt + self.answer

    def write(self, folder: Path, tokenizer: Tokenizer | None = None) -> Path:
        """Its folder, fp32."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file({k: v.astype(np.float32) for k, v in self.weights.items()}, folder / "model.safetensors")
        if tokenizer is not None:
            tokenizer.save(str(folder / "tokenizer.json"))
        return folder


@functools.cache
def dense(name: str) -> Dense:
    """The model of one family."""
    with np.load(FILE) as archive:
        own = {key.partition("/")[2]: archive[key] for key in archive if key.startswith(f"{name}/")}
        count = int(archive["prompt"])
    ids = own["ids"].tolist()
    weights = {key.removeprefix("W/"): value for key, value in own.items() if key.startswith("W/")}
    arrays = {key: own[key] for key in ("logits", "layer_0", "layer_1")}
    return Dense(json.loads(str(own["config"])), weights, ids[:count], ids[count:], arrays)


def loaded(name: str, folder: Path) -> LoadedCheckpoint:
    """The model of one family by way of its folder, fp32."""
    return read_checkpoint(dense(name).write(folder), dtype=jnp.float32, axis=None)


def letters() -> Tokenizer:
    """One token for every printable ASCII character, ids 0 … 94."""
    tokenizer = Tokenizer(models.BPE({chr(32 + i): i for i in range(95)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # type: ignore[assignment]
    tokenizer.decoder = decoders.Fuse()  # type: ignore[assignment]
    return tokenizer
