"""Text corpus, tokenizer and token files that the shipped `nano` model is trained on.

Every source is a package that pip can fetch (`configs/nano_corpus.yaml` pins name, version and licence) or the standard
library of the running interpreter. One command rebuilds all of it:

    python -m dspark_jax.train.corpus --out .corpus

Stages: download -> read archives -> filter -> de-duplicate -> split by document -> train the tokenizer -> write tokens.

Output folder:
    tokenizer.json                      byte-level BPE, see `train_tokenizer`
    train.npy                           uint16[tokens]: documents as bos + tokens + eos, shuffled, code and prose mixed
    train.npy.xz                        the same file, compressed
    valid_code.npy, valid_prose.npy     uint16[tokens]: held-out documents in the same layout
    valid_code.txt, valid_prose.txt     the same held-out documents as UTF-8, one after the other
    heldout.jsonl                       the held-out documents one a line: kind, package, path, text
    meta.json                           counts, bytes per token, licences, digests
"""

import argparse
import hashlib
import io
import json
import lzma
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import header_data_from_array_1_0, write_array_header_1_0
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from dspark_jax.errors import ConfigError
from dspark_jax.train.sources import (
    DEFAULT_CONFIG,
    CorpusConfig,
    Document,
    Source,
    download,
    load_config,
    read_source,
    source_version,
)

VOCAB_SIZE = 4096
SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|noise|>", "<|pad|>")
BOS, EOS, NOISE, PAD = range(4)

# One pre-token each: a word (underscores belong to it, so `__init__` can become one token) with the space before it;
# one digit; a run of punctuation together with the line break and indentation after it (`):` + newline + 8 spaces is
# one unit of Python); a line break with indentation; a run of spaces.
SPLIT_PATTERN = r" ?[\p{L}\p{M}_]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}_]+(?:\n[ \t]*)*|[ \t]*(?:\n[ \t]*)+|\s+(?!\S)|\s+"


def _long_lines(text: str) -> set[int]:
    """Hashes of the lines that carry content: two texts that share most of them are copies of one another."""
    return {hash(line) for line in map(str.strip, text.split("\n")) if len(line) >= 24}


def deduplicate(documents: Iterable[Document], dropped: Counter[str]) -> list[Document]:
    """Keeps the first of documents with equal text, and of those whose long lines were to 70 % seen before."""
    digests: set[bytes] = set()
    seen: set[int] = set()
    kept: list[Document] = []
    for document in documents:
        digest = hashlib.sha256(document.text.encode()).digest()
        lines = _long_lines(document.text)
        if digest in digests:
            dropped["exact duplicate"] += 1
        elif len(lines) >= 5 and len(lines & seen) > 0.7 * len(lines):
            dropped["near duplicate"] += 1
        else:
            digests.add(digest)
            seen |= lines
            kept.append(document)
    return kept


def cap_code(documents: list[Document], max_mb: float) -> list[Document]:
    """Keeps all prose and at most `max_mb` megabytes of code (0: all), a spread of files chosen by their keys."""
    used = 0
    kept: list[Document] = []
    for document in sorted(documents, key=lambda document: document.key):
        size = len(document.text) if document.kind == "code" else 0
        if not max_mb or used + size <= max_mb * 1e6:
            used += size
            kept.append(document)
    return kept


def split(
    documents: list[Document], sources: Iterable[Source], heldout_bytes: int, dropped: Counter[str]
) -> tuple[list[Document], list[Document]]:
    """Training and held-out documents; no document, and no near copy of one, is on both sides.

    Held out are the packages and paths that the table names, then documents in order of their key until each kind has
    `heldout_bytes`. A held-out document that shares over 30 % of its long lines with training text is not kept as
    held-out: it goes back to training if the key chose it, and is dropped if the table named it.
    """
    by_name = {source.name: source for source in sources}
    named = [document for document in documents if by_name[document.package].holds_out(document.path)]
    others = [document for document in documents if not by_name[document.package].holds_out(document.path)]
    chosen: list[Document] = []
    for kind in ("code", "prose"):
        used = sum(len(document.text) for document in named if document.kind == kind)
        # Short enough that many documents fit, long enough that each has a context to continue.
        pool = [document for document in others if document.kind == kind and 1000 <= len(document.text) <= 40_000]
        for document in sorted(pool, key=lambda document: document.key):
            if used + len(document.text) <= heldout_bytes:
                used += len(document.text)
                chosen.append(document)
            elif used > 0.99 * heldout_bytes:
                break
    picked = {(document.package, document.path) for document in chosen}
    train = [document for document in others if (document.package, document.path) not in picked]
    seen: set[int] = set()
    for document in train:
        seen |= _long_lines(document.text)
    heldout: list[Document] = []
    for document in named + chosen:
        lines = _long_lines(document.text)
        if len(lines & seen) <= 0.3 * len(lines):
            heldout.append(document)
        elif (document.package, document.path) in picked:
            train.append(document)
        else:
            dropped["named held-out, but seen in training"] += 1
    return train, heldout


