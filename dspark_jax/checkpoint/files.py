"""The safetensors files of a checkpoint folder: which there are, and what their headers say. No tensor is read here."""

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from dspark_jax.checkpoint.transformers import Part, fused_name, is_transformers, published_name, published_parts
from dspark_jax.config import read_json
from dspark_jax.errors import CheckpointError, raise_all

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
LISTED = 10  # names of one kind of fault that are spelt out


@dataclass(frozen=True)
class TensorInfo:
    """What a header says of one tensor: its file's name, its dtype in safetensors' notation ("BF16"), its shape.

    `offset` is the first byte of an 8-bit float, which the safetensors package does not read into numpy. `stored` is the name
    in the file where that is another one, and `part` the part of it.
    """

    file: str
    dtype: str
    shape: tuple[int, ...]
    offset: int | None = None
    stored: str = ""
    part: Part = ()

    @property
    def bytes(self) -> int:
        """Of the file."""
        digits = "".join(filter(str.isdecimal, self.dtype.split("_")[0]))
        return math.prod(self.shape) * int(digits or 8) // 8


@dataclass
class TensorFiles:
    """The files of a checkpoint, open for as long as this lives.

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

    def is_lost(self, name: str) -> bool:
        """Whether the index puts a tensor into a file that is missing or unreadable."""
        return name in self.lost or fused_name(name) in self.lost

    def rename(self) -> None:
        """Published names in place of transformers'; two tensors of one name go to `faults`."""
        found: dict[str, TensorInfo] = {}
        for stored, info in self.tensors.items():
            whole = [(published_name(stored), info.shape, ())]  # 8-bit floats are read whole
            for name, shape, part in published_parts(stored, info.shape) if info.offset is None else whole:
                if name in found:
                    self.faults.append(f"{found[name].stored} and {stored} are both {name}; expected one")
                found[name] = replace(info, shape=shape, stored=stored, part=part)
        self.tensors, self.lost = found, {published_name(name) for name in self.lost}

    @property
    def names(self) -> set[str]:
        """Every tensor that a header or the index names."""
        return self.tensors.keys() | self.lost

    def read(self, name: str) -> np.ndarray:
        """One tensor, in the dtype of its file; 8-bit floats as bytes.

        Raises:
          CheckpointError: the bytes cannot be read.
        """
        info = self.tensors[name]
        file = info.file
        try:
            if info.offset is not None:
                count = math.prod(info.shape)
                return np.fromfile(self.folder / file, np.uint8, count, offset=info.offset).reshape(info.shape)
            stored = info.stored or name
            return self._open[file].get_slice(stored)[info.part] if info.part else self._open[file].get_tensor(stored)
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{self.folder}: {file}: {name} cannot be read ({error})") from error

    def add(self, file: str) -> None:
        """Opens `file` and takes in its header; what is wrong with it goes to `faults`."""
        path = self.folder / file
        if not path.is_file():
            self.faults.append(f"{file} is missing; download it again")
            return
        try:
            handle = safe_open(path, framework="numpy")
            names = list(handle.keys())
            found = {name: handle.get_slice(name) for name in names}
            start, header = _header(path)
            infos = {n: _info(file, s.get_dtype(), tuple(s.get_shape()), start, header[n]) for n, s in found.items()}
        except (SafetensorError, OSError, ValueError) as error:
            self.faults.append(f"{file} cannot be read ({_diagnosis(path) or error}); download it again")
            return
        self._open[file] = handle
        twice = sorted(infos.keys() & self.tensors.keys())
        self.faults += listed([f"{n} is in {self.tensors[n].file} and in {file}; expected one" for n in twice])
        self.tensors |= infos


def stored_bytes(files: TensorFiles) -> dict[str, int]:
    """Bytes of all tensors by their dtype in the files."""
    found: dict[str, int] = {}
    for info in files.tensors.values():
        found[info.dtype] = found.get(info.dtype, 0) + info.bytes
    return found


def open_files(folder: Path, *, published: bool = True) -> TensorFiles:
    """Opens `model.safetensors`, or every file that `model.safetensors.index.json` names, and reads the headers.

    Names as transformers has them become the published ones of DeepSeek-V4, if they are to be `published`.

    Raises:
      CheckpointError: neither is there, both are, or the index is no index. Faults of single files do not raise; they
        are listed in the result.
    """
    files = _opened(folder)
    if published and is_transformers(files.names):
        files.rename()
    return files


def _opened(folder: Path) -> TensorFiles:
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


def _header(path: Path) -> tuple[int, dict[str, Any]]:
    """Where a safetensors file's data begin, and its header."""
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        return 8 + length, json.loads(stream.read(length))


def _info(file: str, dtype: str, shape: tuple[int, ...], start: int, entry: dict[str, Any]) -> TensorInfo:
    return TensorInfo(file, dtype, shape, start + entry["data_offsets"][0] if dtype.startswith("F8_") else None)


def _diagnosis(path: Path) -> str | None:
    """Why a safetensors file is unreadable where its length tells; None where it does not."""
    size = path.stat().st_size
    try:
        with path.open("rb") as stream:
            if size < 8 or size < 8 + int.from_bytes(stream.read(8), "little"):
                return f"truncated: {size} bytes, too short for its header"
        start, header = _header(path)
        end = start + max(v["data_offsets"][1] for k, v in header.items() if k != "__metadata__")
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
