"""Placement of experts that stay quantised: scales go with their codes, on load and on a running engine."""

import functools
import gc
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax
from dspark_jax.config import TargetConfig
from dspark_jax.eplb import Placement
from dspark_jax.errors import CheckpointError
from dspark_jax.parallel.mesh import make_mesh
from dspark_jax.serve.engine import Engine
from dspark_kernels.block_scaled import widened
from helpers import placed_model
from helpers.placed_model import MAX_LEN, TOP, outputs, read, requests, same
from helpers.quantised import write_quantised

DRAFT = replace(placed_model.DRAFT, num_stages=1, target_layer_ids=(0,))


def config(layers: int) -> TargetConfig:
    """Rows of several blocks, the last one not whole; the first layer routes by a hash table."""
    sizes = {"hidden_size": 144, "moe_intermediate_size": 48}
    return replace(placed_model.CONFIG, num_hidden_layers=layers, compress_ratios=(0,) * layers, **sizes)


def rotated(pipe: int, expert: int) -> Placement:
    return placed_model.rotated(expert, pipe + DRAFT.num_stages)


def shuffled(pipe: int, expert: int) -> Placement:
    return placed_model.shuffled(expert, layers=pipe + DRAFT.num_stages)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Callable[[str, int], Path]:
    """A model with one target layer for every pipe rank, by the format of its experts."""

    @functools.cache
    def write(kind: str, pipe: int) -> Path:
        path = tmp_path_factory.mktemp(kind)
        write_quantised(path, config(pipe), DRAFT, experts=kind, seed=3)  # type: ignore[arg-type]
        return path

    return write


def make(folder: Path, pipe: int, expert: int, **options: Any) -> Engine:
    sizes: dict[str, Any] = {"slots": max(4, pipe * expert), "chunk": 2, "max_len": MAX_LEN, "max_logprobs": TOP}
    return Engine(folder, mesh=make_mesh(pipe, expert), **sizes | options)


def matrices(engine: Engine) -> dict[tuple[int, str], np.ndarray]:
    """By layer and name the experts' weights as numbers, [slots, in, out]."""
    found = {}
    pipeline = engine.ring.pipeline
    for rank in range(pipeline.spec.pipe):
        stage = pipeline.stage({key: np.asarray(leaf)[rank] for key, leaf in engine._params.items()}, rank)
        blocks = [*stage.layers, *(stage.draft.mtp if stage.draft else ())]
        for layer, block in zip(pipeline.spec.expert_layers[rank], blocks, strict=True):
            for name, weight in zip(("w1", "w3", "w2"), block.ffn.experts.weights(), strict=True):
                found[layer, name] = np.asarray(widened(weight, jnp.float32))
    return found


@pytest.mark.parametrize(
    ("kind", "pipe", "expert"),
    [("fp4", 1, 2), pytest.param("fp4", 2, 2, marks=pytest.mark.long), pytest.param("fp8", 2, 2, marks=pytest.mark.long)],
)
def test_every_slot_has_the_codes_and_the_scales_of_its_expert(kind, pipe, expert, folder):
    """Laid out on load, and moved on the device; nothing is compiled but the moves."""
    dense = matrices(make(folder(kind, pipe), pipe, expert))
    moving = make(folder(kind, pipe), pipe, expert, weights="quantised")
    assert moving.config.expert_weights == kind and len(dense) == 3 * (pipe + 1)
    for placement in (rotated(pipe, expert), shuffled(pipe, expert)):
        moving.set_placement(placement)
        loaded = make(folder(kind, pipe), pipe, expert, weights="quantised", placement=placement)
        for engine in (moving, loaded):
            for (layer, name), found in matrices(engine).items():
                by_slot = dense[layer, name][placement.slot_to_expert[layer]]
                np.testing.assert_array_equal(found, by_slot, err_msg=f"{layer} {name}")
        assert {k: v.dtype for k, v in moving._params.items()} == {k: v.dtype for k, v in loaded._params.items()}


def test_memory_is_planned_for_codes_and_scales(folder):
    for kind, placement in (("fp4", rotated(1, 2)), ("fp8", None)):
        engine = make(folder(kind, 1), 1, 2, weights="quantised", placement=placement, dtype=jnp.bfloat16)
        held = {key: leaf.addressable_shards[0].data for key, leaf in engine._params.items()}
        assert engine.plan.memory.parameters == sum(leaf.nbytes for leaf in held.values())
        codes = sum(leaf.nbytes for key, leaf in held.items() if ".experts." in key)
        numbers = 3 * 2 * (placement.num_slots if placement else 8) // 2 * 144 * 48
        assert codes / numbers < (0.6 if kind == "fp4" else 1.01)  # 1/2 byte, and a byte for 32 numbers or fewer


@pytest.mark.long
def test_the_same_tokens_and_logits_as_dequantised_and_not_placed(folder):
    """Rotated with eight more slots from the files, then moved to random replicas."""
    expected = outputs(make(folder("fp4", 1), 1, 2))
    assert sum(sum(accepted) for *_, accepted, _ in expected.exact) > 3 and np.ptp(expected.law) > 1
    engine = make(folder("fp4", 1), 1, 2, weights="quantised", placement=rotated(1, 2))
    engine.set_placement(shuffled(1, 2))
    same(outputs(engine), expected)


@pytest.mark.long
@pytest.mark.parametrize(("pipe", "expert"), [(1, 2), (1, 4), (2, 2), (2, 4)])
@pytest.mark.parametrize("kind", ["fp4", "fp8"])
def test_both_placements_also_when_they_change_in_flight(kind, pipe, expert, folder):
    expected = outputs(make(folder(kind, pipe), pipe, expert))
    engine = make(folder(kind, pipe), pipe, expert, weights="quantised", placement=rotated(pipe, expert))
    same(outputs(engine), expected)
    keys = [engine.submit(prompt, one) for prompt, one in zip(*requests(), strict=True)]
    for _ in range(4):
        engine.step()
    engine.set_placement(shuffled(pipe, expert))
    same(read(engine, [engine.result(key) for key in keys]), expected)


@pytest.mark.long
def test_nothing_stays_on_devices_where_a_scale_is_no_number(tmp_path):
    write_quantised(tmp_path, config(1), DRAFT, shards=1)
    file = tmp_path / "model-00001-of-00001.safetensors"
    data = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    scale = json.loads(data[8:start])["layers.0.ffn.experts.2.w3.scale"]
    data[start + scale["data_offsets"][0]] = 255
    file.write_bytes(data)
    gc.collect()
    before = len(jax.live_arrays())
    with pytest.raises(CheckpointError, match=r"experts\.2\.w3\.scale holds 1 scales of byte 255 \(NaN\)"):
        make(tmp_path, 1, 2, weights="quantised", placement=rotated(1, 2))
    gc.collect()
    assert len(jax.live_arrays()) == before


@pytest.mark.long
@pytest.mark.parametrize("kind", ["fp4", "fp8"])
def test_load_gives_the_same_logits_either_way(kind, folder):
    """The programs multiply the same numbers, so nothing but fusion may differ."""
    prompts, params = requests()
    answers = [dspark_jax.load(folder(kind, 1), weights=how).generate(prompts, params) for how in ("dequantised", "quantised")]
    assert [a.tokens for a in answers[0]] == [a.tokens for a in answers[1]]
    laws = [[v for a in part for one in a.logprobs or () for _, v in sorted(one.top)] for part in answers]
    np.testing.assert_allclose(laws[0], laws[1], rtol=0, atol=1e-5)
    assert len(laws[0]) > 100 and len(jax.devices()) == 8
