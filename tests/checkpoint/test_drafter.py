"""Folders of separate drafters: which kind a config.json describes, and every wrong pair with its reason."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dspark_jax import LM, load
from dspark_jax.checkpoint.drafter import open_drafter
from dspark_jax.checkpoint.reader import open_checkpoint
from dspark_jax.config_drafter import DrafterKind, DraftModelConfig, StandaloneConfig, drafter_from_hf, standalone_to_hf
from dspark_jax.errors import CheckpointError, ConfigError
from helpers.dense import letters
from helpers.standalone import DATA, TARGET

VANILLA, REDUCED = DATA / "deepspec_tiny/drafter-vanilla", DATA / "speculators_tiny/drafter-rnn"


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def shapes_of(folder: Path) -> dict[str, tuple[int, ...]]:
    return {name: value.shape for name, value in load_file(folder / "model.safetensors").items()}


def edited(source: Path, folder: Path, config: dict | None = None, tensors: dict | None = None) -> Path:
    """A copy with other values; None takes a key out."""
    shutil.copytree(source, folder)
    found = config_of(source) | (config or {})
    (folder / "config.json").write_text(json.dumps({k: v for k, v in found.items() if v is not None}))
    if tensors is not None:
        weights = load_file(source / "model.safetensors") | tensors
        save_file({k: v for k, v in weights.items() if v is not None}, folder / "model.safetensors")
    return folder


def opened(folder: Path, **options):
    return open_drafter(open_checkpoint(TARGET, dtype="float32"), folder, dtype="float32", **options)


def test_what_the_published_files_say():
    vanilla = drafter_from_hf(config_of(VANILLA), shapes_of(VANILLA), "file")
    assert isinstance(vanilla, StandaloneConfig) and vanilla.kind is DrafterKind.STANDALONE_DSPARK
    assert (vanilla.block_size, vanilla.block_rows, vanilla.target_layer_ids) == (5, 5, (0, 2, 4))
    assert vanilla.own_embedding and vanilla.own_head and not vanilla.mapped and vanilla.confidence == "markov"
    reduced = drafter_from_hf(config_of(REDUCED), shapes_of(REDUCED), "file")
    assert isinstance(reduced, StandaloneConfig) and reduced.target_layer_ids == (0, 2, 4)  # the file has one more each
    assert reduced.mapped and reduced.own_head and not reduced.own_embedding and reduced.draft_vocab_size == 64
    assert reduced.summary == "standalone DSpark: 5 drafts, rnn head of rank 8, taps [0, 2, 4], 64 draft tokens"
    assert drafter_from_hf(standalone_to_hf(vanilla), shapes_of(VANILLA), "file") == vanilla


def test_b22_absent_sample_from_anchor_is_the_layouts_own():
    """B22: DeepSpec's files draft from the anchor's row, speculators' DFlash files do not, their DSpark files do."""
    dflash = DATA / "speculators_tiny/drafter-dflash"
    for folder, drafts in ((VANILLA, 5), (dflash, 4), (REDUCED, 5)):
        config = {k: v for k, v in config_of(folder).items() if k != "sample_from_anchor"}
        found = drafter_from_hf(config, shapes_of(folder), "file")
        assert isinstance(found, StandaloneConfig)
        assert (found.block_size, found.sample_from_anchor, found.block_rows) == (drafts, drafts == 5, 5)
        turned = drafter_from_hf(config | {"sample_from_anchor": drafts == 4}, shapes_of(folder), "file")
        assert turned.block_size == 9 - drafts
    own = {"architectures": ["DFlashDraftModel"], "dflash_config": {"mask_token_id": 95, "target_layer_ids": [0, 2]}}
    dspark = ("markov", "enable_conf", "confidence", "mask", "target_l")
    base = {k: v for k, v in config_of(VANILLA).items() if not k.startswith(dspark)}
    found = drafter_from_hf(base | own, {}, "file")
    assert isinstance(found, StandaloneConfig) and found.kind is DrafterKind.DFLASH
    assert (found.block_size, found.target_layer_ids, found.own_head) == (4, (0, 2), False)


def test_draft_models_and_pard():
    config = config_of(TARGET)
    found = drafter_from_hf(config, {}, "file")
    assert isinstance(found, DraftModelConfig) and (found.kind, found.block_size) == (DrafterKind.DRAFT_MODEL, 5)
    pard = drafter_from_hf(config | {"pard_token": 90}, {}, "file", 8)
    assert isinstance(pard, DraftModelConfig) and (pard.kind, pard.block_size) == (DrafterKind.PARD, 8)
    assert pard.summary == "PARD: 8 drafts in one pass, 6 layers"
    target = open_checkpoint(TARGET, dtype="float32").config
    faults = drafter_from_hf(config | {"pard_token": 96}, {}, "file", 0).faults(target)  # type: ignore[arg-type]
    assert [f.split(" is ")[0] for f in faults] == ["draft_tokens", "pard_token"]
    many = drafter_from_hf(config, {}, "file", 33).faults(target)  # type: ignore[arg-type]
    assert many == ["draft_tokens is 33; expected 1 … 32"]


