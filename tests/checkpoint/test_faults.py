"""A folder in the published layout with one fault each: refused by `load` and `Engine`, and nothing stays on a device."""

import gc
import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import Engine, load
from dspark_jax.checkpoint.reader import CheckpointNotice
from dspark_jax.errors import CheckpointError, ConfigError, DSparkError, RequestError
from dspark_jax.inspect_model import inspect_model
from dspark_jax.parallel.mesh import make_mesh
from helpers.checkpoints import DRAFT, TARGET, edit_config
from helpers.dense import dense
from helpers.quantised import write_quantised, write_shards

CONFIG = replace(TARGET, moe_intermediate_size=6, max_position_embeddings=64)
INDEX, SECOND = "model.safetensors.index.json", "model-00002-of-00002.safetensors"
WQ_B, EXPERT = "layers.1.attn.wq_b", "layers.2.ffn.experts.3.w2"
Tensors = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> tuple[Path, Tensors]:
    folder = tmp_path_factory.mktemp("published")
    return folder, write_quantised(folder, CONFIG, DRAFT)


@pytest.fixture
def model(written, tmp_path) -> tuple[Path, Tensors]:
    """A copy that a test may damage, and a dict of its tensors."""
    return Path(shutil.copytree(written[0], tmp_path / "model")), dict(written[1])


def rewrite(change: Callable[[Tensors], object]) -> Callable[[Path, Tensors], None]:
    def damage(folder: Path, tensors: Tensors) -> None:
        change(tensors)
        write_shards(folder, tensors)

    return damage


def index(change: Callable[[dict], None]) -> Callable[[Path, Tensors], None]:
    def damage(folder: Path, _: Tensors) -> None:
        found = json.loads((folder / INDEX).read_text())
        change(found["weight_map"])
        (folder / INDEX).write_text(json.dumps(found))

    return damage


def config(**changes) -> Callable[[Path, Tensors], None]:
    return lambda folder, _: edit_config(folder, **changes)


def truncate(folder: Path, _: Tensors) -> None:
    (folder / SECOND).write_bytes((folder / SECOND).read_bytes()[:-5])


def endless_header(folder: Path, _: Tensors) -> None:
    (folder / SECOND).write_bytes((2**60).to_bytes(8, "little") + (folder / SECOND).read_bytes()[8:])


def huge_shape(folder: Path, _: Tensors) -> None:
    """A header that claims more than its file holds."""
    data = (folder / SECOND).read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    next(v for k, v in header.items() if k != "__metadata__")["shape"][0] = 10**15
    text = json.dumps(header).encode()
    (folder / SECOND).write_bytes(len(text).to_bytes(8, "little") + text + data[end:])


def stage_more(tensors: Tensors) -> None:
    tensors |= {key.replace("mtp.1.", "mtp.2."): value for key, value in tensors.items() if key.startswith("mtp.1.")}


def nan_scale(tensors: Tensors) -> None:
    scale = tensors[f"{EXPERT}.scale"].copy()
    scale.view(np.uint8)[1, 0] = 255
    tensors[f"{EXPERT}.scale"] = scale


