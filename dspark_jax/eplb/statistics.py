"""Expert statistics in TensorRT-LLM's file layout: how many rows each logical expert got, by iteration and layer.

A folder holds `meta_info.json` (`num_experts`, `num_experts_per_token`) and one `rank{r}.safetensors` a rank, with an
int32 vector [E] under each key `<iteration>_<layer>`. Ids are logical experts, never slots, so that statistics taken
under one placement serve to plan the next.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
from jaxtyping import Int
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from dspark_jax.errors import DSparkError, raise_all

META = "meta_info.json"
_RANK_FILE = re.compile(r"rank(\d+)\.safetensors")
_KEY = re.compile(r"(\d+)_(\d+)")


class StatisticsError(DSparkError):
    """Expert statistics are missing, damaged, or do not fit what is asked of them."""


class StatisticsRecorder:
    """Adds up one rank's counts over the iterations start ≤ i < stop, and writes them.

    Args:
      num_experts: logical experts of a layer.
      top_k: experts that a row visits.
      start, stop: the window; iterations outside it are not counted.
    """

    def __init__(self, num_experts: int, top_k: int, start: int, stop: int):
        if not 0 <= start < stop:
            raise StatisticsError(f"the window of iterations is [{start}, {stop}); expected 0 <= start < stop")
        self.num_experts, self.top_k, self.window = num_experts, top_k, range(start, stop)
        self._counts: dict[tuple[int, int], np.ndarray] = {}

    def add(self, iteration: int, counts: Int[np.ndarray, "n E"], layers: Sequence[int] | None = None) -> None:
        """Counts of one iteration; several calls for one iteration add up.

        Args:
          iteration: from 0.
          counts: rows by logical expert, one line a layer.
          layers: layer index of each line; by default 0, 1, 2, …. Layers that did not run (draft stages in an iteration
            without generation) may be left out, or be there with zeros, which TensorRT-LLM's tools insist on.
        """
        if iteration not in self.window:
            return
        counts = np.asarray(counts)
        if counts.ndim != 2 or counts.shape[1] != self.num_experts or counts.dtype.kind not in "iu":
            raise StatisticsError(
                f"counts are {counts.dtype} {list(counts.shape)}; expected integers [layers, {self.num_experts}]"
            )
        for layer, row in zip(range(len(counts)) if layers is None else layers, counts, strict=True):
            key = (iteration, int(layer))
            self._counts[key] = self._counts.get(key, 0) + row.astype(np.int64)

    @property
    def counts(self) -> Mapping[tuple[int, int], Int[np.ndarray, "E"]]:
        """What was added so far: (iteration, layer) -> rows by expert."""
        return MappingProxyType(self._counts)

    def finished(self, iteration: int) -> bool:
        """Whether the window ends with `iteration`, so that it is time to write."""
        return iteration >= self.window.stop - 1

    def write(self, folder: Path, rank: int = 0) -> None:
        """Writes this rank's file, and on rank 0 `meta_info.json`; makes the folder.

        Raises:
          StatisticsError: nothing was counted, a count exceeds int32, or a file cannot be written.
        """
        if not self._counts:
            raise StatisticsError(
                f"no iteration of the window [{self.window.start}, {self.window.stop}) was counted;"
                " choose a window that the run reaches"
            )
        if max(int(row.max()) for row in self._counts.values()) > np.iinfo(np.int32).max:
            raise StatisticsError("a count exceeds the int32 of the file; count over fewer rows an iteration")
        tensors = {f"{i}_{layer}": row.astype(np.int32) for (i, layer), row in sorted(self._counts.items())}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if rank == 0:
                meta = {"num_experts": self.num_experts, "num_experts_per_token": self.top_k}
                (folder / META).write_text(json.dumps(meta), encoding="utf-8")
            save_file(tensors, folder / f"rank{rank}.safetensors")
        except OSError as error:
            raise StatisticsError(f"{folder}: cannot be written ({error}); check the path") from error


@dataclass(frozen=True)
class ExpertStatistics:
    """Rows by logical expert, summed over the ranks that recorded them.

    Attributes:
      num_experts, top_k: of every layer.
      ranks: how many ranks recorded.
      counts: (iteration, layer) -> int64 [E]. A layer may be absent in some iterations, as draft stages are where no
        request generates.
    """

    num_experts: int
    top_k: int
    ranks: int
    counts: Mapping[tuple[int, int], Int[np.ndarray, "E"]]

    @property
    def iterations(self) -> list[int]:
        """Iterations that any layer has, ascending."""
        return sorted({iteration for iteration, _ in self.counts})

    @property
    def layers(self) -> list[int]:
        """Layer indices that any iteration has, ascending."""
        return sorted({layer for _, layer in self.counts})

    def window(self, start: int | None = None, stop: int | None = None) -> "ExpertStatistics":
        """The statistics of the iterations start ≤ i < stop (by default all).

        Raises:
          StatisticsError: no recorded iteration lies in the window.
        """
        kept = {
            key: row
            for key, row in self.counts.items()
            if (start is None or key[0] >= start) and (stop is None or key[0] < stop)
        }
        if not kept:
            first, last = self.iterations[0], self.iterations[-1]
            ends = [*([] if start is None else [f"from {start} on"]), *([] if stop is None else [f"before {stop}"])]
            raise StatisticsError(f"no iteration {' and '.join(ends)} was recorded; recorded are {first} … {last}")
        return ExpertStatistics(self.num_experts, self.top_k, self.ranks, kept)

    def by_iteration(self, layer: int) -> Int[np.ndarray, "iterations E"]:
        """Counts of one layer in the iterations that have it."""
        return np.array([self.counts[i, layer] for i in self.iterations if (i, layer) in self.counts])

    def load(self) -> Int[np.ndarray, "layers E"]:
        """Counts over all iterations, a row for each of `layers`."""
        return np.array([self.by_iteration(layer).sum(axis=0) for layer in self.layers])


def read_statistics(folder: Path) -> ExpertStatistics:
    """Reads a folder of statistics, of ours or of TensorRT-LLM's; tensors under other names are left alone.

    Raises:
      StatisticsError: what is missing or damaged, every fault in one message.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise StatisticsError(f"{folder}: no such folder; expected one with {META} and rank*.safetensors")
    experts, top_k = _read_meta(folder / META)
    files = {int(m[1]): path for path in folder.iterdir() if (m := _RANK_FILE.fullmatch(path.name))}
    faults = []
    if not files:
        faults.append("has no rank*.safetensors; collect statistics into it first")
    elif absent := sorted(set(range(max(files) + 1)) - files.keys()):
        faults.append(f"lacks the files of ranks {absent} (there are ranks up to {max(files)}); copy them too")
    counts: dict[tuple[int, int], np.ndarray] = {}
    for rank in sorted(files):
        faults += _add_file(files[rank], experts, counts)
    if files and not faults and not counts:
        faults.append("holds no counts (keys <iteration>_<layer>); collect over a window that the run reaches")
    raise_all(StatisticsError, str(folder), faults)
    return ExpertStatistics(experts, top_k, len(files), counts)


