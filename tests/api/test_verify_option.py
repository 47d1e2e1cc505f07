"""`verify=`: one sampled text for every drafter and for none, through the Python interface and on the command line."""

import json
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import LM, ConfigError, Engine, RequestError, SamplingParams, cli, load
from dspark_jax.decode import noise
from dspark_jax.decode.schedule import FixedLength, Schedule
from dspark_jax.testing import LookupTarget
from dspark_jax.trace import trace_rounds
from helpers.lookup_lm import agreeing, lookup_lm, noisy

TARGET = LookupTarget.random(16, seed=4)  # that of the fixture `babbling`
PROMPTS = ["abc", "k", "abcdefgh"]
PARAMS = [
    SamplingParams(0.9, seed=3, max_tokens=30),
    SamplingParams(1.3, top_k=9, top_p=0.9, seed=4, max_tokens=25, stop_token_ids=(7,)),
    SamplingParams(0.0, max_tokens=20),
]


@pytest.fixture(scope="module")
def coupled() -> LM:
    return lookup_lm(TARGET, noisy(TARGET), chunk=4, verify="coupled")


def texts(lm: LM, **options) -> list[tuple[int, ...]]:
    return [c.tokens for c in lm.generate(PROMPTS, PARAMS, ignore_eos=True, **options)]


@pytest.mark.long
def test_the_text_is_the_same_for_every_drafter_and_for_none(coupled: LM, babbling: LM):
    plain = texts(coupled, speculate=False)
    found = coupled.generate(PROMPTS, PARAMS, ignore_eos=True)
    assert [c.tokens for c in found] == plain
    assert all(0 < np.sum(c.accepted_by_position) < np.sum(c.verify_lengths) for c in found)
    # The first request's by hand: the argmax of table / temperature + noise, from the first token on.
    before, position = (found[0].prompt_tokens[-1], *plain[0][:-1]), len(found[0].prompt_tokens) + jnp.arange(30)
    gumbel = noise.gumbel(jnp.full(30, 3, jnp.uint32), position, noise.COUPLED, 16)
    assert plain[0] == tuple((TARGET.table[jnp.array(before)] / 0.9 + gumbel).argmax(axis=1).tolist())
    sure = lookup_lm(TARGET, agreeing(TARGET, 2), chunk=8, verify="coupled", scheduler=Schedule(FixedLength(1)))
    done = sure.generate(PROMPTS, PARAMS, ignore_eos=True)
    assert [c.tokens for c in done] == plain
    assert [c.acceptance_by_position[0] for c in done] == [1.0] * 3
    rejecting = texts(babbling)
    assert rejecting[2] == plain[2] and rejecting[:2] != plain[:2]  # greedy texts never depend on it


@pytest.mark.parametrize("make", [load, Engine])
def test_another_name_is_refused(make, tiny_folder, monkeypatch):
    monkeypatch.setattr("jax.device_put", lambda *_, **__: pytest.fail("device work"))
    with pytest.raises(ConfigError, match=r"verify is 'best'; expected 'rejection' .* or 'coupled'"):
        make(tiny_folder, verify="best")


def test_another_name_is_refused_by_the_model():
    with pytest.raises(ConfigError, match="verify is None"):
        lookup_lm(TARGET, None, verify=None)


def test_a_trace_shows_rejection_sampling_only(coupled: LM):
    with pytest.raises(RequestError, match="the model verifies coupled"):
        trace_rounds(coupled, "abc")


@pytest.fixture
def run(coupled: LM, monkeypatch, capsys):
    given = {}
    monkeypatch.setattr("dspark_jax.api.load", lambda *_, **options: given.update(options) or coupled)

    def call(*arguments: str) -> tuple[str, dict]:
        monkeypatch.setattr(sys, "argv", ["dspark-jax", *arguments, "--verify", "coupled"])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert not stop.value.code
        return capsys.readouterr().out, given

    return call


@pytest.mark.long
def test_sampled_texts_are_compared(run):
    common = ("generate", "--prompt", "abc", "--max-tokens", "9", "--compare", "--temperature", "1.5", "--seed", "3")
    out, given = run(*common, "--json")
    found = json.loads(out)
    assert given["verify"] == "coupled" and found["identical"] is True and "note" not in found
    assert f"Plain decoding's text is identical ({found['tokens']} tokens)." in run(*common)[0]


def test_evaluate_reports_tokens_a_round(run, coupled: LM, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "abc"}\n')
    common = ("evaluate", "--prompts", str(path), "--max-tokens", "20", "--temperature", "1", "--seed", "3", "--json")
    out, given = run(*common)
    found = json.loads(out)
    (answer,) = coupled.generate(["abc"], SamplingParams(1.0, seed=3, max_tokens=20))
    assert given["verify"] == found["verify"] == "coupled"
    assert found["results"][0]["with_head"]["tau"] == answer.tokens_per_round


@pytest.mark.parametrize("arguments", [("generate", "--prompt", "A"), ("bench", "serve", "--prompts", "PROMPTS")])
def test_a_wrong_option_is_one_message_and_exit_code_2(arguments, tmp_path, monkeypatch, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "A"}\n')
    arguments = [str(prompts) if a == "PROMPTS" else a for a in arguments]
    monkeypatch.setattr(sys, "argv", ["dspark-jax", *arguments, "--verify", "best"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    printed = capsys.readouterr()
    assert stop.value.code == 2 and printed.out == "" and "verify is 'best'" in printed.err and "Traceback" not in printed.err
