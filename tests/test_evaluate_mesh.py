"""`evaluate` and `calibrate` on pipeline ranks: what one device measures, from the same requests."""

import functools
import json
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from dspark_jax import LM, Engine, SamplingParams, cli, cli_engine
from dspark_jax.cli_engine import EngineRunner
from dspark_jax.decode.calibration_file import head_digest, read_calibration
from dspark_jax.evaluate import EvalPrompt, evaluate
from dspark_jax.near_tie import margins
from dspark_jax.parallel.mesh import make_mesh
from dspark_jax.record import LEAST_ROUNDS, calibrate, record
from helpers import scheduled_model
from helpers.scheduled_model import GAMMA, MAX_LEN

PROMPTS = ["ab", "q", "sky", "cab", "happy"]  # letters of the six ids
SAMPLED = SamplingParams(temperature=1.0, seed=2**32 - 2, max_tokens=20)


@functools.cache
def lm() -> LM:
    """On one device; its prompt chunks are a block wide, so that its programs are small."""
    whole = scheduled_model.lm()
    return LM(
        whole.config, whole.draft_config, whole._graph, whole._params, whole.tokenizer, max_len=MAX_LEN, chunk=GAMMA + 1
    )


@functools.cache
def ring(pipe: int, expert: int, speculate: bool) -> Engine:
    """Fewer slots than there are prompts; shared by the tests, idle between them."""
    mesh = make_mesh(pipe, expert)
    return Engine(scheduled_model.lm(), mesh=mesh, slots=4, chunk=GAMMA + 1, max_len=MAX_LEN, speculate=speculate)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """Options of the engines that a runner makes."""
    made: list[dict] = []

    def make(*_, mesh, speculate, **options):
        made.append(options | {"speculate": speculate})
        return ring(min(mesh.shape["pipe"], 2), mesh.shape["expert"], speculate)

    monkeypatch.setattr(cli_engine, "Engine", make)
    return made


@pytest.fixture
def run(asked, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path):
    """Runs a command on a mesh with two pipe ranks; returns what --json prints."""
    everything = jax.devices()
    monkeypatch.setattr("dspark_jax.api.load", lambda *_, **__: pytest.fail("loaded for the batch interface"))
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in PROMPTS))

    def go(command: str, *arguments: str, expert: int = 1) -> dict:
        common = ("--prompts", str(path), "--mesh", f"2x{expert}", "--json")
        monkeypatch.setattr(sys, "argv", ["dspark-jax", command, *common, *arguments])
        with monkeypatch.context() as few, pytest.raises(SystemExit) as stop:
            few.setattr(jax, "devices", lambda *_: everything[: 2 * expert])
            cli.main()
        printed = capsys.readouterr()
        assert not stop.value.code and printed.err == ""
        return json.loads(printed.out)

    return go


@pytest.mark.long
def test_two_pipe_ranks_measure_what_one_does(run, asked):
    (one,) = evaluate(EngineRunner("tiny", make_mesh()), [EvalPrompt(p) for p in PROMPTS], SAMPLED)
    assert one.head_off is not None and one.acceptance.rounds != one.head_off.rounds
    assert 0 < sum(one.acceptance.accepted_by_position) < sum(one.acceptance.verified_by_position)
    asked.clear()
    options = ("--temperature", "1", "--seed", str(SAMPLED.seed), "--max-tokens", "20", "--batch", "3")
    assert run("evaluate", *options)["results"] == [one.as_dict()]
    assert [(o["speculate"], o["slots"]) for o in asked] == [(True, 4)]  # 3, rounded up
    assert run("evaluate", *options)["results"] == [one.as_dict()]  # the engine has its head back


@pytest.mark.long
def test_greedy_and_sampled_on_pipe_ranks_as_by_the_batch_interface(asked):
    prompts = [EvalPrompt(p, kind) for p, kind in zip(PROMPTS, "xyxyx", strict=True)]
    runner = EngineRunner("tiny", make_mesh(2, 1), slots=4)
    for params in (SAMPLED, SamplingParams(max_tokens=20)):
        expected = evaluate(lm(), prompts, params)
        assert evaluate(runner, prompts, params) == expected
    assert [e.identical for e in expected] == [3, 2, 5]
    assert [(o["speculate"], o["slots"]) for o in asked] == [(True, 4), (False, 4)]


@pytest.mark.long
def test_margins_of_a_difference_come_from_the_whole_model(asked, monkeypatch):
    meshes = []
    monkeypatch.setattr("dspark_jax.api.load", lambda model, *, mesh, weights: meshes.append(mesh) or lm())
    runner = EngineRunner("tiny", make_mesh(2, 1), slots=4)
    generate = runner.generate

    def crooked(prompts, params, *, speculate):
        results = generate(prompts, params, speculate=speculate)
        if not speculate:
            return results
        return [replace(r, tokens=(*r.tokens[:2], r.tokens[2] - 1, *r.tokens[3:])) for r in results]

    monkeypatch.setattr(runner, "generate", crooked)
    (found,) = evaluate(runner, [EvalPrompt("ab"), EvalPrompt("q")], SamplingParams(max_tokens=9))
    plain = lm().generate(["ab", "q"], SamplingParams(max_tokens=9), speculate=False)
    assert found.identical == 0 and [(d.index, d.at) for d in found.differences] == [(0, 2), (1, 2)]
    for difference, text in zip(found.differences, plain, strict=True):
        assert difference.margins == margins(lm(), (*text.prompt_tokens, *text.tokens[:2])) and not difference.excused
    assert [dict(mesh.shape) for mesh in meshes] == [{"pipe": 1, "expert": 2}]
    assert EngineRunner("tiny", make_mesh(3, 1)).whole is lm()  # three ranks cannot share eight experts
    assert dict(meshes[-1].shape) == {"pipe": 1, "expert": 1}


@pytest.mark.long
def test_recorded_rounds_are_those_of_one_device(run, asked, tmp_path):
    one, two = (record(m, PROMPTS * 40, SAMPLED, batch=4) for m in (lm(), EngineRunner("tiny", make_mesh(2, 2))))
    first, second = (np.argsort(r.prompt, kind="stable") for r in (one, two))  # the rounds of a request in their order
    np.testing.assert_array_equal(two.prompt[second], one.prompt[first])
    np.testing.assert_array_equal(two.rounds.accepted[second], one.rounds.accepted[first])
    np.testing.assert_allclose(two.rounds.logits[second], one.rounds.logits[first], rtol=1e-4, atol=1e-5)
    assert len(one.rounds) > 2 * LEAST_ROUNDS and set(one.rounds.accepted) >= {0, 1}

    options = ("--samples", "40", "--seed", str(SAMPLED.seed), "--max-tokens", "20", "--batch", "4")
    found = run("calibrate", *options, "--out", str(tmp_path / "sts.json"), expert=2)
    expected = calibrate(lm(), replace(one, prompt=one.prompt % len(PROMPTS)), "prompts.jsonl").calibration
    assert found["num_samples"] == expected.num_samples
    np.testing.assert_allclose(found["temperatures"], expected.temperatures, rtol=1e-3)
    assert read_calibration(tmp_path / "sts.json").model == expected.model == head_digest(lm()._params)
