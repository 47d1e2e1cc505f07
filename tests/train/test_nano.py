"""The recipe: faults of its command line, and all of it on a tiny model and a made-up corpus."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from dspark_jax.checkpoint.reader import read_checkpoint
from dspark_jax.checkpoint.writer import write_checkpoint
from dspark_jax.config import DraftConfig
from dspark_jax.errors import ConfigError
from dspark_jax.train import nano
from dspark_jax.train.judge import bits_per_byte
from dspark_jax.train.recipe import Progress, _between
from helpers.checkpoints import random_params
from helpers.micro import MICRO

TARGET = replace(MICRO, vocab_size=12)
DRAFT = DraftConfig(block_size=2, noise_token_id=2, target_layer_ids=(0, 1), num_stages=1, markov_rank=3)
TINY = """--slots 52 --batch 4 --polish-steps 52 --regenerate-tokens 600 --draft-steps 6 --draft-batch 4 --anchors 4
          --stages 2 --markov-rank 4 --distinct-goal 1""".split()


def documents(count: int, seed: int) -> np.ndarray:
    """A stream of documents with a simple law: mostly the next token upwards."""
    rng = np.random.default_rng(seed)
    parts = []
    for size in rng.integers(12, 40, count):
        walk = 3 + np.cumsum(rng.choice([1, 1, 1, 2], size)) % 9
        parts += [[0], walk, [1]]
    return np.concatenate(parts).astype(np.uint16)


@pytest.fixture
def corpus(tmp_path, monkeypatch) -> Path:
    """Files as the corpus command writes them, and the recipe's sizes brought down to the tiny model."""
    monkeypatch.setattr(nano, "nano_config", lambda: (TARGET, DRAFT))
    for name, value in (("LENGTH", 24), ("PROMPT", 6), ("NEW", 12), ("SHORTEST", 3)):
        monkeypatch.setattr(nano, name, value)
    folder = tmp_path / "corpus"
    folder.mkdir()
    np.save(folder / "train.npy", documents(100, 0))
    for i, kind in enumerate(("code", "prose")):
        np.save(folder / f"valid_{kind}.npy", documents(12, 1 + i))
        (folder / f"valid_{kind}.txt").write_text("x" * 300)
    (folder / "tokenizer.json").write_text('{"made": "up"}')
    return folder


@pytest.fixture
def target(tmp_path) -> Path:
    """A finished target; its tokenizer.json is written in another way than the corpus's."""
    folder = tmp_path / "finished"
    write_checkpoint(folder, TARGET, None, random_params(TARGET, None))
    (folder / "tokenizer.json").write_text('{\n "made": "up"\n}')
    return folder


def command(tmp_path: Path, *more: str) -> list[str]:
    folders = [f"--{name}={tmp_path / name}" for name in ("corpus", "work", "out")]
    return [*folders, *TINY, *more]


def check_output(tmp_path: Path) -> dict:
    """The finished checkpoint and its record."""
    out = tmp_path / "out"
    loaded = read_checkpoint(out)
    assert loaded.config == TARGET and loaded.draft is not None
    assert (loaded.draft.num_stages, loaded.draft.markov_rank) == (2, 4)
    assert (out / "tokenizer.json").read_text() == '{"made": "up"}'
    return json.loads((out / "training.json").read_text())


@pytest.mark.long
@pytest.mark.parametrize("limit", ["1000", "0"])
def test_all_stages_from_a_finished_target(limit, corpus, target, tmp_path, capsys):
    """At once; and stopped at the first chance, then gone on by the same command."""
    words = command(tmp_path, f"--target={target}", f"--seconds={limit}")
    codes = [nano.main(words)]
    if limit == "0":
        codes.append(nano.main(words))
    assert codes == ([3, 0] if limit == "0" else [0])
    record = check_output(tmp_path)
    assert list(record["seconds_after"]) == ["polish", "regenerate", "draft"]
    for quality in (record["target_quality"], record["polished_quality"]):
        assert set(quality["bits_per_byte"]["code"]) == {"indexer", "random", "all"}
        assert 0 < quality["distinct_4"]["prose"] <= 1
    assert record["regenerated_tokens"] >= 600 and record["polish"]["step"] == 52 and record["draft"]["step"] == 6
    assert record["settings"]["markov_rank"] == 4 and record["parameters"]["draft"] > 0
    assert capsys.readouterr().out.count("time is up; the same command goes on from") == len(codes) - 1

    # The drafter was trained on the very target that is shipped; its weights and the polished ones are equal bit for bit.
    shipped, polished = load_file(tmp_path / "out/model.safetensors"), load_file(tmp_path / "work/polished/model.safetensors")
    for key, value in polished.items():
        np.testing.assert_array_equal(shipped[key].view(np.uint8), value.view(np.uint8))
    before = load_file(target / "model.safetensors")
    assert any((before[k].view(np.uint8) != v.view(np.uint8)).any() for k, v in polished.items())
    assert any(key.startswith("mtp.1.") for key in shipped)

    # Other settings in the same folder would mix two recipes.
    assert nano.main(command(tmp_path, f"--target={target}", "--polish-peak=0.5")) == 2
    assert "polish_peak 0.0001 and now 0.5); use a fresh folder" in capsys.readouterr().err


@pytest.mark.long
def test_all_stages_from_nothing(corpus, tmp_path):
    """Pre-training, no polish, no text of its own: each can be left out."""
    words = command(tmp_path, "--target-steps=8", "--polish-steps=0", "--regenerate-tokens=0")
    assert nano.main(words) == 0
    record = check_output(tmp_path)
    assert list(record["seconds_after"]) == ["target", "draft"] and record["target"]["step"] == 8
    assert "target_quality" in record and "polished_quality" not in record and "regenerated_tokens" not in record
    table = load_file(tmp_path / "work/target-only/model.safetensors")["layers.0.ffn.gate.tid2eid"]
    assert len(np.unique(table)) == TARGET.n_routed_experts


