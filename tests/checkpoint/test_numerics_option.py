"""`numerics="reference"` when a checkpoint is opened: which linear maps round their inputs, and what is refused."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import Engine, load
from dspark_jax.checkpoint.reader import open_checkpoint
from dspark_jax.config import TargetConfig
from dspark_jax.decode.sampling import SamplingParams
from dspark_jax.errors import CheckpointError, ConfigError
from dspark_jax.parallel.mesh import make_mesh
from helpers.checkpoints import DRAFT, TARGET, write_tiny
from helpers.quantised import write_quantised, write_shards

CONFIG = replace(TARGET, moe_intermediate_size=48, index_head_dim=32)


@pytest.mark.parametrize("weights", ["dequantised", "quantised", "quantised-all"])
def test_quantised_maps_round_their_inputs(weights, tmp_path):
    write_quantised(tmp_path, CONFIG, DRAFT)
    found = open_checkpoint(tmp_path, dtype="bfloat16", weights=weights, numerics="reference")
    kept = {} if weights == "dequantised" else {"expert_weights": "fp4"}
    kept |= {"linear_weights": "fp8"} if weights == "quantised-all" else {}
    assert found.config == replace(CONFIG, numerics="reference", fp8_inputs=True, **kept)
    assert open_checkpoint(tmp_path, dtype="bfloat16", weights=weights).config == replace(CONFIG, **kept)


def test_dense_maps_do_not(tmp_path):
    write_tiny(tmp_path)
    found = open_checkpoint(tmp_path, dtype="float32", numerics="reference")
    assert isinstance(found.config, TargetConfig) and found.config.numerics == "reference" and not found.config.fp8_inputs


def test_a_mixture_is_refused(tmp_path):
    tensors = write_quantised(tmp_path, CONFIG, DRAFT)
    del tensors["layers.0.attn.wq_a.scale"]
    tensors["layers.0.attn.wq_a.weight"] = np.zeros(tensors["layers.0.attn.wq_a.weight"].shape, jnp.bfloat16)
    write_shards(tmp_path, tensors)
    assert open_checkpoint(tmp_path, dtype="float32").config == CONFIG
    said = r"must be fp8 or fp4, or none; .*layers\.0\.attn\.wq_a\.weight has dtype BF16.*: use 'default'"
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(tmp_path, dtype="float32", numerics="reference")


def test_wrong_uses(tmp_path):
    write_tiny(tmp_path)
    with pytest.raises(ConfigError, match="numerics is 'exact'; expected 'default' or 'reference'"):
        load(tmp_path, numerics="exact")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="float16 does not hold; expected dtype bfloat16 or float32"):
        load(tmp_path, numerics="reference", dtype="float16")
    dense = "tests/data/deepspec_tiny/target"
    with pytest.raises(CheckpointError, match="this is a dense model of another family: use 'default'"):
        load(dense, numerics="reference")


@pytest.mark.long
def test_an_engine_on_a_mesh_gives_the_same_tokens(tmp_path):
    write_quantised(tmp_path, CONFIG, DRAFT)
    options = {"numerics": "reference", "weights": "quantised", "max_len": 32}
    prompts, params = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8], [7, 9]], SamplingParams(max_tokens=12)
    lm = load(tmp_path, **options)
    expected = [out.tokens for out in lm.generate(prompts, params, ignore_eos=True)]
    engine = Engine(tmp_path, mesh=make_mesh(2, 1), slots=4, **options)
    assert engine.config.fp8_inputs and [out.tokens for out in engine.generate(prompts, params, ignore_eos=True)] == expected
