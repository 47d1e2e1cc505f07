"""The loop: a killed run resumes to the same losses, and nothing that is not finite is kept."""

import json
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.errors import ConfigError
from dspark_jax.train.data import TokenStream
from dspark_jax.train.loop import TrainingDiverged, train
from dspark_jax.train.optimizer import OptimizerConfig, make_optimizer
from dspark_jax.train.target import TargetRules, TargetStep, TrainState, init_target
from helpers.micro import micro_model

STEPS = 12
STREAM = TokenStream(np.random.default_rng(0).integers(0, 5, 400), 9, 2, seed=7)


class Killed(BaseException):
    """Stands for a signal: nothing in the loop catches it."""


@dataclass
class Toy:
    """One weight drawn to the mean of each batch, with a momentum; `kill` and `poison` name a step (from 0)."""

    kill: int = -1
    poison: int = -1
    poison_gradient: int = -1
    calls: int = 0

    def __call__(self, state: TrainState, tokens: np.ndarray, index: int):
        if index == self.kill:
            raise Killed
        self.calls += 1
        np.testing.assert_array_equal(tokens, STREAM.at(index))
        error = state.params["w"] - jnp.mean(jnp.asarray(tokens, jnp.float32))
        if index == self.poison:
            error = error + jnp.nan
        momentum = 0.5 * state.opt_state["m"] + error
        norm = jnp.abs(error) + (jnp.inf if index == self.poison_gradient else 0)
        new = TrainState({"w": state.params["w"] - 0.1 * momentum}, {}, {"m": momentum}, state.step + 1)
        return new, {"loss": error**2, "grad_norm": norm}


def fresh(size: int = 1) -> TrainState:
    return TrainState({"w": jnp.full(size, 5.0)[0] if size == 1 else jnp.ones(size)}, {}, {"m": jnp.zeros(())}, jnp.int32(0))


