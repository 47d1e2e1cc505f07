"""Token ids to text as they arrive, and the little that this package asks of a tokenizer."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, Protocol

REPLACEMENT = "\ufffd"


class Tokenizer(Protocol):
    """Text to ids, and ids back to text, special tokens left out.

    `encode` adds no special token and makes none out of text that spells one: a prompt cannot forge it.
    """

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class _FileTokenizer:
    """A `tokenizers.Tokenizer` (tokenizer.json) as a `Tokenizer`; the given one is copied and stays as it is."""

    def __init__(self, inner: Any):
        self.inner = copy.deepcopy(inner)
        # Text such as "<|bos|>" is text. The setting is not part of tokenizer.json, so it is made here.
        self.inner.encode_special_tokens = True

    def encode(self, text: str) -> list[int]:
        return self.inner.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self.inner.decode(list(ids), skip_special_tokens=True)


def as_tokenizer(tokenizer: Any) -> Tokenizer:
    """`tokenizer` itself, or an adapter where it comes from the `tokenizers` package."""
    if type(tokenizer).__module__.partition(".")[0] == "tokenizers":
        return _FileTokenizer(tokenizer)
    return tokenizer


class TextStream:
    """Turns a growing list of tokens into pieces of text that never end inside a character.

    A byte-level token may hold half a character. Its text is held back until the character is complete, so the pieces,
    `flush` included, add up to the text of all tokens. Only the tokens since the last piece, and those of that piece
    (some decoders treat the first token of a text in a special way), are decoded again.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]):
        self._decode = decode
        self._ids: list[int] = []
        self._context = 0  # the first token of the last piece
        self._read = 0  # tokens whose text was given out

    def push(self, token: int) -> str:
        """The text that `token` completes; often that of one token, empty inside a character."""
        self._ids.append(token)
        whole = self._decode(self._ids[self._context :])
        if whole.endswith(REPLACEMENT):
            return ""
        return self._take(whole)

    def flush(self) -> str:
        """What is still held back at the end of a text; an incomplete character becomes U+FFFD."""
        return self._take(self._decode(self._ids[self._context :]))

    def _take(self, whole: str) -> str:
        piece = whole[len(self._decode(self._ids[self._context : self._read])) :]
        if self._read < len(self._ids):
            self._context, self._read = self._read, len(self._ids)
        return piece