FAULTS = {
    "missing shard": (lambda folder, _: (folder / SECOND).unlink(), f"{SECOND} is missing; download it again"),
    "truncated shard": (truncate, f"{SECOND} cannot be read (truncated: "),
    "wrong shape": (
        rewrite(lambda t: t.update({f"{WQ_B}.weight": t[f"{WQ_B}.weight"][:-1]})),
        f"{WQ_B}.weight has shape [15, 6]; expected [16, 6]",
    ),
    "wrong dtype": (
        rewrite(lambda t: t.update({f"{WQ_B}.weight": t[f"{WQ_B}.weight"].astype(jnp.float8_e5m2)})),
        f"{WQ_B}.weight has dtype F8_E5M2; expected BF16, F16 or F32, or F8_E4M3 with scales",
    ),
    "missing scale": (
        rewrite(lambda t: t.pop(f"{EXPERT}.scale")),
        f"{EXPERT}.scale is missing",
    ),
    "a scale that is no number": (rewrite(nan_scale), f"{EXPERT}.scale holds 1 scales of byte 255 (NaN), the first at [1, 0]"),
    "unknown quantisation": (
        config(quantization_config={"quant_method": "awq"}),
        "quantization_config.quant_method is 'awq'; only 'fp8' is supported",
    ),
    "key missing": (rewrite(lambda t: t.pop("hc_head_fn")), "hc_head_fn is missing"),
    "extra stage": (rewrite(stage_more), "the weights have 3 mtp.* stages, and compress_ratios of config.json 2 entries"),
    "index into nowhere": (
        index(lambda where: where.update({"norm.weight": "model-00009-of-00002.safetensors"})),
        "model-00009-of-00002.safetensors is missing",
    ),
    "index names no tensor of the file": (
        index(lambda where: where.update({"norm.bias": SECOND})),
        f"puts norm.bias into {SECOND}, which does not hold it",
    ),
    "absurd depth": (
        config(num_hidden_layers=300_000, compress_ratios=[0] * 300_002),
        "num_hidden_layers is 300000 in config.json, and the weights have 3",
    ),
    "absurd experts": (config(n_routed_experts=10**8), "n_routed_experts is 100000000 in config.json, and the weights have 4"),
    "absurd width": (config(hidden_size=10**9), "embed.weight has shape [13, 8]; expected [13, 1000000000]"),
    "no number of a tensor": (
        config(vocab_size=10**15),
        "vocab_size is 1000000000000000; expected a positive integer of at most 2147483647",
    ),
    "absurd header": (endless_header, f"{SECOND} cannot be read (truncated: "),
    "absurd tensor": (huge_shape, f"{SECOND} cannot be read ("),
    "absurd block": (config(dspark_block_size=10**6), "dspark_block_size is 1000000; expected at least 1"),
}


# Other absurd sizes are in the list.
LONG = {"absurd experts", "absurd depth", "absurd tensor", "absurd header", "absurd width", "index names no tensor of the file"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name in FAULTS])
def test_a_fault_is_refused_and_nothing_stays_on_a_device(name, model):
    damage, said = FAULTS[name]
    damage(*model)
    gc.collect()
    before = len(jax.live_arrays())
    for weights in ("dequantised", "quantised"):
        with pytest.raises(DSparkError) as error:
            load(model[0], weights=weights)
        assert said in str(error.value) and str(model[0]) in str(error.value)
    with pytest.raises(DSparkError) as error:
        Engine(model[0], mesh=make_mesh(2, 2), slots=4)
    assert said in str(error.value)
    del error
    gc.collect()
    assert len(jax.live_arrays()) == before


def test_the_folder_is_sound_without_them(model):
    for weights in ("dequantised", "quantised"):
        assert load(model[0], weights=weights).draft_config == DRAFT


def test_a_dense_model_of_absurd_depth(tmp_path):
    folder = dense("llama").write(tmp_path / "model")
    edit_config(folder, num_hidden_layers=10**8)
    with pytest.raises(CheckpointError, match=r"num_hidden_layers is 100000000 in config\.json, and the weights have \d"):
        load(folder)


# What is no DSpark model


def test_stages_without_dspark_keys_are_left_out_with_one_notice_and_cannot_draft(model):
    edit_config(model[0], dspark_block_size=None)
    with pytest.warns(CheckpointNotice, match="no dspark_block_size.*loading the target alone") as notices:
        lm = load(model[0])
    assert len(notices) == 1 and lm.draft_config is None and lm.gamma == 0
    with pytest.raises(RequestError, match="speculate is True, but this model has no drafter"):
        lm.generate([[1, 2]], speculate=True)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        engine = Engine(model[0], mesh=make_mesh(1, 2), slots=2)
    assert [w.category for w in seen] == [CheckpointNotice] and engine.gamma == 0


@pytest.mark.parametrize("read", [load, Engine, inspect_model])
def test_v41_is_refused_by_its_name(read, model):
    edit_config(model[0], model_type="deepseek_v41")
    with pytest.raises(ConfigError, match=r"'deepseek_v41' \(V4\.1 is another architecture under a similar name\)"):
        read(model[0])
