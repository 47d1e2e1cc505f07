"""The training loop: checkpoints with exact resume, progress, and a stop at the first non-finite loss."""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from dspark_jax.errors import DSparkError
from dspark_jax.train.data import TokenStream
from dspark_jax.train.target import TrainState


class TrainingDiverged(DSparkError):
    """A step produced a loss that is not finite."""


def train(
    step: Callable[[TrainState, Any, int], tuple[TrainState, dict[str, Any]]],
    state: TrainState,
    stream: TokenStream,
    steps: int,
    *,
    folder: Path | None = None,
    save_every: int = 1000,
    log_every: int = 50,
    report: Callable[[dict[str, Any]], None] | None = None,
    stop_at: int | None = None,
) -> TrainState:
    """Runs `step(state, tokens, index)` from the state's step (or a checkpoint in `folder`) up to `steps`.

    The batch of a step depends on its index alone, so a run that was killed resumes to the same losses. `report` gets a
    record every `log_every` steps, which is also appended to `folder/log.jsonl`. `stop_at` ends early, checkpointed.
    """
    manager = None
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        manager = ocp.CheckpointManager(
            folder.absolute() / "checkpoints", options=ocp.CheckpointManagerOptions(max_to_keep=2)
        )
        if (latest := manager.latest_step()) is not None:
            restored: Any = manager.restore(
                latest, args=ocp.args.StandardRestore(jax.tree.map(ocp.utils.to_shape_dtype_struct, state))
            )
            state = restored
    start = index = int(state.step)
    end = steps if stop_at is None else min(steps, stop_at)
    began, pending = time.perf_counter(), None
    while index < end:
        state, metrics = step(state, stream.at(index), index)
        index += 1
        # Read metrics one interval late, so that the device never waits for the host.
        if index % log_every == 0 or index == end:
            if pending is not None:
                _log(pending, stream, start, began, folder, report)
            pending = (index, metrics)
        if manager is not None and (index % save_every == 0 or index == end):
            manager.save(index, args=ocp.args.StandardSave(state))
    if pending is not None:
        _log(pending, stream, start, began, folder, report)
    if manager is not None:
        manager.wait_until_finished()
        manager.close()
    return state


def _log(
    pending: tuple[int, dict[str, Any]], stream: TokenStream, start: int, began: float, folder: Path | None, report
) -> None:
    index, metrics = pending
    values = {k: np.asarray(v).round(5).tolist() for k, v in jax.device_get(metrics).items()}
    seconds = time.perf_counter() - began
    record = {
        "step": index,
        "seconds": round(seconds, 1),
        "tokens_per_second": round((index - start) * stream.batch * stream.length / seconds),
        **values,
    }
    if not math.isfinite(record["loss"]):
        raise TrainingDiverged(
            f"training: loss is {record['loss']} at step {index} (batch {index - 1} of seed {stream.seed});"
            " lower the learning rate or inspect that batch with TokenStream.at"
        )
    if folder is not None:
        with (folder / "log.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")
    if report is not None:
        report(record)
