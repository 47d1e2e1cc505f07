"""DummyTokenizer: round trips, and clear refusals."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_jax.testing import DummyTokenizer


@given(st.text(max_size=20))
def test_bytes_round_trip(text):
    tokenizer = DummyTokenizer()
    ids = tokenizer.encode(text)
    assert all(0 <= i < 256 for i in ids)
    assert tokenizer.decode(ids) == text


def test_letters():
    tokenizer = DummyTokenizer.letters(4)
    assert tokenizer.vocab_size == 4
    assert tokenizer.encode("badd") == [1, 0, 3, 3]
    assert tokenizer.decode([1, 0, 3, 3]) == "badd"
    with pytest.raises(ValueError, match="'xy'"):
        tokenizer.encode("axy")
    with pytest.raises(ValueError, match=r"\[4, -1\].*0\.\.3"):
        tokenizer.decode([0, 4, -1])


def test_ids_without_a_symbol_still_decode():
    assert DummyTokenizer.letters(100).decode([0, 99]) == "a<99>"
    assert DummyTokenizer(300).decode([97, 256]) == "a<256>"


def test_refuses_impossible_vocabularies():
    with pytest.raises(ValueError, match="vocab_size = 2"):
        DummyTokenizer(2, "abc")
    with pytest.raises(ValueError, match="vocab_size = 4"):
        DummyTokenizer(4)
    with pytest.raises(ValueError, match="once"):
        DummyTokenizer(4, "aa")
