"""The tokenizer of a checkpoint folder."""

from pathlib import Path

from tokenizers import Tokenizer

from dspark_jax.errors import CheckpointError


def read_tokenizer(folder: Path, vocab_size: int | None = None) -> Tokenizer:
    """Reads `tokenizer.json`; padding and truncation that it may ask for are switched off.

    Args:
      folder: the checkpoint's folder.
      vocab_size: the model's; the tokenizer may have fewer tokens (embeddings are often padded), never more.

    Raises:
      CheckpointError: the file is missing or damaged, or makes ids that the model has no embedding for.
    """
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"{folder}: no tokenizer.json; copy it from the published model")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{path}: not a tokenizer ({error}); download it again") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    if not vocab:
        raise CheckpointError(f"{path}: has no tokens; download it again")
    token = max(vocab, key=vocab.__getitem__)
    if vocab_size is not None and vocab[token] >= vocab_size:
        raise CheckpointError(
            f"{path}: token {token!r} has id {vocab[token]}, but the model's vocab_size is {vocab_size};"
            " use the tokenizer published with these weights"
        )
    return tokenizer