def log(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[TrainState, list[float]]:
    """The run that nobody interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    state = train(Toy(), fresh(), STREAM, STEPS, folder=folder, save_every=5, log_every=1)
    return state, [record["loss"] for record in log(folder)]


@pytest.mark.parametrize("kill", [0, 1, 4, 5, 6, 9, 10, 11])
def test_a_killed_run_resumes_to_the_same_losses(kill, whole, tmp_path):
    with pytest.raises(Killed):
        train(Toy(kill=kill), fresh(), STREAM, STEPS, folder=tmp_path, save_every=5, log_every=1)
    step = Toy()
    state = train(step, fresh(), STREAM, STEPS, folder=tmp_path, save_every=5, log_every=1)
    assert step.calls == STEPS - kill // 5 * 5  # nothing in front of the checkpoint is done again
    records = log(tmp_path)
    assert [r["step"] for r in records] == list(range(1, STEPS + 1))
    assert [r["loss"] for r in records] == whole[1]
    assert float(state.params["w"]) == float(whole[0].params["w"]) and int(state.step) == STEPS


def test_a_finished_run_does_nothing(whole, tmp_path):
    train(Toy(), fresh(), STREAM, STEPS, folder=tmp_path)
    before = log(tmp_path)
    step = Toy()
    state = train(step, fresh(), STREAM, STEPS, folder=tmp_path)
    assert step.calls == 0 and float(state.params["w"]) == float(whole[0].params["w"]) and log(tmp_path) == before


def test_the_clock_of_a_resumed_run_goes_on(tmp_path):
    train(Toy(), fresh(), STREAM, 5, folder=tmp_path, log_every=1)
    lines = [json.dumps({**record, "seconds": 100.0 + record["step"]}) for record in log(tmp_path)]
    (tmp_path / "log.jsonl").write_text("\n".join(lines) + "\n")
    train(Toy(), fresh(), STREAM, STEPS, folder=tmp_path, log_every=1)
    assert all(105 <= record["seconds"] < 1000 for record in log(tmp_path)[5:])


def test_a_torn_last_line_of_the_log_is_dropped(whole, tmp_path):
    with pytest.raises(Killed):
        train(Toy(kill=8), fresh(), STREAM, STEPS, folder=tmp_path, save_every=5, log_every=1)
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"step": 8, "los')
    train(Toy(), fresh(), STREAM, STEPS, folder=tmp_path, save_every=5, log_every=1)
    assert [r["loss"] for r in log(tmp_path)] == whole[1]


def test_a_run_that_is_asked_to_stop_is_checkpointed_and_goes_on(whole, tmp_path):
    asked = []
    options = {"folder": tmp_path, "save_every": 5, "log_every": 1}
    state = train(Toy(), fresh(), STREAM, STEPS, stop=lambda: asked.append(1) or len(asked) == 2, **options)
    assert int(state.step) == 10 and len(asked) == 2
    train(Toy(), fresh(), STREAM, STEPS, **options)
    assert [r["loss"] for r in log(tmp_path)] == whole[1]


def test_records_come_every_interval_and_for_the_last_step(tmp_path):
    seen = []
    train(Toy(), fresh(), STREAM, STEPS, folder=tmp_path, log_every=5, report=seen.append)
    assert [r["step"] for r in seen] == [5, 10, 12] and log(tmp_path) == seen
    assert all(r["tokens_per_second"] > 0 for r in seen)


def test_no_folder_no_files(whole, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    state = train(Toy(), fresh(), STREAM, STEPS)
    assert float(state.params["w"]) == float(whole[0].params["w"]) and not any(tmp_path.iterdir())


@pytest.mark.parametrize(("save_every", "log_every"), [(5, 1), (5, 50), (3, 4), (100, 100)])
def test_a_nan_batch_stops_with_its_step_and_batch_named(save_every, log_every, whole, tmp_path):
    message = r"loss is nan at step 8 \(batch 7 of seed 7\)"
    with pytest.raises(TrainingDiverged, match=message):
        train(Toy(poison=7), fresh(), STREAM, STEPS, folder=tmp_path, save_every=save_every, log_every=log_every)
    # The good part is kept, so a run whose data are mended goes on.
    step = Toy()
    state = train(step, fresh(), STREAM, STEPS, folder=tmp_path, save_every=save_every, log_every=log_every)
    assert step.calls == STEPS - 7 // save_every * save_every
    assert float(state.params["w"]) == float(whole[0].params["w"])


def test_an_infinite_gradient_stops_before_its_state_is_saved(tmp_path):
    """Its loss is still finite; the parameters behind it would not be."""
    with pytest.raises(TrainingDiverged, match=r"grad_norm is inf at step 5 \(batch 4 of seed 7\)"):
        train(Toy(poison_gradient=4), fresh(), STREAM, STEPS, folder=tmp_path, save_every=5, log_every=50)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir() if p.name.isdigit()] == []


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    train(Toy(), fresh(), STREAM, 3, folder=tmp_path)
    other = TrainState({"w": jnp.ones(()), "v": jnp.ones(2)}, {}, {"m": jnp.zeros(())}, jnp.int32(0))
    for state in (other, fresh(size=4)):
        with pytest.raises(ConfigError, match=r"checkpoint of step 3 in .* is of another model or optimizer"):
            train(Toy(), state, STREAM, STEPS, folder=tmp_path)


@pytest.mark.parametrize("dense_steps", [0, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.long
def test_a_model_resumes_to_the_same_losses(dense_steps, tmp_path):
    """The real step: parameters, router biases and optimiser state come back bit for bit."""
    optimizer, _ = make_optimizer(OptimizerConfig(peak=0.01, steps=6, warmup=1, kind="adamw"))
    stream = TokenStream(np.random.default_rng(0).integers(0, 5, 400), 12, 2, seed=1)
    graph, begin = init_target(micro_model().target, optimizer)
    step = TargetStep(graph, optimizer, TargetRules(dense_steps=dense_steps))

    def run(folder: Path, kill: int = -1) -> TrainState:
        def guarded(state, tokens, index):
            if index == kill:
                raise Killed
            return step(state, tokens, index)

        state = jax.tree.map(jnp.copy, begin)  # steps donate it
        return train(guarded, state, stream, 6, folder=folder, save_every=2, log_every=1)

    expected = run(tmp_path / "whole")
    for kill in (3, 5):
        with pytest.raises(Killed):
            run(tmp_path / "parts", kill)
    found = run(tmp_path / "parts")
    losses = [[r["loss"] for r in log(tmp_path / name)] for name in ("whole", "parts")]
    assert losses[0] == losses[1] and len(losses[0]) == 6
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_array_equal(a, b)
