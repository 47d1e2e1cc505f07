"""Baselines: the n-gram model is normalised, and bits per byte mean what they say."""

import json
from pathlib import Path

import numpy as np
import pytest

from dspark_jax.errors import ConfigError
from dspark_jax.train import baselines
from dspark_jax.train.baselines import NgramModel, bits_per_byte, xz_bits_per_byte


@pytest.fixture(scope="module")
def model() -> NgramModel:
    generator = np.random.default_rng(0)
    tokens = np.cumsum(generator.integers(0, 3, 3000)) % 17
    return NgramModel(tokens.astype(np.uint16), vocab_size=20, order=4)


@pytest.mark.parametrize("context", [[], [3], [3, 4, 6], [16, 0, 1, 2, 3], [19, 18, 19], [5, 5, 5, 5]])
def test_distributions_sum_to_one(model: NgramModel, context: list[int]) -> None:
    chances = model.distribution(np.array(context, np.int64))
    assert chances.shape == (20,)
    assert np.all(chances > 0)
    assert chances.sum() == pytest.approx(1, abs=1e-5)


def test_learns_which_steps_occur(model: NgramModel) -> None:
    chances = model.distribution(np.array([6, 7, 8]))
    assert chances[[8, 9, 10]].sum() > 0.95


def test_known_counts_by_hand() -> None:
    # a b a b a c: unigram level (order 1) has counts a 3, b 2, c 1 and the constant discount 0.75.
    model = NgramModel(np.array([0, 1, 0, 1, 0, 2]), vocab_size=4, order=1)
    backoff = 3 * 0.75 / 6
    expected = np.array([2.25, 1.25, 0.25, 0]) / 6 + backoff / 4
    assert model.distribution(np.zeros(0, np.int64)) == pytest.approx(expected, abs=1e-6)


def test_sequence_score_is_the_chain_of_its_distributions(model: NgramModel) -> None:
    tokens = np.array([1, 2, 4, 5, 5, 19, 3])
    chain = [np.log2(model.distribution(tokens[:index])[token]) for index, token in enumerate(tokens)]
    assert model.log2_probabilities(tokens) == pytest.approx(chain, abs=1e-6)


def test_random_bytes_cost_eight_bits() -> None:
    generator = np.random.default_rng(1)
    train, held = generator.integers(0, 256, 20_000), generator.integers(0, 256, 5000)
    scores = NgramModel(train, vocab_size=256, order=2).log2_probabilities(held)
    assert bits_per_byte(scores, held.size) == pytest.approx(8, abs=0.15)
    assert xz_bits_per_byte(held.astype(np.uint8).tobytes()) == pytest.approx(8, abs=0.15)


def test_bits_per_byte_counts_bytes_not_tokens() -> None:
    assert bits_per_byte(np.array([-3.0, -5.0]), 4) == 2.0


@pytest.mark.parametrize(("scores", "size"), [([0.5], 1), ([-np.inf], 1), ([np.nan], 1), ([-1.0], 0)])
def test_bits_per_byte_refuses_what_is_no_probability(scores: list[float], size: int) -> None:
    with pytest.raises(ConfigError, match="bits_per_byte"):
        bits_per_byte(np.array(scores), size)


def test_model_refuses_bad_input() -> None:
    with pytest.raises(ConfigError, match=r"(?s)2 faults.*order=60.*largest id 9"):
        NgramModel(np.full(5000, 9), vocab_size=9, order=60)
    with pytest.raises(ConfigError, match="0 of them"):
        NgramModel(np.zeros(0, np.uint16), vocab_size=10)


def test_command_prints_both_baselines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert baselines.main(["--corpus", str(tmp_path)]) == 2
    assert "valid_prose.txt is missing" in capsys.readouterr().err
    text = b"the cat sat on the mat and the rat sat on the cat\n" * 20
    tokens = np.array([0, *(np.frombuffer(text, np.uint8) + 4), 1], np.uint16)
    for name in ("train", "valid_code", "valid_prose"):
        np.save(tmp_path / f"{name}.npy", tokens)
        (tmp_path / f"{name}.txt").write_bytes(text)
    (tmp_path / "meta.json").write_text(json.dumps({"vocab_size": 260}))
    assert baselines.main(["--corpus", str(tmp_path)]) == 0
    report = json.loads(capsys.readouterr().out)["bits_per_byte"]
    scores = NgramModel(tokens, 260, order=5).log2_probabilities(tokens)
    assert report["code"]["ngram"] == pytest.approx(bits_per_byte(scores[1:], len(text)), abs=1e-4)
    assert 0 < report["prose"]["xz"] < 8
