"""The safetensors files of a checkpoint folder: which there are, and what their headers say. No tensor is read here."""

import contextlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import numpy as np
from safetensors import SafetensorError, safe_open

from dspark_jax.config import read_json
from dspark_jax.errors import CheckpointError, raise_all

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
LISTED = 10  # names of one kind of fault that are spelt out


@dataclass(frozen=True)
class TensorInfo:
    """What a header says of one tensor: its file's name, its dtype in safetensors' notation ("BF16"), its shape."""

    file: str
    dtype: str
    shape: tuple[int, ...]


@dataclass
class TensorFiles:
    """The open files of a checkpoint; a context manager that closes them.

    Attributes:
      tensors: every tensor that a readable header lists.
      lost: names of tensors that the index puts into files that are missing or unreadable.
      faults: what is wrong with the files and the index.
    """

    folder: Path
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)
    _open: dict[str, safe_open] = field(default_factory=dict)
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __enter__(self) -> "TensorFiles":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def names(self) -> set[str]:
        """Every tensor that a header or the index names."""
        return self.tensors.keys() | self.lost

    def read(self, name: str) -> np.ndarray:
        """One tensor, in the dtype of its file.

        Raises:
          CheckpointError: the bytes cannot be read.
        """
        file = self.tensors[name].file
        try:
            return self._open[file].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.folder}: {file}: {name} cannot be read ({error})") from error

    def add(self, file: str) -> None:
        """Opens `file` and takes in its header; what is wrong with it goes to `faults`."""
        path = self.folder / file
        if not path.is_file():
            self.faults.append(f"{file} is missing; download it again")
            return
        try:
            handle = self._stack.enter_context(safe_open(path, framework="numpy"))
            names = list(handle.keys())
            found = {name: handle.get_slice(name) for name in names}
            infos = {n: TensorInfo(file, s.get_dtype(), tuple(s.get_shape())) for n, s in found.items()}
        except (SafetensorError, OSError, ValueError) as error:
            self.faults.append(f"{file} cannot be read ({_diagnosis(path) or error}); download it again")
            return
        self._open[file] = handle
        twice = sorted(infos.keys() & self.tensors.keys())
        self.faults += listed([f"{n} is in {self.tensors[n].file} and in {file}; expected one" for n in twice])
        self.tensors |= infos


def open_files(folder: Path) -> TensorFiles:
    """Opens `model.safetensors`, or every file that `model.safetensors.index.json` names, and reads the headers.

    Raises:
      CheckpointError: neither is there, both are, or the index is no index. Faults of single files do not raise; they
        are listed in the result.
    """
    single, index = (folder / SINGLE).is_file(), (folder / INDEX).is_file()
    if single and index:
        raise CheckpointError(f"{folder}: holds both {SINGLE} and {INDEX}; keep the one that belongs to the weights")
    if not single and not index:
        others = sorted(p.name for p in folder.glob("*.safetensors"))
        seen = f" (found {', '.join(others[:LISTED])}, which no index names)" if others else ""
        raise CheckpointError(f"{folder}: holds no weights{seen}; expected {SINGLE}, or {INDEX} and its files")
    if single:
        files = TensorFiles(folder)
        files.add(SINGLE)
        return files
    return _open_indexed(folder)


def _open_indexed(folder: Path) -> TensorFiles:
    where = read_json(folder / INDEX).get("weight_map")
    if not isinstance(where, dict) or not where:
        raise CheckpointError(f"{folder}: {INDEX} has no weight_map of tensor names to file names; download it again")
    outside = [f"{n} is in {f!r}; expected the name of a file in the folder" for n, f in where.items() if not _plain(f)]
    raise_all(CheckpointError, f"{folder}: {INDEX}", listed(outside))
    files = TensorFiles(folder)
    for file in sorted(set(where.values())):
        files.add(file)
    read = {info.file for info in files.tensors.values()} | files._open.keys()
    files.lost = {name for name, file in where.items() if file not in read}
    files.faults += listed(
        [
            f"{INDEX} puts {name} into {file}, which does not hold it"
            for name, file in sorted(where.items())
            if file in read and (name not in files.tensors or files.tensors[name].file != file)
        ]
    )
    files.faults += listed(
        [
            f"{info.file} holds {name}, which {INDEX} does not list"
            for name, info in sorted(files.tensors.items())
            if name not in where
        ]
    )
    return files


def _plain(name: object) -> bool:
    return isinstance(name, str) and name.endswith(".safetensors") and Path(name).name == name


def _diagnosis(path: Path) -> str | None:
    """Why a safetensors file is unreadable where its length tells; None where it does not."""
    size = path.stat().st_size
    try:
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or size < 8 + length:
                return f"truncated: {size} bytes, too short for its header"
            header = json.loads(stream.read(length))
        end = 8 + length + max(v["data_offsets"][1] for k, v in header.items() if k != "__metadata__")
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    return f"truncated: {size} bytes, but its header describes {end}" if size < end else None


def listed(faults: Iterable[str]) -> list[str]:
    """The first few faults of one kind, then how many more there are."""
    faults = list(faults)
    rest = len(faults) - LISTED
    return [*faults[:LISTED], f"and {rest} more of this kind"] if rest > 0 else faults


def stage_numbers(names: Iterable[str]) -> list[int]:
    """The draft stages that `mtp.{i}.*` names speak of, ascending."""
    return sorted({int(match[1]) for name in names if (match := re.match(r"mtp\.(\d+)\.", name))})


def natural(names: Iterable[str]) -> list[str]:
    """Names sorted so that layer 2 comes before layer 10."""
    return sorted(names, key=lambda n: [(not p.isdecimal(), int(p) if p.isdecimal() else 0, p) for p in n.split(".")])
