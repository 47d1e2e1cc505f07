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
import ast
import fnmatch
import hashlib
import json
import lzma
import random
import re
import subprocess
import sys
import sysconfig
import tarfile
import time
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.lib.format import header_data_from_array_1_0, write_array_header_1_0
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from dspark_jax.errors import ConfigError, raise_all

VOCAB_SIZE = 4096
SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|noise|>", "<|pad|>")
BOS, EOS, NOISE, PAD = range(4)
DEFAULT_CONFIG = Path(__file__).parents[2] / "configs" / "nano_corpus.yaml"

# One pre-token each: a word (underscores belong to it, so `__init__` can become one token) with the space before it;
# one digit; a run of punctuation together with the line break and indentation after it (`):` + newline + 8 spaces is
# one unit of Python); a line break with indentation; a run of spaces.
SPLIT_PATTERN = r" ?[\p{L}\p{M}_]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}_]+(?:\n[ \t]*)*|[ \t]*(?:\n[ \t]*)+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class Document:
    """One text of the corpus: `kind` is "code" or "prose"; `package` and `path` say where it came from."""

    kind: str
    package: str
    path: str
    text: str

    @property
    def key(self) -> float:
        """Number in [0, 1) fixed by package and path: the split and the caps depend on nothing else."""
        digest = hashlib.sha256(f"{self.package}/{self.path}".encode()).digest()
        return int.from_bytes(digest[:8], "big") / 2**64


@dataclass(frozen=True)
class Source:
    """One row of the package table.

    `use` lists what is read: "code" (*.py), "docs" (*.rst, *.md, *.txt under a documentation folder), "gutenberg"
    (plain texts that match `include`), "bible" (the table of verses of a pythonbible package).
    `heldout` is True (the whole package), or a list of patterns of document paths that training never sees.
    `max_mb` caps the code that the package contributes, 0 for no cap.
    """

    name: str
    version: str
    licence: str
    use: tuple[str, ...]
    format: str = "wheel"
    heldout: bool | tuple[str, ...] = False
    include: tuple[str, ...] = ()
    max_mb: float = 0.0

    def holds_out(self, path: str) -> bool:
        if isinstance(self.heldout, bool):
            return self.heldout
        return any(fnmatch.fnmatch(path, pattern) for pattern in self.heldout)


@dataclass(frozen=True)
class CorpusConfig:
    """The YAML table: `heldout_bytes` is the size wanted per kind, `max_mb` the default cap of a package's code."""

    seed: int
    heldout_bytes: int
    max_mb: float
    tokenizer_bytes: int
    sources: tuple[Source, ...] = field(repr=False)


def load_config(path: Path) -> CorpusConfig:
    """Reads the package table; raises ConfigError with every faulty row at once."""
    if not path.is_file():
        raise ConfigError(f"config {path}: no such file; pass --config with the YAML table of packages")
    raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    faults: list[str] = []
    sources: list[Source] = []
    for index, row in enumerate(raw.get("packages", [])):
        name = row.get("name", f"row {index}")
        missing = [key for key in ("name", "version", "licence", "use") if not row.get(key)]
        unknown = sorted(set(row) - set(Source.__dataclass_fields__))
        if missing or unknown:
            faults.append(f"{name}: missing {missing or 'nothing'}, unknown {unknown or 'nothing'}; fix the row")
            continue
        bad_use = sorted(set(row["use"]) - {"code", "docs", "gutenberg", "bible"})
        if bad_use or row.get("format", "wheel") not in ("wheel", "sdist", "stdlib"):
            faults.append(f"{name}: use={row['use']} format={row.get('format')}; see dspark_jax.train.corpus.Source")
            continue
        row = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
        sources.append(Source(**{**row, "version": str(row["version"])}))
    raise_all(ConfigError, str(path), faults)
    return CorpusConfig(
        seed=int(raw.get("seed", 0)),
        heldout_bytes=int(raw.get("heldout_bytes", 1_000_000)),
        max_mb=float(raw.get("max_mb", 0)),
        tokenizer_bytes=int(raw.get("tokenizer_bytes", 30_000_000)),
        sources=tuple(sources),
    )


# Download


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def find_archive(source: Source, cache: Path) -> Path | None:
    """Archive of this source in the cache folder, or None."""
    suffixes = (".whl",) if source.format == "wheel" else (".tar.gz", ".zip", ".tar.bz2")
    for path in sorted(cache.glob("*")):
        stem = _normal(path.name)
        if path.name.endswith(suffixes) and stem.startswith(_normal(f"{source.name}-{source.version}") + "-"):
            return path
    return None