def _read_meta(path: Path) -> tuple[int, int]:
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StatisticsError(f"{path}: cannot be read ({error.strerror}); rank 0 writes it") from error
    except ValueError as error:
        raise StatisticsError(f"{path}: not valid JSON ({error}); collect the statistics again") from error
    names = ("num_experts", "num_experts_per_token")
    found = [meta.get(name) if isinstance(meta, dict) else None for name in names]
    wrong = [
        f"{name} is {value!r}; expected a positive integer"
        for name, value in zip(names, found, strict=True)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1
    ]
    raise_all(StatisticsError, str(path), wrong)
    return found[0], found[1]  # type: ignore[return-value]


def _add_file(path: Path, experts: int, counts: dict[tuple[int, int], np.ndarray]) -> Iterator[str]:
    """Adds one rank's vectors to `counts` and yields what is wrong with the file."""
    try:
        with safe_open(path, framework="numpy") as tensors:
            for key in tensors.keys():  # noqa: SIM118 - no mapping
                if not (match := _KEY.fullmatch(key)):
                    continue
                row = tensors.get_tensor(key)
                if row.shape != (experts,) or row.dtype.kind not in "iu":
                    yield (
                        f"{path.name}: {key} is {row.dtype} {list(row.shape)};"
                        f" expected integers [{experts}], num_experts of {META}"
                    )
                elif row.min() < 0:
                    yield f"{path.name}: {key} holds the count {row.min()}; expected none below 0"
                else:
                    where = (int(match[1]), int(match[2]))
                    counts[where] = counts.get(where, 0) + row.astype(np.int64)
    except (SafetensorError, OSError, ValueError) as error:
        yield f"{path.name} cannot be read ({error}); collect the statistics again"
