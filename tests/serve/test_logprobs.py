"""Log-probabilities out of the engine on a mesh: those of one device, and of a forward pass over the finished text.

Most of it is long: `test_schedule` and `test_processes` compare them with a forward pass too."""

import functools
import json
import sys

import jax
import numpy as np
import pytest

from dspark_jax import Completion, ConfigError, Engine, RequestError, SamplingParams, cli
from dspark_jax.parallel.mesh import make_mesh
from helpers.mesh_model import GAMMA, MAX_LEN, VOCAB, engine, forward, lm

TOP = 4


@functools.cache
def serving() -> Engine:
    """Reports up to TOP alternatives; as many slots as requests, so that what it serves is over in one batch."""
    return Engine(lm(), mesh=make_mesh(2, 2), slots=8, chunk=GAMMA + 1, max_len=MAX_LEN, max_logprobs=TOP)


@functools.cache
def requests() -> list[tuple[list[int], SamplingParams]]:
    """Ragged prompts, greedy and sampled; one stops, one asks for no alternatives, one for nothing, one meets the limit."""
    rng = np.random.default_rng(5)
    asked = [TOP, TOP, 1, 0, None, TOP, 2, TOP]
    found = []
    for i, n in enumerate(asked):
        prompt = rng.integers(0, VOCAB, int(rng.integers(1, 24))).tolist()
        found.append((prompt, SamplingParams(float(i % 2) * 0.9, 0, 0.95, i, int(rng.integers(6, 24)), (), n)))
    found[5] = (found[5][0] + [3] * (MAX_LEN - len(found[5][0]) - 6), SamplingParams(max_tokens=20, logprobs=TOP))
    return found


@functools.cache
def answers() -> list[Completion]:
    prompts, params = zip(*requests(), strict=True)
    return serving().generate(prompts, params)


def numbers(result: Completion) -> np.ndarray:
    assert result.logprobs is not None
    return np.array([[one.logprob, *(value for _, value in one.top)] for one in result.logprobs])


@pytest.mark.long
def test_they_are_those_of_a_forward_pass_over_the_text():
    accepted = 0
    for (_, params), result in zip(requests(), answers(), strict=True):
        if params.logprobs is None:
            assert result.logprobs is None
            continue
        expected = forward(result.prompt_tokens, result.tokens)
        assert result.logprobs is not None and len(result.logprobs) == len(result.tokens)
        best = np.argsort(-expected, axis=-1, kind="stable")[:, : params.logprobs]
        assert [[i for i, _ in one.top] for one in result.logprobs] == best.tolist()
        columns = np.concatenate([np.array(result.tokens)[:, None], best], axis=1)
        np.testing.assert_allclose(numbers(result), np.take_along_axis(expected, columns, axis=1), rtol=0, atol=5e-5)
        accepted += sum(result.drafted)
    assert accepted > 3  # drafts of a random model, but some


@pytest.mark.long
def test_one_device_reports_the_same():
    prompts, params = zip(*requests(), strict=True)
    for mesh, single in zip(answers(), lm().generate(prompts, params), strict=True):
        assert mesh.tokens == single.tokens and (mesh.logprobs is None) == (single.logprobs is None)
        if mesh.logprobs is not None and single.logprobs is not None:
            assert [[i for i, _ in one.top] for one in mesh.logprobs] == [[i for i, _ in one.top] for one in single.logprobs]
            np.testing.assert_allclose(numbers(mesh), numbers(single), rtol=0, atol=5e-5)


@pytest.mark.long
def test_a_stop_inside_the_text_and_a_stream():
    (prompt, params), whole = requests()[0], answers()[0]
    at = next(i for i in range(2, len(whole.tokens)) if whole.tokens[i] not in whole.tokens[:i])
    stop = SamplingParams(max_tokens=params.max_tokens, stop_token_ids=(whole.tokens[at],), logprobs=TOP)
    outputs = list(serving().stream(serving().submit(prompt, stop)))
    assert outputs[-1].finish_reason == "stop" and all(len(o.logprobs or ()) == len(o.tokens) for o in outputs)
    found = [one for o in outputs for one in o.logprobs or ()]
    assert whole.logprobs is not None and [o.logprob for o in found] == pytest.approx(
        [o.logprob for o in whole.logprobs[: at + 1]], abs=5e-5
    )


@pytest.mark.long
def test_an_aborted_request_has_those_of_its_tokens():
    e = serving()
    key = e.submit([1, 2], SamplingParams(max_tokens=40, logprobs=1))
    e.abort(key)
    assert e.result(key).logprobs == ()


@pytest.mark.long
def test_the_command_line_asks_its_engine_for_them(monkeypatch, capsys):
    asked = []

    def make(*_, **options):
        asked.append(options["max_logprobs"])
        return serving()

    monkeypatch.setattr("dspark_jax.cli_engine.Engine", make)
    everything = jax.devices()
    monkeypatch.setattr(jax, "devices", lambda *_: everything[:4])
    arguments = ("generate", "--mesh", "2x2", "--prompt", "abc", "--max-tokens", "5", "--logprobs", "2", "--json")
    monkeypatch.setattr(sys, "argv", ["dspark-jax", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert not end.value.code and set(asked) == {2}
    printed = json.loads(capsys.readouterr().out)["logprobs"]
    (expected,) = serving().generate(["abc"], SamplingParams(max_tokens=5, logprobs=2))
    assert expected.logprobs is not None
    assert [one["logprob"] for one in printed] == [one.logprob for one in expected.logprobs]
    assert [[i["token_id"] for i in one["top"]] for one in printed] == [[i for i, _ in one.top] for one in expected.logprobs]


def test_a_request_that_the_engine_cannot_answer_is_refused():
    with pytest.raises(RequestError, match=r"logprobs = 5; this engine has 4 at most: make it with max_logprobs = 5"):
        serving().submit([1], SamplingParams(logprobs=5))
    with pytest.raises(RequestError, match=r"logprobs = 0; this engine has none: make it with max_logprobs = 0"):
        engine(2, 2).submit([1], SamplingParams(logprobs=0))
    with pytest.raises(ConfigError, match=r"logprobs is 21; expected None \(off\) or 0 … 20"):
        Engine(lm(), max_len=MAX_LEN, max_logprobs=21)