def download(sources: Iterable[Source], cache: Path, jobs: int = 3) -> dict[str, Path]:
    """Fetches every archive that the cache lacks with `pip download --no-deps`; returns name -> archive.

    Raises ConfigError that names every package pip could not fetch. pip runs the build backend of a source archive to
    read its metadata, as it does on any installation.
    """
    cache.mkdir(parents=True, exist_ok=True)

    def fetch(source: Source) -> tuple[Source, Path | None, str]:
        found = find_archive(source, cache)
        if found is not None:
            return source, found, ""
        only = "--only-binary" if source.format == "wheel" else "--no-binary"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(cache)]
        only_name = ":all:" if source.format == "wheel" else source.name
        command += [only, only_name, f"{source.name}=={source.version}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = [line for line in done.stderr.splitlines() if "error" in line.lower()] or done.stderr.splitlines()
        return source, find_archive(source, cache), lines[0] if lines else "pip wrote no archive"

    archives: dict[str, Path] = {}
    faults: list[str] = []
    wanted = [source for source in sources if source.format != "stdlib"]
    with ThreadPoolExecutor(jobs) as pool:
        for count, (source, path, reason) in enumerate(pool.map(fetch, wanted), 1):
            if path is None:
                pin = f"{source.name}=={source.version}"
                faults.append(f"{pin} ({source.format}): pip could not fetch it: {reason}; fix or drop its row")
                continue
            archives[source.name] = path
            print(f"download {count}/{len(wanted)} {path.name}", flush=True)
    raise_all(ConfigError, "packages", faults)
    return archives


# Reading archives


def _archive_files(path: Path, suffixes: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    if path.suffix in (".whl", ".zip"):
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                if info.filename.endswith(suffixes):
                    yield info.filename, archive.read(info)
    else:
        with tarfile.open(path) as archive:
            for member in archive:
                stream = archive.extractfile(member) if member.isfile() and member.name.endswith(suffixes) else None
                if stream is not None:
                    # The first folder of a source archive is only name-version.
                    yield member.name.partition("/")[2], stream.read()


def _stdlib_files() -> Iterator[tuple[str, bytes]]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root).as_posix()
        if not relative.startswith(("site-packages/", "dist-packages/", "lib2to3/", "encodings/", "pydoc_data/")):
            yield relative, path.read_bytes()


def decode_text(data: bytes) -> str | None:
    """UTF-8 text with `\\n` line ends and exactly one at the end; None when the bytes are no UTF-8 text."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None
    if "\0" in text:
        return None
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text.strip("\n") + "\n"


def clean_gutenberg(text: str) -> str:
    """Drops the header and the licence that Project Gutenberg puts around a text, if they are there."""
    start = re.search(r"^\*\*\* ?START OF .*?\*\*\*[ ]*$", text, re.M)
    if start is None:
        start = re.search(r"^\*END\*?THE SMALL PRINT!.*$", text, re.M)
    text = text[start.end() :] if start else text
    end = re.search(r"^(\*\*\* ?END OF |End of (The |the )?Project Gutenberg)", text, re.M)
    text = text[: end.start()] if end else text
    return re.sub(r"\n{4,}", "\n\n\n", text.strip("\n")) + "\n"


def _gutenberg_documents(source: Source, files: Iterable[tuple[str, bytes]]) -> Iterator[Document]:
    for path, data in files:
        text = decode_text(data)
        if text is None or not any(fnmatch.fnmatch(path, pattern) for pattern in source.include):
            continue
        text = clean_gutenberg(text)
        # Sonnets are whole poems, numbered in Roman numerals: each is one document.
        poems = re.split(r"^[IVXLC]+\n+", text, flags=re.M) if "sonnets" in path else []
        if len(poems) > 100:
            for number, poem in enumerate(poems[1:], 1):
                yield Document("prose", source.name, f"{path}#{number}", poem.strip("\n") + "\n")
        else:
            yield Document("prose", source.name, path, text)


def _bible_documents(source: Source, files: Iterable[tuple[str, bytes]]) -> Iterator[Document]:
    """One document per chapter, one verse a line. Keys of the verse tables are book * 10**6 + chapter * 10**3 + verse."""
    for path, data in files:
        if not any(fnmatch.fnmatch(path, pattern) for pattern in source.include):
            continue
        call = next(node for node in ast.walk(ast.parse(data)) if isinstance(node, ast.Call))
        text = ast.literal_eval(call.args[1])
        starts, ends = ast.literal_eval(call.args[2]), ast.literal_eval(call.args[3])
        titles = call.args[5]
        if not isinstance(titles, ast.Dict):
            raise ConfigError(f"{source.name}/{path}: no table of titles; pin the version that the table names")
        names = [ast.literal_eval(value) for value in titles.values]
        chapters: dict[tuple[int, int], list[str]] = {}
        for key, start in starts.items():
            verse = re.sub(r"[\[\]]", "", text[start : ends[key]]).strip()  # brackets mark the translators' own words
            chapters.setdefault((key // 10**6, key // 1000 % 1000), []).append(f"{key % 1000} {verse}\n")
        for (book, chapter), verses in chapters.items():
            name = names[book - 1]
            yield Document("prose", source.name, f"{name}/{chapter}", f"{name} {chapter}\n\n" + "".join(verses))


def read_source(source: Source, archive: Path | None) -> Iterator[Document]:
    """Every candidate document of one source, before the filters."""
    suffixes = {"code": (".py",), "docs": (".rst", ".md", ".txt"), "gutenberg": (".txt",), "bible": (".py",)}
    wanted = tuple(suffix for use in source.use for suffix in suffixes[use])
    files = _stdlib_files() if archive is None else _archive_files(archive, wanted)
    if "gutenberg" in source.use:
        yield from _gutenberg_documents(source, files)
    elif "bible" in source.use:
        yield from _bible_documents(source, files)
    else:
        for path, data in files:
            kind = "code" if path.endswith(".py") else "prose"
            text = decode_text(data)
            if text is not None and ("code" if kind == "code" else "docs") in source.use:
                yield Document(kind, source.name, path, strip_licence(text, kind))


# Filters

_DROPPED_FOLDERS = frozenset(
    "test tests testing _testing unit_tests testdata test_data tests_data fixtures vendor vendored _vendor _vendored "
    "third_party thirdparty extern externals node_modules locale locales migrations benchmarks asv_bench "
    "site-packages __pycache__ _generated generated array_api_compat array_api_extra".split()
)
_DROPPED_FILES = re.compile(
    r"(^test_.*|.*_tests?|^conftest|.*_pb2(_grpc)?|^_?version|^setup|^versioneer|^dummy_.*_objects)\.py$"
    r"|(changelog|changes|authors|contributors|licen[cs]e|requirements|copying|notice|sources|top_level|entry_points"
    r"|cmakelists|thanks|credits|citation).*\.(rst|md|txt)$",
    re.I,
)
_DOCS_FOLDER = re.compile(r"(^|/)(docs?|documentation|doc_src|guides?|tutorials?)/", re.I)
_FOREIGN_DOCS = re.compile(r"/(?!en/)[a-z]{2}([-_][A-Za-z]{2,4})?/", re.A)
_GENERATED = re.compile(
    r"(auto-?\s?(matically )?|machine[ -])generated|do not (edit|modify)|(generated|created) (by|from|with) [^\n]*"
    r"(script|generator|tool|\.py|\.xml|\.json)",
    re.I,
)
_STOP_WORDS = frozenset("the of to and a in is that it for be as with this are on not or you can if by".split())


def strip_licence(text: str, kind: str) -> str:
    """Drops the comment block at the top of a file when it is a licence or copyright notice, which thousands share."""
    comment = r"(?:#[^\n]*\n|[ \t]*\n)+" if kind == "code" else r"(?:\.\.[^\n]*\n(?:[ \t]+[^\n]*\n|[ \t]*\n)*)+"
    head = re.match(comment, text)
    if head is None or not re.search(r"copyright|licen[cs]e", head.group(), re.I):
        return text
    return text[head.end() :].lstrip("\n") or "\n"


def reject_reason(document: Document) -> str | None:
    """Why this document does not belong in the corpus (a short word for the statistics), or None to keep it."""
    text, path = document.text, document.path
    parts = path.split("/")
    from_packages = document.kind == "code" or _DOCS_FOLDER.search(path) is not None
    size = len(text)
    if size < 200:
        return "near-empty"
    if size > 600_000:
        return "huge"
    lines = text.split("\n")
    filled = [line for line in lines if line.strip()]
    if len(filled) < 5:
        return "near-empty"
    if document.kind == "prose" and not path.endswith((".rst", ".md", ".txt")):
        return None  # verses and poems come from their own readers
    if any(part.lower() in _DROPPED_FOLDERS for part in parts[:-1]) or _DROPPED_FILES.match(parts[-1]):
        return "test, vendored or housekeeping path"
    longest = max(map(len, lines))
    if longest > 2000 or size / len(filled) > 160 and document.kind == "code":
        return "minified"
    if _GENERATED.search(text[:1500]):
        return "generated"
    letters = sum(map(str.isalpha, text)) / size
    digits = sum(map(str.isdigit, text)) / size
    if sum(character > "\x7f" for character in text) > 0.03 * size:
        return "not English"
    if letters < 0.4 or digits > 0.15:
        return "literal data"
    if len(set(filled)) < 0.4 * len(filled):
        return "repetitive"
    if document.kind == "code":
        quoted = sum(line.lstrip()[:1] in "'\"[({-0123456789" and line.rstrip()[-1:] in ",]})\"'" for line in filled)
        if quoted > 0.6 * len(filled) and len(filled) > 40:
            return "literal data"
        return None
    if not from_packages:
        return "no documentation folder"
    if _FOREIGN_DOCS.search("/" + path):
        return "not English"
    words = text.lower().split()
    if len(words) < 60 or sum(word in _STOP_WORDS for word in words) < 0.15 * len(words):
        return "no running prose"
    return None


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


def cap_code(documents: list[Document], sources: Iterable[Source], default_mb: float) -> list[Document]:
    """Keeps of each package at most `max_mb` of code, chosen by the documents' keys (so a spread of its files)."""
    limit = {source.name: (source.max_mb or default_mb) * 1e6 for source in sources}
    used: Counter[str] = Counter()
    kept: list[Document] = []
    for document in sorted(documents, key=lambda document: document.key):
        room = limit.get(document.package, 0.0)
        if document.kind == "prose" or not room or used[document.package] + len(document.text) <= room:
            kept.append(document)
            used[document.package] += len(document.text) if document.kind == "code" else 0
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
            ids = np.asarray(encoding.ids, np.uint16)
            encoded.append(np.concatenate([[BOS], ids, [EOS]], dtype=np.uint16))
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
    import io

    head = io.BytesIO()
    write_array_header_1_0(head, header_data_from_array_1_0(tokens))
    data = head.getvalue() + tokens.tobytes()
    edge = (len(data) // jobs + 1) & ~1
    pieces = [data[start : start + edge] for start in range(0, len(data), edge)]
    with ProcessPoolExecutor(jobs) as pool, path.open("wb") as file:
        for piece in pool.map(_xz_piece, pieces):
            file.write(piece)
    return path.stat().st_size


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def gather(config: CorpusConfig, cache: Path, jobs: int, dropped: Counter[str]) -> tuple[list[Document], list[Document]]:
    """Downloads, reads, filters, de-duplicates and splits: (training documents in shuffled order, held-out ones)."""
    archives = download(config.sources, cache, jobs)
    documents: list[Document] = []
    for source in config.sources:
        before = len(documents)
        for document in read_source(source, archives.get(source.name)):
            reason = reject_reason(document)
            if reason is None:
                documents.append(document)
            else:
                dropped[reason] += 1
        size = sum(len(document.text) for document in documents[before:])
        print(f"read {source.name} {source.version}: {len(documents) - before} documents, {size / 1e6:.1f} MB", flush=True)
    documents = cap_code(deduplicate(documents, dropped), config.sources, config.max_mb)
    train, heldout = split(documents, config.sources, config.heldout_bytes, dropped)
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
        elif archive:
            print("compress train.npy", flush=True)
            meta["archive_bytes"] = compress_npy(tokens, out / "train.npy.xz", jobs)
    with (out / "heldout.jsonl").open("w", encoding="utf-8") as file:
        for document in heldout:
            file.write(json.dumps(document.__dict__, ensure_ascii=False) + "\n")

    sizes: Counter[tuple[str, str]] = Counter()
    for document in train + heldout:
        sizes[document.package, document.kind] += len(document.text.encode())
    meta["sources"] = [
        {"name": source.name, "version": source.version, "licence": source.licence}
        | {kind + "_bytes": sizes[source.name, kind] for kind in ("code", "prose") if sizes[source.name, kind]}
        for source in config.sources
    ]
    meta["dropped"] = dict(dropped.most_common())
    meta["tokenizer_sha256"] = _digest(out / "tokenizer.json")
    (out / "meta.json").write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
    return meta


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m dspark_jax.train.corpus", description="Rebuild the nano corpus.")
    parser.add_argument("--out", type=Path, default=Path(".corpus"), help="output folder")
    parser.add_argument("--config", type=Path, default=DEFAULT_CONFIG, help="YAML table of packages")
    parser.add_argument("--cache", type=Path, default=None, help="folder of downloaded archives (OUT/packages)")
    parser.add_argument("--jobs", type=int, default=2, help="downloads and compressors at a time")
    parser.add_argument("--no-archive", action="store_true", help="skip train.npy.xz")
    options = parser.parse_args(argv)
    try:
        config = load_config(options.config)
        meta = build(config, options.out, options.cache or options.out / "packages", options.jobs, not options.no_archive)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps({key: meta[key] for key in ("splits", "dropped")}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
