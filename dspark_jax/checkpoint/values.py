"""The tensors of an open checkpoint as parameters of the model: read, checked and converted one parameter at a time."""

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from dspark_jax.checkpoint.files import TensorFiles, listed
from dspark_jax.checkpoint.headers import Wanted, stored_format, wanted
from dspark_jax.checkpoint.layout import Entry, Path
from dspark_jax.checkpoint.quantised import dequantised, nan_faults, scale_key
from dspark_jax.checkpoint.watch import watcher
from dspark_jax.config import TargetConfig
from dspark_jax.config_dense import DenseConfig, ModelConfig
from dspark_jax.errors import CheckpointError, raise_all

_SCAN_BYTES = 2**31
_CODES = {"fp4": np.dtype(np.uint8), "fp8": np.dtype(jnp.float8_e4m3fn), "scale": np.dtype(np.uint8)}


class Values:
    """What `entries` hold in `files`, as arrays of the module.

    Args:
      files: stay open for as long as this lives.
      entries: whose headers are in order, or `faults` alone is called.
      config: the experts of its hash tables are checked.
      dtype: of weights.
    """

    def __init__(self, files: TensorFiles, entries: list[Entry], config: ModelConfig, dtype: np.dtype):
        self.files, self.entries, self.config = files, entries, config
        fixed = {"fp32": np.dtype(np.float32), "int": np.dtype(np.int32), "weight": dtype}
        self.dtypes: dict[str, np.dtype] = fixed | _CODES
        self.layers = len({name for entry in entries if (name := _layer(entry))})

    def read(self, entry: Entry) -> np.ndarray:
        """One parameter.

        Raises:
          CheckpointError: a value is impossible; every impossible value of the checkpoint is named.
        """
        if (look := watcher.get()) and (name := _layer(entry)):
            look(name, self.layers)
        out: np.ndarray | None = None
        for i, key in enumerate(entry.keys):
            value = self._part(entry, key)[0]
            if value is None:
                raise_all(CheckpointError, str(self.files.folder), self.faults())
                raise AssertionError(f"{key} is impossible without a fault")
            if len(entry.keys) == 1:
                return value
            else:
                out = np.empty((len(entry.keys), *value.shape[1:]), value.dtype) if out is None else out
                out[i] = value[0]
        assert out is not None
        return out

    def faults(self) -> list[str]:
        """Impossible values of all tensors whose headers are in order."""
        tables: list[str] = []
        others: list[str] = []
        for entry in self.entries:
            for key in entry.keys:
                (tables if entry.dtype == "int" else others).extend(self._part(entry, key)[1])
        return [*listed(tables), *listed(others)]

    def _part(self, entry: Entry, key: str) -> tuple[np.ndarray | None, list[str]]:
        """A tensor as the module has it, stacked experts [1, …], and what is impossible in it."""
        parts = list(wanted(entry, key, self.files))
        if not all(self._sound(name, want) for name, want in parts):
            return None, []  # the faults of the headers say so
        tensors = {name: self.files.read(name) for name, _ in parts}
        faults = [fault for name, tensor in tensors.items() for fault in self._value_faults(name, tensor, entry.dtype)]
        if faults:
            return None, faults
        raw, kind = tensors[key], stored_format(entry, key, self.files)
        if kind is not None:
            raw = dequantised(kind, raw, tensors[scale_key(key)])
        value = self._cast(entry.load([raw]), entry.dtype)
        if entry.dtype == "weight" and not np.isfinite(value).all():
            return None, [f"{key} exceeds the range of {value.dtype.name}; load it as float32"]
        return value, []

    def _sound(self, name: str, want: Wanted) -> bool:
        info = self.files.tensors.get(name)
        return info is not None and info.shape == want.shape and info.dtype in want.dtypes

    def _value_faults(self, name: str, tensor: np.ndarray, kind: str) -> Iterator[str]:
        if kind == "int" and not isinstance(self.config, DenseConfig):
            return _table_faults(name, tensor, self.config)
        one_byte = tensor.dtype.itemsize == 1
        return nan_faults(name, self.files.tensors[name].dtype, tensor) if one_byte else _finite_faults(name, tensor)

    def _cast(self, value: np.ndarray, kind: str) -> np.ndarray:
        if kind in _CODES:
            return value.view(_CODES[kind])
        with np.errstate(over="ignore"):  # found afterwards, with the tensor's name
            return value.astype(self.dtypes[kind], copy=False)


class Deferred:
    """A parameter that is read when `np.asarray` asks for it, and not kept. It has an array's shape and dtype."""

    def __init__(self, values: Values, entry: Entry, shape: tuple[int, ...]):
        self._values, self._entry = values, entry
        self.shape, self.dtype = shape, values.dtypes[entry.dtype]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self._values.read(self._entry).astype(dtype or self.dtype, copy=False)


def deferred(values: Values, params: nnx.State, faults: list[str]) -> dict[Path, Deferred]:
    """`Deferred` parameters by path for `values.entries`, which are some of `params`.

    Raises CheckpointError if there are `faults`, with those of the values where reading them takes a second.
    """
    if faults:
        # So one run shows everything.
        if sum(info.bytes for info in values.files.tensors.values()) <= _SCAN_BYTES:
            faults = [*faults, *values.faults()]
        raise_all(CheckpointError, str(values.files.folder), faults)
    shapes = {path: variable.get_value().shape for path, variable in nnx.to_flat_state(params)}
    return {entry.path: Deferred(values, entry, shapes[entry.path]) for entry in values.entries}


def _layer(entry: Entry) -> str | None:
    """The layer or draft stage that a parameter belongs to, by its published name; None for the ends of the model."""
    parts = entry.keys[0].removeprefix("model.").split(".")  # dense models have the prefix
    return ".".join(parts[:2]) if parts[0] in ("layers", "mtp") else None


def _finite_faults(key: str, tensor: np.ndarray) -> Iterator[str]:
    finite = np.isfinite(tensor)
    if not finite.all():
        where = [int(i) for i in np.argwhere(~finite)[0]]
        yield f"{key} holds {tensor.size - int(finite.sum())} NaN or infinite values, the first at {where}"


def _table_faults(key: str, table: np.ndarray, config: TargetConfig) -> Iterator[str]:
    """A hash table's row lists the experts of one token: ids of experts, each once."""
    outside = (table < 0) | (table >= config.n_routed_experts)
    if outside.any():
        row, column = np.argwhere(outside)[0]
        yield (
            f"{key} holds expert {table[row, column]} at {[int(row), int(column)]};"
            f" expected ids in [0, n_routed_experts = {config.n_routed_experts}) ({int(outside.sum())} such entries)"
        )
    ordered = np.sort(table, axis=1)
    repeated = (ordered[:, 1:] == ordered[:, :-1]).any(axis=1)
    if repeated.any():
        row = int(np.argmax(repeated))
        yield (
            f"{key} names an expert twice in row {row} ({table[row].tolist()});"
            f" expected distinct experts for a token ({int(repeated.sum())} such rows)"
        )