# Tokenizer


def _pattern_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, to_bytes])  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    return tokenizer


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Byte-level BPE of `vocab_size` tokens in all: four special ones (ids 0-3), all 256 bytes, then merges.

    Digits stay single, and there is no unknown token: every text comes back byte for byte from its ids.
    """
    tokenizer = _pattern_tokenizer()
    trainer = trainers.BpeTrainer(  # pyright: ignore[reportCallIssue]
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=24,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.encode_special_tokens = True
    return tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    """Reads tokenizer.json. The text "<|bos|>" in a prompt is plain text: no input can forge a special token."""
    if not path.is_file():
        raise ConfigError(f"tokenizer {path}: no such file; build it with python -m dspark_jax.train.corpus")
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.encode_special_tokens = True
    return tokenizer


def encode_documents(tokenizer: Tokenizer, texts: list[str], batch_chars: int = 8_000_000) -> list[np.ndarray]:
    """Each text as uint16[tokens + 2]: bos, its tokens, eos. Batches use every core."""
    encoded: list[np.ndarray] = []
    start, started = 0, time.monotonic()
    while start < len(texts):
        stop, size = start, 0
        while stop < len(texts) and (stop == start or size < batch_chars):
            size += len(texts[stop])
            stop += 1
        for encoding in tokenizer.encode_batch_fast(texts[start:stop], add_special_tokens=False):
            encoded.append(np.asarray([BOS, *encoding.ids, EOS], np.uint16))
        start = stop
        print(f"tokenize {start}/{len(texts)} documents, {time.monotonic() - started:.0f} s", flush=True)
    return encoded


# Output


def _xz_piece(data: bytes) -> bytes:
    # Tokens are pairs of bytes: position and literal context modulo 2 suit them better than the defaults for text.
    options = {"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 1 << 26, "lc": 2, "lp": 1, "pb": 1}
    return lzma.compress(data, lzma.FORMAT_XZ, filters=[options])


def compress_npy(tokens: np.ndarray, path: Path, jobs: int = 2) -> int:
    """Writes `tokens` as an .npy file inside .xz (one stream per job, which xz reads as one); returns its bytes."""
    head = io.BytesIO()
    write_array_header_1_0(head, header_data_from_array_1_0(tokens))
    data = head.getvalue() + tokens.tobytes()
    edge = (len(data) // jobs + 1) & ~1
    pieces = [data[start : start + edge] for start in range(0, len(data), edge)]
    with ThreadPoolExecutor(jobs) as pool, path.open("wb") as file:  # the compressor works outside the interpreter lock
        for piece in pool.map(_xz_piece, pieces):
            file.write(piece)
    return path.stat().st_size


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def gather(
    config: CorpusConfig, cache: Path, jobs: int, dropped: Counter[str]
) -> tuple[list[Document], list[Document]]:
    """Downloads, reads, filters, de-duplicates and splits: (training documents in shuffled order, held-out ones)."""
    archives = download(config.sources, cache, jobs)
    documents: list[Document] = []
    # Fresh processes: the tokenizer's and JAX's threads do not survive a fork.
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        parts = pool.map(read_source, config.sources, [archives.get(source.name) for source in config.sources])
        for source, (kept, reasons) in zip(config.sources, parts, strict=True):
            kept = cap_code(kept, source.max_mb or config.max_mb)
            documents += kept
            dropped.update(reasons)
            size = sum(len(document.text) for document in kept)
            print(f"read {source.name} {source.version}: {len(kept)} documents, {size / 1e6:.1f} MB", flush=True)
    train, heldout = split(deduplicate(documents, dropped), config.sources, config.heldout_bytes, dropped)
    random.Random(config.seed).shuffle(train)
    heldout.sort(key=lambda document: (document.kind, document.package, document.path))
    return train, heldout


def build(config: CorpusConfig, out: Path, cache: Path, jobs: int = 2, archive: bool = True) -> dict[str, Any]:
    """Builds every file of the output folder (see the module's docstring) and returns the contents of meta.json."""
    out.mkdir(parents=True, exist_ok=True)
    dropped: Counter[str] = Counter()
    train, heldout = gather(config, cache, jobs, dropped)
    sample: list[str] = []
    size = 0
    for document in train:
        if size >= config.tokenizer_bytes:
            break
        sample.append(document.text)
        size += len(document.text)
    print(f"train tokenizer on {size / 1e6:.1f} MB", flush=True)
    tokenizer = train_tokenizer(sample)
    tokenizer.save(str(out / "tokenizer.json"))

    meta: dict[str, Any] = {"vocab_size": tokenizer.get_vocab_size(), "seed": config.seed, "splits": {}}
    for name, part in (
        ("train", train),
        ("valid_code", [document for document in heldout if document.kind == "code"]),
        ("valid_prose", [document for document in heldout if document.kind == "prose"]),
    ):
        encoded = encode_documents(tokenizer, [document.text for document in part])
        tokens = np.concatenate(encoded) if encoded else np.zeros(0, np.uint16)
        np.save(out / f"{name}.npy", tokens)
        counts: dict[str, dict[str, float]] = {}
        for document, ids in zip(part, encoded, strict=True):
            entry = counts.setdefault(document.kind, {"documents": 0, "bytes": 0, "tokens": 0})
            entry["documents"] += 1
            entry["bytes"] += len(document.text.encode())
            entry["tokens"] += len(ids)
        for entry in counts.values():
            entry["bytes_per_token"] = round(entry["bytes"] / entry["tokens"], 4)
        meta["splits"][name] = {"tokens": int(tokens.size), "kinds": counts, "sha256": _digest(out / f"{name}.npy")}
        if name != "train":
            (out / f"{name}.txt").write_bytes("".join(document.text for document in part).encode())
    with (out / "heldout.jsonl").open("w", encoding="utf-8") as file:
        for document in heldout:
            file.write(json.dumps(document.__dict__, ensure_ascii=False) + "\n")

    sizes: Counter[tuple[str, str]] = Counter()
    for document in train + heldout:
        sizes[document.package, document.kind] += len(document.text.encode())
    meta["sources"] = [
        {"name": source.name, "version": source_version(source), "licence": source.licence}
        | {kind + "_bytes": sizes[source.name, kind] for kind in ("code", "prose") if sizes[source.name, kind]}
        for source in config.sources
    ]
    meta["dropped"] = dict(dropped.most_common())
    meta["tokenizer_sha256"] = _digest(out / "tokenizer.json")
    if archive:
        print("compress train.npy", flush=True)
        meta["archive_bytes"] = compress_npy(np.load(out / "train.npy"), out / "train.npy.xz", jobs)
    (out / "meta.json").write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
    return meta


def main(argv: list[str] | None = None) -> int:
    """The command line; see the module's text. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m dspark_jax.train.corpus", description="Rebuild the nano corpus.")
    parser.add_argument("--out", type=Path, default=Path(".corpus"), help="output folder")
    parser.add_argument("--config", type=Path, default=DEFAULT_CONFIG, help="YAML table of packages")
    parser.add_argument("--cache", type=Path, default=None, help="folder of downloaded archives (OUT/packages)")
    parser.add_argument("--jobs", type=int, default=2, help="downloads and compressors at a time")
    parser.add_argument("--no-archive", action="store_true", help="skip train.npy.xz")
    options = parser.parse_args(argv)
    try:
        config = load_config(options.config)
        cache = options.cache or options.out / "packages"
        meta = build(config, options.out, cache, options.jobs, archive=not options.no_archive)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps({key: meta[key] for key in ("splits", "dropped")}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
