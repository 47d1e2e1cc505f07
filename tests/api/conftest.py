"""Models that the tests of the Python interface and of the command line share; their programs compile once."""

from pathlib import Path

import pytest
from flax import nnx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from dspark_jax import LM, load
from dspark_jax.checkpoint.writer import write_checkpoint
from dspark_jax.testing import LookupTarget
from helpers.goldens import Golden, load_golden
from helpers.lookup_lm import agreeing, alphabet, lookup_lm, noisy


@pytest.fixture(scope="session")
def spelling() -> LM:
    """Continues the alphabet; every draft is accepted."""
    return lookup_lm(alphabet(), agreeing(alphabet()), max_position_embeddings=512)


@pytest.fixture(scope="session")
def babbling() -> LM:
    """A random chain of letters whose drafts are accepted now and then."""
    target = LookupTarget.random(16, seed=4)
    return lookup_lm(target, noisy(target), chunk=4)


@pytest.fixture(scope="session")
def golden() -> Golden:
    return load_golden(Path(__file__).parent.parent / "data" / "v4_tiny_goldens.npz")


@pytest.fixture(scope="session")
def tiny_folder(golden: Golden, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golden model as a checkpoint folder, its tokenizer one token a character."""
    folder = tmp_path_factory.mktemp("tiny")
    params = nnx.split(golden.model())[1]
    write_checkpoint(folder, golden.config, golden.draft, params, dtype="float32")
    characters = ["<bos>", "<eos>", *(chr(c) for c in range(ord("A"), ord("A") + golden.config.vocab_size - 2))]
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="A"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> LM:
    return load(tiny_folder)
