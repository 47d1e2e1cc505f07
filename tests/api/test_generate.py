"""`LM.generate` and `LM.stream`: what comes out, whatever the batch, and what is counted."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dspark_jax import LM, SamplingParams, load
from dspark_jax.checkpoint.layout import skeleton
from dspark_jax.parallel.mesh import make_mesh
from dspark_jax.testing import DummyTokenizer, LookupTarget
from dspark_jax.text import TextStream
from helpers.lookup_lm import BOS, EOS, GAMMA, LETTERS, agreeing, alphabet, chain, lookup_lm, noisy

RAGGED = ["a", "abcdefgh", "nmlkj", "cab", "fedcbafedcbafedcba"]


def greedy(count: int = 40, **options) -> SamplingParams:
    return SamplingParams(max_tokens=count, **options)


def letters(start: str, count: int) -> str:
    """`count` letters of the alphabet behind `start`."""
    first = LETTERS.index(start) + 1
    return "".join(LETTERS[(first + i) % len(LETTERS)] for i in range(count))


# The real model: ragged prompts, some of several chunks.


@pytest.mark.long
def test_speculative_greedy_text_is_plain_greedy_text_and_the_models_own(tiny: LM, tiny_model):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, 12, n).tolist() for n in (1, 70, 9, 131)]
    params = [greedy(n) for n in (24, 20, 24, 16)]
    fast = tiny.generate(prompts, params, ignore_eos=True)
    plain = tiny.generate(prompts, params, speculate=False, ignore_eos=True)
    assert [f.tokens for f in fast] == [p.tokens for p in plain]
    assert [len(f.tokens) for f in fast] == [24, 20, 24, 16]
    assert 0 < sum(sum(f.drafted) for f in fast) < sum(sum(f.verified_by_position) for f in fast)
    # One pass over prompt and answer, without any decoding code: every token is the argmax behind those before it.
    width = max(len(p) + len(f.tokens) for p, f in zip(prompts, fast, strict=True))
    texts = np.zeros((4, width), np.int32)
    for r, (p, f) in enumerate(zip(prompts, fast, strict=True)):
        texts[r, : len(p) + len(f.tokens)] = [*p, *f.tokens]
    graph, _ = skeleton(tiny_model.config, tiny_model.draft, dtype=jnp.float32, axis=None)

    @jax.jit
    def argmaxes(params, x):
        target = nnx.merge(graph, params).target
        return target.logits(target.sequence(x).hidden).argmax(-1).reshape(x.shape)

    best = argmaxes(tiny_model.params(), jnp.asarray(texts))
    for r, (p, f) in enumerate(zip(prompts, fast, strict=True)):
        assert tuple(np.asarray(best)[r, len(p) - 1 : len(p) + len(f.tokens) - 1]) == f.tokens


def test_loaded_model_has_the_files_configuration_and_tokenizer(tiny: LM, tiny_model):
    assert (tiny.config, tiny.draft_config, tiny.gamma) == (tiny_model.config, tiny_model.draft, 3)
    assert tiny.encode("AB") == [0, 2, 3] and tiny.decode([0, 2, 3, 1]) == "AB"
    assert tiny.max_len == 256


# Look-up tables: what is emitted and counted.


def test_drafts_that_agree_fill_every_round(spelling: LM):
    (result,) = spelling.generate(["abc"], greedy(26))
    assert result.text == letters("c", 26) and result.finish_reason == "length"
    assert result.prompt_tokens == (BOS, 0, 1, 2) and result.tokens == tuple(spelling.encode(result.text)[1:])
    assert result.rounds == 5 and result.tokens_per_round == GAMMA + 1
    assert result.acceptance_by_position == (1.0,) * GAMMA and result.verified_by_position == (5,) * GAMMA
    assert result.drafted == (False, *([True] * GAMMA + [False]) * 5)
    assert 0 < result.prefill_seconds < result.seconds
    (plain,) = spelling.generate(["abc"], greedy(26), speculate=False)
    assert plain.tokens == result.tokens and plain.rounds == 25 and plain.tokens_per_round == 1
    assert not any(plain.drafted) and plain.acceptance_by_position == ()


def test_nothing_behind_a_stop_token_inside_an_accepted_block_is_emitted_or_counted(spelling: LM):
    stop = LETTERS.index("j")  # c | defgh | ij.. : the second draft of the second round
    (result,) = spelling.generate(["ab"], greedy(60, stop_token_ids=(stop,)))
    assert result.text == "cdefghij" and result.finish_reason == "stop"
    assert result.rounds == 2 and result.verified_by_position == (2, 2, 1, 1) == result.accepted_by_position
    assert result.drafted[-2:] == (True, True) and result.tokens_per_round == 7 / 2


@pytest.mark.parametrize("count", [1, 2, 5, 6, 7, 8])
def test_max_tokens_cuts_inside_a_block(spelling: LM, count: int):
    (result,) = spelling.generate(["ab"], greedy(count))
    assert result.text == letters("b", count) and result.finish_reason == "length"
    assert result.rounds == -(-(count - 1) // (GAMMA + 1)) and sum(result.drafted) == sum(result.accepted_by_position)
    assert (result.tokens_per_round is None) == (count == 1)


@pytest.mark.long
def test_the_context_limit_ends_a_request():
    lm = lookup_lm(alphabet(), agreeing(alphabet(), 2), max_len=32)
    for length in (20, 31):
        prompt = [0] * length
        fast, plain = (lm.generate([prompt], greedy(500), speculate=s)[0] for s in (True, False))
        assert fast.tokens == plain.tokens and len(fast.tokens) == 32 - length
        assert fast.finish_reason == plain.finish_reason == "context"


def test_stop_comes_before_length_and_length_before_context():
    lm = lookup_lm(alphabet(), agreeing(alphabet(), 2), max_len=32)
    for params, reason in ((greedy(2, stop_token_ids=(2,)), "stop"), (greedy(2), "length"), (greedy(3), "context")):
        assert lm.generate([[0] * 30], params)[0].finish_reason == reason


def test_end_of_sequence_stops_unless_ignored():
    target = chain({0: 1, 1: 2, 2: EOS, EOS: 3, 3: 4})
    lm = lookup_lm(target, agreeing(target))
    (result,) = lm.generate(["a"], greedy(6))
    assert result.tokens == (1, 2, EOS) and result.finish_reason == "stop"
    (result,) = lm.generate(["a"], greedy(6), ignore_eos=True)
    assert result.tokens == (1, 2, EOS, 3, 4, 0) and result.finish_reason == "length"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_order_and_size_of_the_batch_change_no_token(babbling: LM, temperature: float):
    params = [greedy(10 + 5 * i, temperature=temperature, seed=i, top_k=9) for i in range(5)]
    together = babbling.generate(RAGGED, params, ignore_eos=True)
    assert 0 < sum(sum(c.drafted) for c in together) < sum(c.rounds for c in together) * GAMMA
    back = babbling.generate(RAGGED[::-1], params[::-1], ignore_eos=True)[::-1]
    alone = [babbling.generate([p], s, ignore_eos=True)[0] for p, s in zip(RAGGED, params, strict=True)]
    for a, b, c in zip(together, back, alone, strict=True):
        assert a.tokens == b.tokens == c.tokens and a.rounds == b.rounds == c.rounds


@pytest.mark.long  # two more programs
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_neighbour_that_needs_more_positions_changes_no_token(babbling: LM, temperature: float):
    params = [greedy(10 + 5 * i, temperature=temperature, seed=i, top_k=9) for i in range(5)]
    together = babbling.generate(RAGGED, params, ignore_eos=True)
    longer = [*params[:4], dataclasses.replace(params[4], max_tokens=300)]
    wide = babbling.generate(RAGGED, longer, ignore_eos=True)
    assert [w.tokens for w in wide[:4]] == [t.tokens for t in together[:4]]
    assert wide[4].tokens[:30] == together[4].tokens and len(wide[4].tokens) == 300


def test_greedy_with_partial_acceptance_is_plain_greedy(babbling: LM):
    fast = babbling.generate(RAGGED, greedy(50))
    plain = babbling.generate(RAGGED, greedy(50), speculate=False)
    assert [f.tokens for f in fast] == [p.tokens for p in plain]
    assert any(0 < sum(f.drafted) < sum(f.verified_by_position) for f in fast)


def test_same_seed_same_sample_and_another_seed_another(babbling: LM):
    params = [greedy(30, temperature=1.0, seed=seed) for seed in (5, 6, 5, 7, 5)]
    drawn = [c.tokens for c in babbling.generate(["a"] * 5, params, ignore_eos=True)]
    assert drawn[0] == drawn[2] == drawn[4] and len(set(drawn)) == 3


@pytest.mark.long
def test_several_rounds_a_call_give_the_same(babbling: LM):
    target = LookupTarget.random(16, seed=4)
    eight = lookup_lm(target, noisy(target), chunk=4, rounds_per_call=8)
    params = [greedy(n, temperature=1.0, seed=n) for n in (1, 7, 40, 2, 25)]
    for a, b in zip(*(lm.generate(RAGGED, params) for lm in (babbling, eight)), strict=True):
        assert (a.tokens, a.rounds, a.drafted, a.finish_reason) == (b.tokens, b.rounds, b.drafted, b.finish_reason)


def test_a_mesh_of_several_devices_changes_no_token(babbling: LM):
    target = LookupTarget.random(16, seed=4)
    lm = lookup_lm(target, noisy(target, 2), chunk=4, mesh=make_mesh(expert=2))
    expected = babbling.generate(RAGGED, greedy(20))[:3]
    assert [c.tokens for c in lm.generate(RAGGED[:3], greedy(20))] == [c.tokens for c in expected]


@pytest.mark.long
def test_no_request_comes_so_near_to_its_capacity_that_drafts_are_cut():
    lm = lookup_lm(alphabet(), agreeing(alphabet(), 1))
    rounds = list(lm.stream([0] * 202, greedy(54)))  # 256 positions: a program for 256 would just do
    assert len(rounds) == 28 and all(r.verified == 1 for r in rounds[1:])


def test_no_round_runs_after_the_last_token_that_can_be_foreseen(spelling: LM, monkeypatch):
    spelling.compile(["ab"], greedy(), speculate=[True, False])
    decoder, calls = spelling._decoders[1, 256, None], []
    for name in ("rounds", "plain_rounds"):
        step = decoder._compiled[name]
        monkeypatch.setitem(
            decoder._compiled, name, lambda *inputs, name=name, step=step: calls.append(name) or step(*inputs)
        )
    spelling.generate(["ab"], greedy(10), speculate=False)
    spelling.generate(["ab"], greedy(22))
    assert calls == ["plain_rounds"] * 9 + ["rounds"] * 5


def test_programs_are_compiled_once(babbling: LM):
    prompts = ["ab"] * 5
    babbling.compile(prompts, greedy(), speculate=(True, False))
    before = dict(babbling._decoders)
    count = _count_compilations(lambda: babbling.generate(prompts, greedy(30, temperature=0.7, top_p=0.9)))
    count += _count_compilations(lambda: babbling.generate([RAGGED[4]] * 6, greedy(5), speculate=False))
    assert babbling._decoders == before and count == 0


def _count_compilations(work) -> int:
    seen = []
    listener = lambda event, *_, **__: seen.append(event)  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        work()
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    return sum("backend_compile" in event for event in seen)


# Streaming.


def test_rounds_arrive_in_order_and_add_up(babbling: LM):
    got = []
    results = babbling.generate(RAGGED, greedy(25, temperature=1.0), on_round=got.append)
    for i, result in enumerate(results):
        mine = [r for r in got if r.index == i]
        assert [r.round for r in mine] == list(range(result.rounds + 1))
        assert tuple(t for r in mine for t in r.tokens) == result.tokens
        assert "".join(r.text for r in mine) == result.text
        assert tuple(j < r.accepted for r in mine for j in range(len(r.tokens))) == result.drafted
        assert [r.finish_reason for r in mine] == [None] * result.rounds + [result.finish_reason]
        assert mine[0].verified == 0 and all(r.verified == GAMMA for r in mine[1:])


def test_stream_gives_what_generate_gives(spelling: LM):
    got = list(spelling.stream("ab", greedy(13)))
    (result,) = spelling.generate(["ab"], greedy(13))
    assert "".join(r.text for r in got) == result.text == letters("b", 13)
    assert [len(r.tokens) for r in got] == [1, 5, 5, 2] and [r.accepted for r in got] == [0, 4, 4, 2]
    plain = list(spelling.stream("ab", greedy(13), speculate=False))
    assert [len(r.tokens) for r in plain] == [1] * 13 and not any(r.accepted for r in plain)


def test_an_abandoned_stream_leaves_the_model_as_it_was(spelling: LM):
    stream = spelling.stream("ab", greedy(60))
    next(stream)
    stream.close()
    assert spelling.generate(["ab"], greedy(9))[0].text == letters("b", 9)


def test_multi_byte_characters_are_not_torn():
    text = "né €5 😀 ok"
    ids = list(text.encode())
    stream = TextStream(DummyTokenizer().decode)
    pieces = [stream.push(i) for i in ids]
    assert "".join([*pieces, stream.flush()]) == text and "\ufffd" not in "".join(pieces)
    assert [p for p in pieces if p] == list(text)
    # Text that ends inside a character.
    stream = TextStream(DummyTokenizer().decode)
    pieces = [stream.push(i) for i in "a€".encode()[:-1]]
    assert pieces == ["a", "", ""] and stream.flush() == "\ufffd" and stream.flush() == ""


def test_a_decoder_that_treats_the_first_token_in_a_special_way_loses_no_space():
    words = ["_to", "_be", "_or", "ch", "id"]
    decode = lambda ids: "".join(words[i] for i in ids).replace("_", " ").removeprefix(" ")  # noqa: E731
    stream = TextStream(decode)
    assert [stream.push(i) for i in (0, 1, 2, 3, 4)] == ["to", " be", " or", "ch", "id"]


def test_load_reads_a_folder_into_the_dtype_asked_for(tiny_folder):
    lm = load(tiny_folder, dtype=jnp.bfloat16, max_len=64)
    assert lm.max_len == 64 and {p.dtype for p in jax.tree.leaves(lm._params)} >= {jnp.dtype(jnp.bfloat16)}
