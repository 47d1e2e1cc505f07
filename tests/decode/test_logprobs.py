"""Log-probabilities against numpy: a look-up-table target's raw logits behind every token are the rows of its table."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import LM, Completion, RequestError, SamplingParams
from dspark_jax.decode.logprobs import committed_logprobs
from dspark_jax.decode.round import tick
from dspark_jax.testing import LookupTarget
from helpers.lookup_lm import GAMMA, VOCAB, lookup_lm, noisy
from helpers.ticks import SLOTS, chunk, counting, counting_drafter, start

TARGET = LookupTarget.random(VOCAB, seed=4)
PROMPTS = ["a", "abcdefghijk", "nml", "cab", "fedcb"]  # the second is read in three chunks
TOP = 3


@pytest.fixture(scope="module")
def lm() -> LM:
    """Its drafts are accepted now and then."""
    return lookup_lm(TARGET, noisy(TARGET, scale=0.3), chunk=4)


def params(temperature: float = 0.0, count: int = 40, **options) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=7, max_tokens=count, logprobs=options.pop("logprobs", TOP), **options)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def check(result: Completion, top: int = TOP) -> None:
    """Every token's numbers are those of the table's row of the token before it."""
    assert result.logprobs is not None and len(result.logprobs) == len(result.tokens) > 0
    before = [result.prompt_tokens[-1], *result.tokens[:-1]]
    for row, token, found in zip(log_softmax(np.asarray(TARGET.table)[before]), result.tokens, result.logprobs, strict=True):
        best = np.argsort(-row, kind="stable")[:top]
        assert [i for i, _ in found.top] == best.tolist()
        np.testing.assert_allclose([found.logprob, *(x for _, x in found.top)], row[[token, *best]], rtol=0, atol=2e-6)


@pytest.mark.parametrize("speculate", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_every_token_has_the_raw_logprob_of_its_row(lm: LM, temperature: float, speculate: bool):
    """For every accepted length, and for the prefill's token."""
    rounds = []
    sampled = [params(temperature, top_k=5, top_p=0.9)] * len(PROMPTS) if temperature else params()
    found = lm.generate(PROMPTS, sampled, speculate=speculate, ignore_eos=True, on_round=rounds.append)
    for result in found:
        check(result)
    assert {r.round == 0 for r in rounds} == {True, False}
    if speculate and temperature:  # the greedy texts are cycles
        assert {r.accepted for r in rounds} == set(range(GAMMA + 1))
    for i, result in enumerate(found):
        assert tuple(one for r in rounds if r.index == i for one in r.logprobs) == result.logprobs


def test_speculative_and_plain_greedy_decoding_report_the_same(lm: LM):
    fast, plain = (lm.generate(PROMPTS, params(), speculate=mode) for mode in (True, False))
    assert [r.logprobs for r in fast] == [r.logprobs for r in plain]


@pytest.mark.long
def test_several_rounds_a_call():
    target = LookupTarget.random(VOCAB, seed=4)
    for result in lookup_lm(target, noisy(target), chunk=4, rounds_per_call=3).generate(PROMPTS, params(0.8)):
        check(result)


@pytest.mark.long
def test_a_stop_in_the_middle_of_a_block_ends_them_there(lm: LM):
    whole = lm.generate([PROMPTS[0]], params(), ignore_eos=True)[0]
    inside = [i for i in range(1, len(whole.tokens) - 1) if whole.drafted[i] and whole.drafted[i + 1]]
    at = next(i for i in inside if whole.tokens[i] not in whole.tokens[:i])
    stopped = lm.generate([PROMPTS[0]], params(stop_token_ids=(whole.tokens[at],)), ignore_eos=True)[0]
    assert stopped.finish_reason == "stop" and len(stopped.tokens) == at + 1
    assert whole.logprobs is not None and stopped.logprobs == whole.logprobs[: at + 1]
    for count in range(1, 8):  # the token limit at every place of a block
        short = lm.generate([PROMPTS[0]], params(count=count), ignore_eos=True)[0]
        assert short.logprobs == whole.logprobs[:count]


@pytest.mark.long
def test_each_request_gets_what_it_asked_for(lm: LM):
    asked = [None, 0, 1, 5, VOCAB]
    found = lm.generate(PROMPTS, [params(logprobs=n) for n in asked])
    assert found[0].logprobs is None
    for result, n in zip(found[1:], asked[1:], strict=True):
        check(result, n or 0)
    assert lm.generate(PROMPTS[:1], params(logprobs=None))[0].logprobs is None


def test_a_stream_carries_them(lm: LM):
    (result,) = lm.generate(["cab"], params())
    assert tuple(one for output in lm.stream("cab", params()) for one in output.logprobs or ()) == result.logprobs


def test_rows_behind_the_committed_ones_hold_nothing():
    """Whatever stands in them, NaN too."""
    logits = np.random.default_rng(0).normal(size=(3, 4, 6)).astype(np.float32)
    dirty = logits.copy()
    dirty[1, 2:], dirty[2] = np.nan, np.inf
    tokens, count = np.ones((3, 4), np.int32), np.array([4, 2, 0], np.int32)
    rest = (jnp.asarray(tokens), jnp.asarray(count), 2)
    clean, found = (committed_logprobs(jnp.asarray(x), *rest) for x in (logits, dirty))
    jax.tree.map(np.testing.assert_array_equal, clean, found)
    assert found is not None and not np.asarray(found.token)[1, 2:].any() and not np.asarray(found.top)[2].any()


def test_without_them_the_program_has_no_trace_of_them():
    target, drafter = counting(), counting_drafter()
    state, item = start(target, drafter, []), chunk([[1]] * SLOTS, [0] * SLOTS, [True] * SLOTS)

    def program(logprobs: int | None):
        return jax.make_jaxpr(lambda s, i: tick(target, drafter, s, i, 20, logprobs))(state, item)

    plain, asked = program(None), program(2)
    assert "top_k" not in str(plain) and "top_k" in str(asked)
    assert len(asked.out_avals) == len(plain.out_avals) + 3


@pytest.mark.parametrize("value", [-1, VOCAB + 1, 1.0, True, "3", float("nan")])
def test_what_cannot_be_is_refused(lm: LM, value):
    message = re.escape(f"logprobs = {value!r}; expected None (off) or an integer in 0 … {VOCAB}")
    with pytest.raises(RequestError, match=message):
        lm.generate(["a"], replace(params(), logprobs=value))


def test_the_most_is_twenty():
    SamplingParams.from_dict({"logprobs": 20}).validate(vocab_size=100)
    with pytest.raises(RequestError, match=r"logprobs = 21; expected None \(off\) or an integer in 0 … 20"):
        SamplingParams.from_dict({"logprobs": 21})