WRONG = {
    "last layer": ({"target_layer_ids": [0, 5]}, "target_layer_ids holds 5, the target's last layer"),
    "tap out of range": ({"target_layer_ids": [0, 6]}, r"\[0, 6\]; expected distinct ascending layer ids in \[0, 5\)"),
    "taps not ascending": ({"target_layer_ids": [2, 0, 4]}, r"\[2, 0, 4\]; expected distinct ascending"),
    "tap of no kind": ({"target_layer_ids": [0, "1"]}, "expected a list of integers"),
    "another target's layers": ({"num_target_layers": 36}, "num_target_layers is 36, and the target has 6 layers"),
    "another vocabulary": ({"vocab_size": 90, "mask_token_id": 80}, "vocab_size is 90, and the target's is 96"),
    "another width": ({"hidden_size": 64}, "hidden_size is 64, and the target's is 32"),
    "mask": ({"mask_token_id": 96}, "mask_token_id is 96; expected a token id"),
    "no block": ({"block_size": None}, "lacks block_size"),
    "block of nothing": ({"block_size": 0}, "block_size is 0; expected at least 1"),
    "head": ({"markov_head_type": "transformer"}, "markov_head_type is 'transformer'"),
    "confidence of a head that is not there": ({"markov_rank": 0}, "confidence_head_with_markov is true with markov_rank 0"),
    "window": ({"layer_types": ["sliding_attention"] * 2}, "only full_attention is supported"),
    "another kind": ({"architectures": ["Gemma4DSparkModel"]}, "Gemma4DSparkModel.*expected a DSpark"),
    "eagle": ({"speculators_model_type": "eagle3"}, "speculators_model_type is 'eagle3'; expected one of"),
    "architectures of no kind": ({"architectures": 7}, "architectures is 7; expected a list of names"),
    "a text for a switch": ({"enable_confidence_head": "false"}, "enable_confidence_head is 'false'; expected true or false"),
    "a text for a number": ({"num_target_layers": "6"}, "num_target_layers is '6'; expected an integer"),
    "an odd nested config": ({"dflash_config": [1]}, r"dflash_config is \[1\]; expected an object"),
    "rnn from masks": ({"markov_head_type": "rnn", "sample_from_anchor": False}, "'rnn' with sample_from_anchor false"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_pairs_are_refused_with_the_reason(case: str, tmp_path: Path):
    config, text = WRONG[case]
    with pytest.raises(ConfigError, match=text) as error:
        opened(edited(VANILLA, tmp_path / "drafter", config))
    assert "config.json" in str(error.value)


def test_all_faults_of_a_pair_at_once(tmp_path: Path):
    folder = edited(VANILLA, tmp_path / "drafter", {"hidden_size": 64, "num_target_layers": 7, "target_layer_ids": [9]})
    with pytest.raises(ConfigError) as error:
        opened(folder)
    assert all(text in str(error.value) for text in ("hidden_size is 64", "num_target_layers is 7", "[9]"))


def test_damaged_weights_are_refused(tmp_path: Path):
    weights = load_file(VANILLA / "model.safetensors")
    bad = np.full_like(weights["markov_head.markov_w2.weight"], np.nan)
    folder = edited(VANILLA, tmp_path / "a", None, {"fc.weight": None, "norm.weight": np.ones(7, np.float32)})
    with pytest.raises(CheckpointError, match=r"(?s)fc.weight is missing.*norm.weight has shape \[7\]"):
        opened(folder)
    found = opened(edited(VANILLA, tmp_path / "b", None, {"markov_head.markov_w2.weight": bad}))
    with pytest.raises(CheckpointError, match=r"markov_w2\.weight holds 768 NaN"):
        LM(*found, letters())


def test_maps_of_draft_ids(tmp_path: Path):
    weights = load_file(REDUCED / "model.safetensors")
    twice = weights["d2t"].copy()
    twice[1], twice[2] = twice[0] - 1, 200
    with pytest.raises(CheckpointError, match=r"(?s)draft id 2 token 202.*makes 2 draft ids token"):
        opened(edited(REDUCED, tmp_path / "a", None, {"d2t": twice}))
    with pytest.raises(ConfigError, match="draft_vocab_size is 64, below the target's 96, and the weights have no d2t"):
        opened(edited(REDUCED, tmp_path / "b", None, {"d2t": None}))
    with pytest.raises(ConfigError, match=r"have d2t but no lm_head\.weight"):
        opened(edited(REDUCED, tmp_path / "c", None, {"lm_head.weight": None}))


def test_draft_tokens_are_of_draft_models(tmp_path: Path):
    with pytest.raises(ConfigError, match="draft_tokens is 3; this drafter's block has 5"):
        opened(VANILLA, draft_tokens=3)
    with pytest.raises(ConfigError, match="draft_tokens is 3, without a drafter"):
        load("nano", draft_tokens=3)


def test_targets_and_tokenizers_that_do_not_go_together(tmp_path: Path):
    target = shutil.copytree(TARGET, tmp_path / "target")
    letters().save(str(target / "tokenizer.json"))
    drafter = shutil.copytree(VANILLA, tmp_path / "drafter")
    vocab = json.loads((target / "tokenizer.json").read_text())
    ids = vocab["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    (drafter / "tokenizer.json").write_text(json.dumps(vocab))
    with pytest.raises(ConfigError, match=r"(?s)its tokenizer is not the target's.*'a' is 66, and 65"):
        load(target, drafter=drafter)
    with pytest.raises(ConfigError, match="the target is a DeepSeek-V4-style model"):
        load("nano", drafter=VANILLA)
