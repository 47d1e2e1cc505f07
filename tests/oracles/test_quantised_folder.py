"""What our writer quantises, transformers reads: from the folder as it is, to the values and logits that our reader gives."""

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dspark_jax.checkpoint import layout
from dspark_jax.checkpoint.files import open_files
from dspark_jax.checkpoint.reader import read_checkpoint
from dspark_jax.checkpoint.writer import write_checkpoint
from helpers.checkpoints import TARGET, random_params
from helpers.runner import Runner, scaled_error

PYTHON = Path(__file__).resolve().parents[2] / ".venv-oracles" / "bin" / "python"
# Of published ratios transformers reads 0, 4 and 128; blocks of scales must divide the maps; all compressed entries of the text
# are chosen, so that no near-tie can part the logits.
CONFIG = replace(
    TARGET, vocab_size=32, hidden_size=256, head_dim=64, q_lora_rank=128, o_lora_rank=64, moe_intermediate_size=64,
    index_head_dim=64, index_topk=6, compress_ratios=(0, 128, 4), hc_mult=4, max_position_embeddings=256,
    rope=replace(TARGET.rope, dim=16, yarn_original=64),
)  # fmt: skip

pytestmark = pytest.mark.oracle


def by_key(params: nnx.State) -> dict[str, np.ndarray]:
    """Values under the published names."""
    values = {path: np.asarray(v.get_value()) for path, v in nnx.to_flat_state(params)}
    return {k: a for e in layout.entries(params) for k, a in zip(e.keys, e.save(values[e.path]), strict=True)}


def test_transformers_reads_what_was_quantised(tmp_path):
    assert PYTHON.is_file(), f"{PYTHON} is missing; `make oracles` makes it"
    params = random_params(CONFIG, None)
    small = jax.tree.map(lambda x: x / 16 if x.ndim > 1 and x.dtype == jnp.float32 else x, params)
    write_checkpoint(tmp_path, CONFIG, None, small, quantise=True, max_shard_bytes=400_000)
    stored = {name: info.dtype for name, info in open_files(tmp_path).tensors.items()}
    assert {stored["layers.0.attn.wq_a.weight"], stored["layers.1.ffn.experts.3.w2.weight"]} == {"F8_E4M3", "I8"}
    script, out = Path(__file__).with_name("read_quantised.py"), tmp_path / "read.npz"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([PYTHON, script, tmp_path, out, "24"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    with np.load(out) as archive:
        theirs = dict(archive)

    loaded = read_checkpoint(tmp_path, dtype=jnp.float32)
    given, ours = by_key(small), by_key(loaded.params)
    assert ours.keys() == {key[2:] for key in theirs if key.startswith("P/")}
    for key, value in ours.items():
        np.testing.assert_array_equal(theirs[f"P/{key}"], value, err_msg=key)
        coarse = stored[key] in ("I8", "F8_E4M3")  # e2m1 rounds by at most one scale, and a block's largest value is over three
        assert np.abs(value - given[key]).max() <= coarse * np.abs(given[key]).max() / 3, key
    graph, _ = layout.skeleton(loaded.config, None, dtype=jnp.float32, axis=None)
    runner = Runner(nnx.merge(graph, jax.tree.map(jnp.asarray, loaded.params)), 2, 24)
    assert scaled_error(runner.sequence(theirs["ids"])[0], theirs["logits"]) < 1e-4