FAULTS = [
    (["--regenerated-share=1.5"], ["--regenerated-share is 1.5; expected 0 to 1"]),
    (["--polish-share=1.1"], ["--polish-share is 1.1; expected 0 to 1"]),
    (["--distinct-goal=-1"], ["--distinct-goal is -1.0; expected 0 to 1"]),
    (["--slots=100"], ["--slots is 100; expected a multiple of --batch, 64"]),
    (["--slots=32", "--batch=32"], ["--slots is 32; expected at least 50"]),
    (["--batch=0"], ["--batch is 0; expected at least 1"]),
    (["--polish-steps=-1"], ["--polish-steps is -1; expected at least 0"]),
    (["--polish-steps=3"], ["--polish-steps is 3; expected 0 or at least 4"]),
    (["--draft-steps=0", "--target-steps=3"], ["--draft-steps is 0; expected at least 4", "--target-steps is 3"]),
    (["--stages=0", "--markov-rank=0"], ["--stages is 0; expected at least 1", "--markov-rank is 0"]),
    (["--anchors=0", "--draft-batch=0"], ["--anchors is 0", "--draft-batch is 0"]),
    (["--peak=0"], ["--peak is 0.0; expected more than 0"]),
    (["--polish-peak=nan"], ["--polish-peak is nan; expected more than 0"]),
    (["--draft-peak=-1"], ["--draft-peak is -1.0"]),
    (["--polish-weight=-1"], ["--polish-weight is -1.0; expected at least 0"]),
]


@pytest.mark.parametrize(("words", "messages"), FAULTS, ids=[words[0] for words, _ in FAULTS])
def test_impossible_arguments(words, messages, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert nano.main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: arguments") and all(message in error for message in messages)
    assert not any(tmp_path.iterdir())


def test_the_defaults_are_possible():
    args = nano.arguments([])
    assert args.slots % args.batch == 0 and args.target is None
    config, draft = nano.nano_config()
    assert not replace(draft, num_stages=args.stages, markov_rank=args.markov_rank).faults(config)
    assert (nano.PROMPT + nano.NEW) % config.sliding_window == 0 == nano.LENGTH % config.sliding_window


def test_missing_and_foreign_files(corpus, target, tmp_path, capsys):
    def error(*more: str) -> str:
        assert nano.main(command(tmp_path, *more)) == 2
        return capsys.readouterr().err

    (target / "tokenizer.json").write_text('{"made": "otherwise"}')
    assert "its tokenizer.json is not that of --corpus" in error(f"--target={target}")
    (target / "tokenizer.json").unlink()
    other = replace(TARGET, index_topk=2)
    write_checkpoint(target, other, None, random_params(other, None))
    assert "its config.json is not that of nano_config()" in error(f"--target={target}")
    (corpus / "train.npy").unlink()
    assert "train.npy does not exist; build it with" in error()
    (corpus / "tokenizer.json").unlink()
    assert "tokenizer.json does not exist; build it with" in error()


def test_progress_is_kept_between_runs(tmp_path):
    progress = Progress(tmp_path, {"a": 1})
    progress.note(figure=0.5)
    progress.finish("one")
    again = Progress(tmp_path, {"a": 1})
    assert again.done("one") and not again.done("two") and again.values["figure"] == 0.5
    assert again.seconds() >= again.values["seconds"]
    with pytest.raises(ConfigError, match=r"\(a 1 and now 2, b None and now 3\); use a fresh folder"):
        Progress(tmp_path, {"a": 2, "b": 3})


def test_bits_per_byte_scores_every_token_once():
    """A uniform model over 8 tokens costs 3 bits a token; bos and the padding of the last batch cost nothing."""

    def run(tokens, labels):
        scored.append((tokens, labels))
        return jnp.sum(labels >= 0) * np.log(8)

    scored: list = []
    stream = np.array([0, 5, 6, 1, 0, 7, 5, 1, 0, 5, 6, 7, 1], np.uint16)
    found = bits_per_byte(run, (), stream, num_bytes=20, bos=0, length=4, batch=2)
    assert found == pytest.approx(3 * 10 / 20)
    labels = np.concatenate([part.reshape(-1) for _, part in scored])
    assert labels[:12].tolist() == [5, 6, 1, -1, 7, 5, 1, -1, 5, 6, 7, 1] and (labels[12:] == -1).all()
    assert np.concatenate([part.reshape(-1) for part, _ in scored])[:12].tolist() == stream[:12].tolist()


def test_the_shipped_configuration_has_every_mechanism():
    config, draft = nano.nano_config()
    assert {*config.compress_ratios} == {0, 4, 16} and config.num_hash_layers == 1 and draft.block_size == 5
    graph = jax.eval_shape(lambda: nnx.state(nano_model(config, draft)))
    assert 6e6 < sum(x.size for x in jax.tree.leaves(graph)) < 8e6


def nano_model(config, draft):
    from dspark_jax.models.speculative import SpeculativeLM

    return SpeculativeLM(config, draft, rngs=nnx.Rngs(0))


def test_the_mean_of_weights_leaves_tables_alone():
    before, after = np.array([0.0, 4.0], np.float32), jnp.array([2.0, 0.0])
    for share, expected in ((0.0, [0.0, 4.0]), (0.25, [0.5, 3.0]), (1.0, [2.0, 0.0])):
        np.testing.assert_array_equal(_between(before, after, share=share), expected)
    np.testing.assert_array_equal(_between(np.array([1, 2]), jnp.array([3, 4]), share=0.5), [3, 4])
