"""A tokenizer without a vocabulary file, for models with a handful of tokens."""

from collections.abc import Iterable

_ALPHABET = "abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ.,;:!?'-\n0123456789"


class DummyTokenizer:
    """One token a character of `alphabet`, or one a UTF-8 byte (`alphabet=None`).

    `vocab_size` may exceed the alphabet: the further ids decode to `<id>`, and encoding never produces them.
    """

    def __init__(self, vocab_size: int = 256, alphabet: str | None = None):
        if alphabet is not None and len(set(alphabet)) != len(alphabet):
            raise ValueError(f"alphabet = {alphabet!r}; expected every character once")
        least = 256 if alphabet is None else len(alphabet)
        if vocab_size < least:
            raise ValueError(f"vocab_size = {vocab_size}; expected at least {least}, the number of symbols")
        self.vocab_size = vocab_size
        self.alphabet = alphabet

    @classmethod
    def letters(cls, vocab_size: int) -> "DummyTokenizer":
        """Ids 0, 1, 2, … are the letters a, b, c, …; at most 72 symbols, the rest decode to `<id>`."""
        return cls(vocab_size, _ALPHABET[:vocab_size])

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; ValueError names the characters that have none."""
        if self.alphabet is None:
            return list(text.encode("utf-8"))
        ids = {character: i for i, character in enumerate(self.alphabet)}
        unknown = sorted(set(text) - ids.keys())
        if unknown:
            raise ValueError(f"text holds {''.join(unknown)!r}; expected only characters of {self.alphabet!r}")
        return [ids[character] for character in text]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids; the inverse of `encode`. Incomplete UTF-8 becomes the replacement character."""
        ids = [int(i) for i in ids]
        bad = [i for i in ids if not 0 <= i < self.vocab_size]
        if bad:
            raise ValueError(f"ids hold {bad!r}; expected ids in 0..{self.vocab_size - 1}")
        if self.alphabet is not None:
            return "".join(self.alphabet[i] if i < len(self.alphabet) else f"<{i}>" for i in ids)
        raw = b"".join(bytes([i]) if i < 256 else f"<{i}>".encode() for i in ids)
        return raw.decode("utf-8", errors="replace")
