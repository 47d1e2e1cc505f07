"""The training loop: checkpoints with exact resume, progress, and a stop at the first step that is not finite."""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from dspark_jax.errors import ConfigError, DSparkError
from dspark_jax.train.data import Batches
from dspark_jax.train.target import TrainState


class TrainingDiverged(DSparkError):
    """A step produced a loss or a gradient that is not finite."""


def train(
    step: Callable[[TrainState, Any, int], tuple[TrainState, dict[str, Any]]],
    state: TrainState,
    stream: Batches,
    steps: int,
    *,
    folder: Path | None = None,
    save_every: int = 1000,
    log_every: int = 50,
    report: Callable[[dict[str, Any]], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> TrainState:
    """Runs `step(state, tokens, index)` from the state's step (or a checkpoint in `folder`) up to `steps`.

    The batch of a step depends on its index alone, so a run that was killed resumes to the same losses. `report` gets a
    record every `log_every` steps, which is also appended to `folder/log.jsonl`. `stop` is asked behind every
    checkpoint; where it says yes, the state comes back before its step is `steps`.

    Raises:
      TrainingDiverged: a loss or gradient norm is not finite; the checkpoints hold no such state.
      ConfigError: the checkpoint in `folder` is of another model or optimizer.
    """
    manager = None
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        options = ocp.CheckpointManagerOptions(max_to_keep=2)
        manager = ocp.CheckpointManager(folder.absolute() / "checkpoints", options=options)
    try:
        if manager is not None and folder is not None:
            state = _restore(manager, state, folder)
        index = int(state.step)
        log = _Log(stream, index, folder, report)
        while index < steps:
            state, metrics = step(state, stream.at(index), index)
            index += 1
            log.add(index, metrics)
            if index % log_every == 0 or index == steps:
                log.close_interval()
            if manager is not None and (index % save_every == 0 or index == steps):
                log.flush()
                manager.save(index, args=ocp.args.StandardSave(state))
                if stop is not None and stop():
                    break
        log.flush()
        return state
    finally:
        if manager is not None:
            manager.close()  # waits for what is still being written


def _restore(manager: ocp.CheckpointManager, state: TrainState, folder: Path) -> TrainState:
    """The newest checkpoint, or `state` where there is none. What a checkpoint holds is listed in `state.json`."""
    path, latest = folder / "state.json", manager.latest_step()
    arrays = {jax.tree_util.keystr(k): str(jax.typeof(x)) for k, x in jax.tree_util.tree_leaves_with_path(state)}
    if latest is None:
        path.write_text(json.dumps(arrays, indent=1) + "\n")
        return state
    kept = json.loads(path.read_text())
    if kept != arrays:
        other = sorted(k for k in {**kept, **arrays} if kept.get(k) != arrays.get(k))
        raise ConfigError(
            f"training: the checkpoint of step {latest} in {folder} is of another model or optimizer ({len(other)} arrays"
            f" differ, {other[0]} first); use the settings it was made with, or another folder"
        )
    shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    restored: Any = manager.restore(latest, args=ocp.args.StandardRestore(shapes))
    return restored


class _Log:
    """Metrics on their way from the device, read one interval late, so that the device never waits for the host."""

    def __init__(
        self, stream: Batches, start: int, folder: Path | None, report: Callable[[dict[str, Any]], None] | None
    ):
        self.stream, self.start, self.report = stream, start, report
        self.file = None if folder is None else folder / "log.jsonl"
        # Records behind the checkpoint come again; the clock goes on from the last one kept.
        kept = [] if self.file is None else _records(self.file, start)
        if self.file is not None and self.file.exists():
            self.file.write_text("".join(json.dumps(record) + "\n" for record in kept))
        self.spent = kept[-1]["seconds"] if kept else 0.0
        self.began = time.perf_counter()
        self.current: list[tuple[int, dict[str, Any]]] = []
        self.unchecked: list[tuple[int, dict[str, Any]]] = []
        self.pending: tuple[int, dict[str, Any]] | None = None

    def add(self, index: int, metrics: dict[str, Any]) -> None:
        """Takes the metrics of the step that made the state's step `index`."""
        self.current.append((index, metrics))

    def close_interval(self) -> None:
        """Writes the record of the interval before, and keeps this one's."""
        self._write()
        self.pending = self.current[-1]
        self.unchecked += self.current
        self.current = []

    def flush(self) -> None:
        """Checks every step so far and writes what is pending; waits for the device."""
        self.unchecked += self.current
        self.current = []
        self._write()

    def _write(self) -> None:
        self._check()
        if self.pending is None:
            return
        (index, metrics), self.pending = self.pending, None
        seconds = time.perf_counter() - self.began
        record = {
            "step": index,
            "seconds": round(self.spent + seconds, 1),
            "tokens_per_second": round((index - self.start) * self.stream.batch * self.stream.length / seconds),
            **{k: np.asarray(v).round(5).tolist() for k, v in jax.device_get(metrics).items()},
        }
        if self.file is not None:
            with self.file.open("a") as file:
                file.write(json.dumps(record) + "\n")
        if self.report is not None:
            self.report(record)

    def _check(self) -> None:
        watched = [
            (index, {k: v for k, v in metrics.items() if k == "loss" or k.endswith("grad_norm")})
            for index, metrics in self.unchecked
        ]
        self.unchecked = []
        for index, values in jax.device_get(watched):
            for name, value in sorted(values.items(), key=lambda item: item[0] != "loss"):
                if not math.isfinite(value):
                    raise TrainingDiverged(
                        f"training: {name} is {value} at step {index} (batch {index - 1} of seed {self.stream.seed});"
                        " lower the learning rate or inspect that batch with `at` of its stream"
                    )


def _records(path: Path, last: int) -> list[dict[str, Any]]:
    """The log's whole records up to step `last`."""
    records = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except ValueError:
            continue  # the run was killed while it wrote
        if record["step"] <= last:
            records.append(record)
    return records
