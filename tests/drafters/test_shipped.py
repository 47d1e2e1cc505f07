"""The drafter that comes with the package: small, readable, and what its configuration says."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from dspark_jax.checkpoint.drafter import drafter_path, open_drafter, shipped_drafters
from dspark_jax.config_dense import dense_from_hf
from dspark_jax.config_drafter import StandaloneConfig
from dspark_jax.errors import CheckpointError

NAME = "smollm2-135m-instruct"
# Of SmolLM2-135M-Instruct's own config.json.
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 576,
    "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-05, "rope_theta": 100000, "tie_word_embeddings": True,
    "vocab_size": 49152, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def test_it_is_whole_and_fits_its_target():
    folder = drafter_path(NAME)
    sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
    assert max(sizes.values()) <= 2**24 and sum(sizes.values()) <= 32e6
    target: Any = SimpleNamespace(config=dense_from_hf(SMOLLM2, "SmolLM2"), params=nnx.State({}))
    pair = open_drafter(target, folder, dtype="bfloat16")
    assert isinstance(pair.draft, StandaloneConfig) and pair.draft.block_size == 7 and pair.draft.markov_rank == 32
    draft = pair.params["draft"]
    values = [np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(draft)]
    assert sum(value.size for value in values) == 8_569_057
    assert all(np.isfinite(value).all() and value.any() for value in values)
    record = json.loads((folder / "training.json").read_text())
    assert record["last"]["step"] == record["settings"]["steps"] and record["last"]["tau"] > 3


def test_a_name_is_a_shipped_drafter_or_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert shipped_drafters() == [NAME]
    assert drafter_path(NAME) != drafter_path(tmp_path) == tmp_path
    with pytest.raises(
        CheckpointError, match=f"drafter 'smollm' not found; expected the name of a shipped drafter \\({NAME}\\)"
    ):
        drafter_path("smollm")
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAME).mkdir()
    assert drafter_path(f"./{NAME}") == Path(NAME) != drafter_path(NAME)
