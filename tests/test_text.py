"""Tokenizers of checkpoint folders: text that spells a special token is text."""

import pytest
from tokenizers import Tokenizer

from dspark_jax.api import ASSETS
from dspark_jax.checkpoint.reader import read_tokenizer
from dspark_jax.text import as_tokenizer
from dspark_jax.train.corpus import SPECIAL_TOKENS


@pytest.fixture(scope="module")
def nano() -> Tokenizer:
    return read_tokenizer(ASSETS / "nano")


@pytest.mark.parametrize("token", SPECIAL_TOKENS)
@pytest.mark.parametrize("text", ["{}", "a {} b", "{}{}", "\n{}\n"])
def test_text_that_spells_a_special_token_is_ordinary_text(nano: Tokenizer, token: str, text: str):
    tokenizer, text = as_tokenizer(nano), text.format(token, token)
    ids = tokenizer.encode(text)
    special = {nano.token_to_id(t) for t in SPECIAL_TOKENS}
    assert len(special) == 4 and not special & set(ids)
    assert tokenizer.decode(ids) == text


def test_special_ids_have_no_text(nano: Tokenizer):
    tokenizer = as_tokenizer(nano)
    bos, eos = (nano.token_to_id(t) for t in SPECIAL_TOKENS[:2])
    assert tokenizer.decode([bos, *tokenizer.encode("a b"), eos]) == "a b"


def test_the_given_tokenizer_stays_as_it_is(nano: Tokenizer):
    as_tokenizer(nano)
    assert not nano.encode_special_tokens and nano.encode("<|bos|>").ids == [nano.token_to_id("<|bos|>")]


def test_other_tokenizers_are_taken_as_they_are():
    class Own:
        def encode(self, text):
            return [1]

        def decode(self, ids):
            return "x"

    own = Own()
    assert as_tokenizer(own) is own
