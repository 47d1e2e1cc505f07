"""Linear maps that stay fp8 codes: on meshes they have the files' bytes and give the dequantised model's tokens."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.checkpoint.reader import Weights, open_checkpoint
from dspark_jax.errors import CheckpointError
from dspark_jax.inspect_model import inspect_model
from dspark_jax.parallel.mesh import make_mesh
from dspark_jax.serve.engine import Engine
from helpers import placed_model
from helpers.placed_model import MAX_LEN, TOP, outputs, same
from helpers.quantised import write_quantised, write_shards

# Sizes in which `wo_a`'s groups and `main_proj`'s taps cut no block, other maps do, and the second layer has an indexer.
CONFIG = replace(
    placed_model.CONFIG, hidden_size=128, o_lora_rank=128, q_lora_rank=130, moe_intermediate_size=48, compress_ratios=(0, 4),
    index_n_heads=2, index_head_dim=4, index_topk=2,
)  # fmt: skip
DRAFT = replace(placed_model.DRAFT, num_stages=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Scales differ from block to block."""
    path = tmp_path_factory.mktemp("codes")
    tensors = write_quantised(path, CONFIG, DRAFT, seed=5)
    for key, value in tensors.items():
        if key.endswith(".scale") and ".experts." not in key:
            shift = np.arange(value.size, dtype=np.uint8).reshape(value.shape) % 3
            tensors[key] = (value.view(np.uint8) - shift).view(value.dtype)
    write_shards(path, tensors)
    return path


def make(folder: Path, pipe: int, expert: int, weights: Weights) -> Engine:
    sizes: dict[str, Any] = {"slots": 4, "chunk": 2, "max_len": MAX_LEN, "max_logprobs": TOP}
    return Engine(folder, mesh=make_mesh(pipe, expert), weights=weights, **sizes)


@pytest.mark.parametrize(("pipe", "expert"), [(2, 1), pytest.param(2, 2, marks=pytest.mark.long)])
def test_a_mesh_gives_the_dequantised_tokens(pipe, expert, folder):
    dense, codes = (make(folder, pipe, expert, weights) for weights in ("dequantised", "quantised-all"))
    assert (dense.config.linear_weights, codes.config.linear_weights) == ("dense", "fp8")
    assert not any(leaf.dtype == jnp.float8_e4m3fn for leaf in dense._params.values())
    kept = {key.split(" ")[0] for key, leaf in codes._params.items() if leaf.dtype == jnp.float8_e4m3fn}
    maps = {"wo_a", *(f"{name}.weight" for name in ("wq_a", "wq_b", "wkv", "wo_b"))}
    shared = {f"shared_experts.{name}.weight" for name in ("w1", "w2", "w3")}
    of_block = {f"attn.{name}" for name in maps} | {f"ffn.{name}" for name in shared}
    blocks = {f"{block}.{name}" for block in ("layers.0", "layers.1") for name in of_block}  # the draft stage is layers.1
    assert kept == blocks | {"taps.0.weight", "layers.0.attn.indexer.wq_b.weight"}
    expected = outputs(dense)
    assert sum(sum(accepted) for *_, accepted, _ in expected.exact) > 3 and np.ptp(expected.law) > 1
    same(outputs(codes), expected)


def test_inspect_counts_the_codes(folder):
    sizes: dict[str, Any] = {"dtype": "float32", "slots": 4, "context": MAX_LEN}
    dense, codes = (inspect_model(folder, "2x1", weights=weights, **sizes) for weights in ("dequantised", "quantised-all"))
    assert codes.linear_weights == codes.as_dict()["linear_weights"] == "fp8" and dense.linear_weights == "dense"
    assert (dense.target_parameters, dense.target_active) == (codes.target_parameters, codes.target_active)
    engine = make(folder, 2, 1, "quantised-all")
    assert codes.plan.memory.parameters == sum(leaf.addressable_shards[0].data.nbytes for leaf in engine._params.values())


@pytest.mark.parametrize(("changes", "dense"), [({"hidden_size": 144}, {"main_proj"}), ({"o_lora_rank": 12}, {"wo_a"})])
def test_what_would_cut_a_block_of_scales_is_dequantised(changes, dense, tmp_path):
    write_quantised(tmp_path, replace(CONFIG, **changes), DRAFT)
    opened = open_checkpoint(tmp_path, dtype="bfloat16", weights="quantised-all")
    assert opened.config == replace(CONFIG, **changes, expert_weights="fp4", linear_weights="fp8")
    stage = opened.params["draft"]["mtp"][0]
    maps = {"wo_a": stage["attn"]["wo_a"], "main_proj": stage["main_proj"]["weight"], "wq_a": stage["attn"]["wq_a"]["weight"]}
    assert {name for name, leaf in maps.items() if leaf.get_value().dtype == jnp.bfloat16} == dense


def test_a_map_that_is_not_fp8_is_refused_by_name(tmp_path):
    tensors = write_quantised(tmp_path, CONFIG, DRAFT)
    del tensors["layers.1.attn.wkv.scale"]
    tensors["layers.1.attn.wkv.weight"] = tensors["layers.1.attn.wkv.weight"].astype(jnp.bfloat16)
    write_shards(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=r"1 are not, such as layers.1.attn.wkv.weight: use 'quantised' or"):
        open_checkpoint(tmp_path, dtype="bfloat16", weights="quantised-all")
    opened = open_checkpoint(tmp_path, dtype="bfloat16", weights="quantised")
    assert opened.config == replace(CONFIG, expert_weights="fp4", linear_weights="dense")
