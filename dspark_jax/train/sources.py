"""Sources of the corpus: the table of packages, their download, and the documents that pass the filters.

Every source is a package that pip can fetch (the YAML table pins name, version and licence) or the standard library of
the running interpreter. `read_source` turns one of them into documents of code or prose and drops what a language
model should not spend its capacity on: tests, vendored and generated files, tables of literals, minified or foreign
text, and the licence header that thousands of files share.
"""

import ast
import fnmatch
import hashlib
import platform
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from dspark_jax.errors import ConfigError, raise_all

DEFAULT_CONFIG = Path(__file__).parents[2] / "configs" / "nano_corpus.yaml"


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
            faults.append(f"{name}: use={row['use']} format={row.get('format')}; see dspark_jax.train.sources.Source")
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
    """One document per chapter, one verse a line; the verse tables' keys are book * 10**6 + chapter * 10**3 + verse."""
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


def read_source(source: Source, archive: Path | None) -> tuple[list[Document], Counter[str]]:
    """The documents of one source that pass the filters, and how many were dropped for which reason."""
    suffixes = {"code": (".py",), "docs": (".rst", ".md", ".txt"), "gutenberg": (".txt",), "bible": (".py",)}
    wanted = tuple(suffix for use in source.use for suffix in suffixes[use])
    files = _stdlib_files() if archive is None else _archive_files(archive, wanted)
    if "gutenberg" in source.use:
        return list(_gutenberg_documents(source, files)), Counter()
    if "bible" in source.use:
        return list(_bible_documents(source, files)), Counter()
    kept: list[Document] = []
    dropped: Counter[str] = Counter()
    for path, data in files:
        kind = "code" if path.endswith(".py") else "prose"
        reason = path_reason(path, kind)
        text = decode_text(data) if reason is None else None
        if text is not None:
            text = strip_licence(text, kind)
            reason = text_reason(text, kind)
        if text is not None and reason is None:
            kept.append(Document(kind, source.name, path, text))
        else:
            dropped[reason or "not UTF-8"] += 1
    return kept, dropped


def source_version(source: Source) -> str:
    """The pinned version, or the running interpreter's for its standard library."""
    return platform.python_version() if source.format == "stdlib" else source.version


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
_ASCII = bytes(range(128))
_DIGITS = b"0123456789"
_LETTERS = bytes(range(65, 91)) + bytes(range(97, 123))
_STOP_WORDS = frozenset("the of to and a in is that it for be as with this are on not or you can if by".split())


def strip_licence(text: str, kind: str) -> str:
    """Drops the comment block at the top of a file when it is a licence or copyright notice, which thousands share."""
    comment = r"(?:#[^\n]*\n|[ \t]*\n)+" if kind == "code" else r"(?:\.\.[^\n]*\n(?:[ \t]+[^\n]*\n|[ \t]*\n)*)+"
    head = re.match(comment, text)
    if head is None or not re.search(r"copyright|licen[cs]e", head.group(), re.I):
        return text
    return text[head.end() :].lstrip("\n") or "\n"


def path_reason(path: str, kind: str) -> str | None:
    """Why the place of a file says that it does not belong in the corpus (a short word), or None to keep it."""
    parts = path.split("/")
    if any(part.lower() in _DROPPED_FOLDERS for part in parts[:-1]) or _DROPPED_FILES.match(parts[-1]):
        return "test, vendored or housekeeping path"
    if kind == "prose" and not _DOCS_FOLDER.search(path):
        return "no documentation folder"
    if kind == "prose" and _FOREIGN_DOCS.search("/" + path):
        return "not English"
    return None


def text_reason(text: str, kind: str) -> str | None:
    """Why the text of a file does not belong in the corpus (a short word), or None to keep it."""
    size = len(text)
    lines = text.split("\n")
    filled = [line for line in lines if line.strip()]
    if size < 200 or len(filled) < 5:
        return "near-empty"
    if size > 600_000:
        return "huge"
    if max(map(len, lines)) > 2000 or (kind == "code" and size > 160 * len(filled)):
        return "minified"
    if _GENERATED.search(text[:1500]):
        return "generated"
    data = text.encode()
    if len(data.translate(None, _ASCII)) > 0.03 * size:
        return "not English"
    letters, digits = (len(data) - len(data.translate(None, kinds)) for kinds in (_LETTERS, _DIGITS))
    if letters < 0.4 * size or digits > 0.15 * size:
        return "literal data"
    if len(set(filled)) < 0.4 * len(filled):
        return "repetitive"
    if kind == "code":
        literal = sum(line.lstrip()[:1] in "'\"[({-0123456789" and line.rstrip()[-1:] in ",]})\"'" for line in filled)
        return "literal data" if literal > 0.6 * len(filled) and len(filled) > 40 else None
    words = text.lower().split()
    if len(words) < 60 or sum(word in _STOP_WORDS for word in words) < 0.15 * len(words):
        return "no running prose"
    return None
