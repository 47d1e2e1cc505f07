"""`trace_rounds` shows the rounds that `generate` runs, and what decided them."""

import dataclasses

import numpy as np
import pytest

from dspark_jax import LM, RequestError, SamplingParams
from dspark_jax.testing import LookupTarget
from dspark_jax.trace import RoundTrace, trace_rounds
from helpers.lookup_lm import GAMMA, alphabet, lookup_lm, noisy

PARAMS = SamplingParams(temperature=0.9, top_k=9, seed=5, max_tokens=40)


@pytest.fixture(scope="module")
def target() -> LookupTarget:
    return LookupTarget.random(16, seed=4)


@pytest.fixture(scope="module")
def lm(target: LookupTarget) -> LM:
    return lookup_lm(target, noisy(target), chunk=4)


@pytest.fixture(scope="module")
def traces(lm: LM) -> list[RoundTrace]:
    return trace_rounds(lm, "abcdefg", PARAMS, rounds=100, ignore_eos=True)


def test_the_rounds_are_those_of_generate(lm: LM, traces: list[RoundTrace]):
    (result,) = lm.generate(["abcdefg"], PARAMS, ignore_eos=True)
    assert len(traces) == result.rounds and traces[-1].finish_reason == result.finish_reason
    assert (traces[0].anchor, *(t for trace in traces for t in trace.tokens)) == result.tokens
    assert traces[0].position == len(result.prompt_tokens)
    for before, after in zip(traces, traces[1:], strict=False):
        assert (after.anchor, after.position) == (before.tokens[-1], before.position + len(before.tokens))
        assert before.finish_reason is None


def test_p_q_and_the_uniform_numbers_are_those_that_decide(traces: list[RoundTrace]):
    assert {trace.accepted for trace in traces} >= {0, 1}  # rejections and acceptances are seen
    for trace in traces:
        survives = (trace.uniform * trace.draft_q <= trace.draft_p)[: trace.verified]
        assert trace.accepted == np.cumprod(survives).sum()
        assert trace.p.shape == (GAMMA + 1, 16) and trace.q.shape == (GAMMA, 16)
        np.testing.assert_allclose(trace.p.sum(-1), 1, rtol=1e-5)
        np.testing.assert_allclose(trace.q.sum(-1), 1, rtol=1e-5)
        assert np.all((trace.p > 0).sum(-1) <= 9)  # top-k is in p and in q
        assert np.all(trace.acceptance <= 1) and np.all(trace.overlap <= 1 + 1e-5)
        np.testing.assert_allclose(trace.confidence, 0.5)


def test_p_is_the_targets_law(lm: LM, target: LookupTarget):
    (trace,) = trace_rounds(lm, "abc", SamplingParams(temperature=1.0, seed=1, max_tokens=9))
    for j, last in enumerate([trace.anchor, *trace.drafts]):
        np.testing.assert_allclose(trace.p[j], target.law([int(last)]), atol=1e-6)


def test_table(lm: LM, traces: list[RoundTrace]):
    trace = next(t for t in traces if 0 < t.accepted < GAMMA - 1 and t.verified == GAMMA)
    lines = trace.table(lm.decode).splitlines()
    assert len(lines) == GAMMA + 2
    verdicts = [line.split("  ")[-1] for line in lines[1:-1]]
    behind = GAMMA - trace.accepted - 1
    assert verdicts == ["accepted"] * trace.accepted + ["rejected"] + ["behind a rejection"] * behind
    assert repr(lm.decode(trace.tokens[-1:])) in lines[-1] and "in place of the rejected draft" in lines[-1]


def test_table_of_a_block_that_was_cut(lm: LM, traces: list[RoundTrace]):
    trace = next(t for t in traces if t.accepted > 1)
    cut = dataclasses.replace(trace, tokens=trace.tokens[:1], finish_reason="length")
    last = cut.table(lm.decode).splitlines()[-1]
    assert last.startswith(repr(lm.decode(trace.tokens[:1]))) and last.endswith("inside the block (length)")


def test_refusals(lm: LM):
    with pytest.raises(RequestError, match="the prompt is empty"):
        trace_rounds(lm, "")
    with pytest.raises(RequestError, match="no drafter"):
        trace_rounds(lookup_lm(alphabet(), None), "abc")
