"""The folder that transformers itself writes, under its own names, and the same weights under the published ones."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from dspark_jax.checkpoint import layout
from dspark_jax.checkpoint.reader import read_checkpoint
from dspark_jax.config import target_from_hf

FILE = Path(__file__).resolve().parents[2] / ".cache" / "oracles" / "transformers_v4.npz"

pytestmark = pytest.mark.oracle


def test_transformers_state_is_read_as_the_published_weights(tmp_path):
    assert FILE.is_file(), f"{FILE} is missing; `make oracles` writes it"
    data = np.load(FILE)
    config = json.loads(str(data["config"]))
    (tmp_path / "config.json").write_text(json.dumps(config))
    state = {key[2:]: np.ascontiguousarray(data[key]) for key in data.files if key[:2] == "H/"}
    save_file(state, tmp_path / "model.safetensors")
    loaded = read_checkpoint(tmp_path, dtype=jnp.float32)
    assert loaded.config == target_from_hf(config)
    values = {path: np.asarray(v.get_value()) for path, v in nnx.to_flat_state(loaded.params)}
    found = {k: a for e in layout.entries(loaded.params) for k, a in zip(e.keys, e.save(values[e.path]), strict=True)}
    assert found.keys() == {key[2:] for key in data.files if key[:2] == "P/"}
    for key, value in found.items():
        np.testing.assert_array_equal(value, data[f"P/{key}"], err_msg=key)
