"""Models that the tests of the Python interface and of the command line share; their programs compile once."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from flax import nnx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from dspark_jax import LM, load
from dspark_jax.checkpoint.writer import write_checkpoint
from dspark_jax.testing import LookupTarget
from helpers.checkpoints import random_params
from helpers.lookup_lm import agreeing, alphabet, lookup_lm, noisy
from helpers.micro import MICRO, MICRO_DRAFT


@pytest.fixture(scope="session")
def spelling() -> LM:
    """Continues the alphabet; every draft is accepted."""
    return lookup_lm(alphabet(), agreeing(alphabet()), max_position_embeddings=512)


@pytest.fixture(scope="session")
def babbling() -> LM:
    """A random chain of letters whose drafts are accepted now and then."""
    target = LookupTarget.random(16, seed=4)
    return lookup_lm(target, noisy(target), chunk=4)


@dataclass(frozen=True)
class Tiny:
    """A real model: every kind of compressed layer, a hash table, one draft stage of three drafts."""

    config = replace(MICRO, vocab_size=12, max_position_embeddings=256)
    draft = replace(MICRO_DRAFT, noise_token_id=11, block_size=3)

    def params(self) -> nnx.State:
        return random_params(self.config, self.draft)


@pytest.fixture(scope="session")
def tiny_model() -> Tiny:
    return Tiny()


@pytest.fixture(scope="session")
def tiny_folder(tiny_model: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as a checkpoint folder, its tokenizer one token a character."""
    folder = tmp_path_factory.mktemp("tiny")
    write_checkpoint(folder, tiny_model.config, tiny_model.draft, tiny_model.params(), dtype="float32")
    letters = [chr(ord("A") + i) for i in range(tiny_model.config.vocab_size - 2)]
    vocabulary = {text: i for i, text in enumerate(["<bos>", "<eos>", *letters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="A"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> LM:
    return load(tiny_folder)
