"""Training of standalone drafters: the packed pass is decoding's, runs resume exactly, the export is what was trained."""

import json
import shutil
from dataclasses import replace
from itertools import islice, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from dspark_jax import SamplingParams, load
from dspark_jax.checkpoint.drafter import open_drafter
from dspark_jax.checkpoint.reader import open_checkpoint
from dspark_jax.config_drafter import StandaloneConfig
from dspark_jax.errors import ConfigError
from dspark_jax.train import separate, standalone
from dspark_jax.train.conversations import Conversations, ConversationStream, answers
from dspark_jax.train.loop import TrainingDiverged
from dspark_jax.train.separate import DrafterRecipe, train_drafter
from helpers.dense import letters
from helpers.runner import scaled_error
from helpers.standalone import TARGET, open_pair

RECIPE = DrafterRecipe(
    block_size=3, layers=1, intermediate=24, taps=(0, 2, 4), markov_rank=4, conversations=6, prompt_tokens=8, answer_tokens=12,
    steps=4, batch=4, anchors=3, slots=4, seed=3,
)  # fmt: skip
PROMPTS = ["Hello 12", "abc", "what is", "0123", "xyz", "long", "too long for the recipe"]


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    folder = Path(shutil.copytree(TARGET, tmp_path_factory.mktemp("target") / "model"))
    letters().save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 3}))
    return folder


@pytest.mark.parametrize("name", ["deepspec_tiny/gated", "speculators_tiny/masks"])
def test_packed_blocks_are_those_of_decoding(name: str):
    """All anchors of two sequences in one pass, against the reference's rows and logits behind the prompts (golden files)."""
    folder, goldens, texts = open_pair(name)
    pair = open_drafter(open_checkpoint(TARGET, dtype="float32"), folder, dtype="float32")
    params = jax.tree.map(np.asarray, pair.params)
    token, prompt = np.zeros((2, 40), np.int32), np.array([9, 22], np.int32)
    for i in (0, 1):
        text = [*texts[f"text{i}/prompt"], *texts[f"text{i}/greedy"]][:40]
        token[i, : len(text)] = text
    data = Conversations(token, prompt, np.array([40, 40], np.int32))
    anchor = np.stack([prompt, prompt + 5, prompt], axis=1)  # in front of another block, and behind one
    drafter = folder.name.removeprefix("drafter-")
    drafts = [np.concatenate([[token[i, prompt[i]]], goldens[f"text{i}/{drafter}/tokens"][0][:-1]]) for i in (0, 1)]

    @jax.jit
    def run(params, token):
        lm = nnx.merge(pair.graph, params)
        both = data._replace(token=token)
        taps, _ = standalone.read_target(lm.target, both)
        hidden = standalone.packed_blocks(lm.draft, lm.target, both, taps, anchor)
        return hidden, standalone.forced(lm.draft, lm.target, hidden[:, 0], jnp.array(drafts))

    hidden, (logits, confidence) = run(params, token)
    for i in (0, 1):
        wanted = {key: goldens[f"text{i}/{drafter}/{key}"] for key in ("hidden", "logits", "confidence_logits")}
        assert all(scaled_error(hidden[i, place], wanted["hidden"]) < 1e-4 for place in (0, 2))
        assert scaled_error(logits[i], wanted["logits"]) < 1e-4
        assert np.allclose(confidence[i], wanted["confidence_logits"][0], atol=1e-4)
    later = token.copy()
    later[:, 28:] = 7  # what stands behind an anchor is not seen
    other, _ = run(params, later)
    assert np.array_equal(hidden[:, 0], other[:, 0]) and np.array_equal(hidden[0], other[0])


def test_anchors_stand_in_the_answer():
    data = Conversations(np.zeros((3, 20), np.int32), np.array([4, 9, 18]), np.array([20, 12, 20]))
    found = np.asarray(standalone.answer_anchors(jax.random.key(0), data, 8))
    assert (found >= data.prompt[:, None]).all() and (found < data.count[:, None] - 1).all()
    assert len(set(found[0])) == 8 and set(found[1]) == {9, 10} and set(found[2]) == {18}


def test_batches_are_a_function_of_seed_and_step():
    rows = np.arange(10)
    stream = ConversationStream(Conversations(rows[:, None], rows, rows), 3, 5)
    epoch = np.concatenate([stream.at(step).prompt for step in range(3)])
    assert len(set(epoch)) == 9 and not np.array_equal(epoch, np.concatenate([stream.at(step).prompt for step in range(3, 6)]))
    assert np.array_equal(stream.at(4).prompt, ConversationStream(stream.data, 3, 5).at(4).prompt)
    with pytest.raises(ConfigError, match="batch is 11; expected 1 … 10"):
        ConversationStream(stream.data, 11, 0)


def test_a_run_that_was_stopped_resumes_to_the_same_drafter(target: Path, tmp_path: Path):
    """The export, too, is what was trained: it loads, and drafts for its target."""
    losses: dict[str, list[float]] = {"one": [], "two": []}

    def run(name: str, **options) -> bool:
        def keep(record):
            if "loss" in record:
                losses[name].append(record["loss"])

        return train_drafter(
            target, tmp_path / name / "out", tmp_path / name / "work", RECIPE, prompts=PROMPTS, report=keep, **options
        )

    assert run("one") and not run("two", seconds=0) and run("two")
    one, two = (load_file(tmp_path / name / "out/model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys() and all(np.array_equal(one[key], two[key]) for key in one)
    assert losses["one"] == losses["two"] and len(losses["one"]) == 4
    written = Conversations.read(tmp_path / "one/work/conversations.npz")
    assert len(written.token) == 6 and set(written.prompt) == {8, 3, 7, 4}
    assert one["layers.0.mlp.down_proj.weight"].shape[1] == 24
    assert "embed_tokens.weight" not in one and "lm_head.weight" not in one  # the target's
    lm = load(target, drafter=tmp_path / "one/out")
    assert isinstance(lm.draft_config, StandaloneConfig) and lm.draft_config.num_target_layers == 6
    result = lm.generate([PROMPTS[0]], SamplingParams(max_tokens=12))[0]
    assert result.tokens == lm.generate([PROMPTS[0]], SamplingParams(max_tokens=12), speculate=False)[0].tokens
    with pytest.raises(ConfigError, match=r"begun with other settings.*steps 4 and now 9"):
        train_drafter(target, tmp_path / "x", tmp_path / "one/work", replace(RECIPE, steps=9), prompts=PROMPTS)
    with pytest.raises(ConfigError, match=r"begun with other settings \(prompts"):
        train_drafter(target, tmp_path / "x", tmp_path / "one/work", RECIPE, prompts=PROMPTS[:6])


def test_impossible_settings_are_named_all_at_once(target: Path, tmp_path: Path):
    with pytest.raises(ConfigError) as error:
        replace(RECIPE, steps=0, batch=0, peak=0.0, temperatures=(), openings=(), intermediate=0)
    assert all(
        f"{name} is" in str(error.value) for name in ("intermediate", "steps", "batch", "peak", "temperatures", "openings")
    )
    with pytest.raises(ConfigError, match="holds 5, the target's last layer"):
        train_drafter(target, tmp_path / "out", tmp_path / "work", replace(RECIPE, taps=(0, 5)), prompts=PROMPTS)
    with pytest.raises(ConfigError, match="no prompt of at most 8 tokens has an answer"):
        train_drafter(target, tmp_path / "out", tmp_path / "work", RECIPE, prompts=["far too long for it"] * 4)
    with pytest.raises(ConfigError) as error:
        (tmp_path / "file").write_text("")
        odd = replace(RECIPE, layers=9, prompt_tokens=600)
        train_drafter(target, tmp_path / "file", tmp_path / "work", odd, prompts=PROMPTS[:3])
    faults = ("layers is 9; expected at most the target's 6", "are 612 together; expected at most the target's 512 positions")
    faults += ("batch is 4, and there can be 3 conversations", "which cannot be made a folder (File exists)")
    assert all(text in str(error.value) for text in faults)
    with pytest.raises(ConfigError, match="has no chat template whose user turn it could fill"):
        train_drafter(target, tmp_path / "out", tmp_path / "work2", RECIPE)
    with pytest.raises(ConfigError, match="is a DeepSeek-V4-style model, whose drafter is part of its checkpoint"):
        train_drafter("nano", tmp_path / "out", tmp_path / "work3", RECIPE)


@pytest.mark.long
def test_prompts_without_end_of_which_none_is_short_enough_end_the_run(target: Path, tmp_path: Path):
    rollout: Any = SimpleNamespace(slots=2, prompt=4, new=4)
    with pytest.raises(ConfigError, match="no prompt of at most 4 tokens has an answer, and 1000 are longer"):
        answers(rollout, (), repeat([1] * 9), values=(0.0,), seed=0, wanted=3)
    shutil.copytree(target, tmp_path / "model")
    (tmp_path / "model/chat_template.jinja").write_text("{% for m in messages %}<{{ m.content }}{% endfor %}")
    with pytest.raises(ConfigError, match="in 16 user turns in a row the model did not come to an end within prompt_"):
        train_drafter(tmp_path / "model", tmp_path / "out", tmp_path / "work", replace(RECIPE, prompt_tokens=2))


def test_prompts_that_are_made_up_begin_with_the_openings_in_turn(target: Path, monkeypatch):
    """The model reads the opened user turn, and what it adds stands behind the opening."""
    tokenizer, read = letters(), []

    class Fixed:
        def __init__(self, graph, slots, prompt, new, eos):
            self.prompt = prompt

        def __call__(self, states, prompts, temperature, seed):
            read.extend(tokenizer.decode(row[:n].tolist()) for row, n in zip(prompts.token, prompts.length, strict=True))
            return SimpleNamespace(token=np.asarray([[*tokenizer.encode(" z").ids, 3]] * 4), count=np.full(4, 3))

    monkeypatch.setattr(separate, "Rollout", Fixed)
    chat = SimpleNamespace(
        render=lambda messages, add_generation_prompt: f"<{messages[0]['content']}>",
        encode=lambda messages: tokenizer.encode(messages[0]["content"]).ids,
    )
    config = open_checkpoint(target, dtype=jnp.float32).config
    model = cast(Any, separate.Target)(config, nnx.Linear(1, 1, rngs=nnx.Rngs(0)), tokenizer, chat)
    recipe = replace(RECIPE, openings=("", "how", "what is"))
    words = list(islice(separate._questions(model, recipe), 8))
    assert words == ["z", "how z", "what is z", "z"] * 2
    both = list(separate._words(model, recipe, ["one", "two", "three"], True))
    assert both == ["one", "z", "two", "how z", "three", "what is z"]
    assert list(separate._words(model, recipe, ["one", "two"], False)) == ["one", "two"]
    read = read[:8]
    assert read == [tokenizer.decode(tokenizer.encode("<" + opening).ids) for opening in ("", "how", "what is", "")] * 2


def test_a_step_that_is_not_finite_stops_the_run_with_its_batch(target: Path, tmp_path: Path):
    with pytest.raises(TrainingDiverged, match=r"at step \d \(batch \d of seed 3\)"):
        train_drafter(target, tmp_path / "out", tmp_path / "work", replace(RECIPE, peak=1e30), prompts=PROMPTS)
    assert not list((tmp_path / "out").iterdir())
