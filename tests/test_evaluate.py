"""`dspark_jax.evaluate` and `dspark-jax evaluate`: counts, the head switched off, near-ties, bad prompt files."""

import dataclasses
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dspark_jax import LM, RequestError, SamplingParams, cli, load
from dspark_jax.evaluate import Acceptance, EvalPrompt, compare, distinct_share, evaluate, head_off, read_prompts
from dspark_jax.models.speculative import SpeculativeLM
from dspark_jax.near_tie import NEAR, Margins, _router_margin, margins, near_tie
from dspark_jax.testing import LookupTarget
from dspark_kernels import routing
from helpers.lookup_lm import GAMMA, agreeing, alphabet, chain, lookup_lm, noisy

PROMPTS = Path(__file__).parent / "data" / "nano_prompts.jsonl"


@pytest.fixture(scope="module")
def spelling() -> LM:
    return lookup_lm(alphabet(), agreeing(alphabet()))


@pytest.fixture(scope="module")
def babbling() -> LM:
    target = LookupTarget.random(16, seed=4)
    return lookup_lm(target, noisy(target, scale=0.5))


@pytest.fixture(scope="module")
def nano() -> LM:
    return load("nano")


def test_a_line_of_a_prompt_file_ends_at_a_newline_only(tmp_path: Path):
    """JSON allows the line separators of Unicode within a text; published prompt files hold some."""
    file = tmp_path / "prompts.jsonl"
    file.write_bytes('{"prompt": "a\u2028b\u0085c"}\r\n{"prompt": "d"}\n'.encode())
    assert read_prompts(file) == [EvalPrompt("a\u2028b\u0085c"), EvalPrompt("d")]


def test_prompt_files_of_deepspec_give_their_first_turns(tmp_path: Path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"turns": ["first", "second"]}\n{"prompt": "own", "turns": ["other"], "kind": "code"}\n')
    assert read_prompts(file) == [EvalPrompt("first"), EvalPrompt("own", "code")]
    file.write_text('{"turns": []}\n{"turns": [3]}\n{"turns": "text"}\n')
    with pytest.raises(RequestError) as error:
        read_prompts(file)
    expected = 'has no "prompt"; expected a text that is not empty, or "turns"'
    assert all(f"line {n} {expected}" in str(error.value) for n in (1, 3))
    assert "line 2: the prompt is 3 (int); expected a text" in str(error.value)


@pytest.mark.long
def test_counts_of_a_drafter_that_always_agrees(spelling: LM):
    prompts = [EvalPrompt("abc", "up"), EvalPrompt("k", "down"), EvalPrompt("de", "up")]
    up, down, both = evaluate(spelling, prompts, SamplingParams(max_tokens=26), batch=2)
    assert [(e.kind, e.prompts, e.tokens, e.identical) for e in (up, down, both)] == [
        ("up", 2, 52, 2), ("down", 1, 26, 1), ("all", 3, 78, 3),
    ]  # fmt: skip
    assert both.acceptance == Acceptance(75, 15, (15,) * GAMMA, (15,) * GAMMA, verify_lengths=(GAMMA,) * 15, wasted=0)
    assert both.acceptance.tau == GAMMA + 1 and both.acceptance.by_position == (1.0,) * GAMMA
    assert both.head_off is None and both.differences == ()
    assert both.distinct_4grams == 14 / (3 * 23)  # the alphabet has 14 letters, so 14 different 4-grams


@pytest.mark.long
def test_samples_differ_by_prompt_and_are_not_compared(babbling: LM):
    prompts = [EvalPrompt("abc")] * 4
    (e,) = evaluate(babbling, prompts, SamplingParams(max_tokens=30, temperature=1.0, seed=2**32 - 1), batch=3)
    assert e.kind == "all" and e.identical is None and e.differences == ()
    assert e.distinct_4grams is not None and e.distinct_4grams > 0.5  # four seeds, not one text four times
    tau, first = e.acceptance.tau, e.acceptance.by_position[0]
    assert tau is not None and 1 < tau < GAMMA + 1 and first is not None and 0.3 < first < 1


def test_distinct_share_counts_over_all_texts():
    assert distinct_share([[1, 2, 3, 4, 5], [1, 2, 3, 4]]) == 2 / 3
    assert distinct_share([[1, 2, 3]]) is None


def test_a_difference_is_excused_only_by_a_tie(spelling: LM):
    fast, plain = spelling.generate(["abc", "abc"], SamplingParams(max_tokens=9))
    assert compare(spelling, 0, fast, plain) is None
    crooked = dataclasses.replace(fast, tokens=(*fast.tokens[:3], 0, *fast.tokens[4:]))
    found = compare(spelling, 7, crooked, plain)
    assert found is not None and (found.index, found.at, found.excused) == (7, 3, False)
    assert found.margins == Margins(20.0, np.inf, np.inf)

    table = np.array(alphabet().table)
    table[2, 9] = table[2, 3] - NEAR / 2  # behind c: d, or nearly as well j
    tied = lookup_lm(LookupTarget(jnp.asarray(table)), None)
    assert near_tie(tied, tied.encode("abc")) and not near_tie(tied, tied.encode("abcd"))


@pytest.mark.long
def test_margins_of_a_v4_model_are_those_of_its_own_choices(nano: LM, monkeypatch: pytest.MonkeyPatch):
    """Against the model's own pass over the prefix, with the router's inputs written down on the way."""
    prefix = nano.encode(read_prompts(PROMPTS)[1].prompt * 2)
    assert 80 < len(prefix) < 256  # more than 16 entries of 4 tokens, so that the indexer has a choice
    graph, _ = nnx.split(nnx.eval_shape(lambda: SpeculativeLM(nano.config, nano.draft_config, rngs=nnx.Rngs(0))))
    seen, route = [], routing.route

    def watched(logits, *, bias=None, **rest):
        if bias is not None:
            seen.append(jnp.sqrt(jax.nn.softplus(logits)) + bias)
        return route(logits, bias=bias, **rest)

    @jax.jit
    def reference(params, token):
        target = nnx.merge(graph, params).target
        out = target.sequence(token)
        scores = [aux.scores[0] for aux in out.attention if aux is not None]
        return list(seen), scores, target.logits(out.hidden[0, -1])

    monkeypatch.setattr(routing, "route", watched)
    choices, scores, logits = jax.device_get(reference(nano._params, jnp.asarray([prefix])))
    monkeypatch.undo()
    assert len(choices) == nano.config.num_hidden_layers - nano.config.num_hash_layers and len(scores) == 3
    best = np.sort(np.stack(choices), axis=-1)[..., ::-1]
    router = (best[..., nano.config.num_experts_per_tok - 1] - best[..., nano.config.num_experts_per_tok]).min()

    index_gaps = []
    for layer in scores:
        for position, row in enumerate(layer):
            best = np.sort(row[: (position + 1) // 4])[::-1]
            if len(best) > nano.config.index_topk:
                index_gaps.append(best[nano.config.index_topk - 1] - best[nano.config.index_topk])
    last = np.sort(logits)
    found = margins(nano, prefix)
    np.testing.assert_allclose(found.logit, last[-1] - last[-2], rtol=1e-3)
    np.testing.assert_allclose([found.router, found.indexer], [router, min(index_gaps)], atol=5e-6)
    assert found.least == min(found.logit, found.router, found.indexer)


def test_the_routers_margin_skips_padding_rows_and_hash_layers(nano: LM):
    hashed, *_, scored = (layer.ffn for layer in nnx.merge(nano._graph, nano._params).target.layers)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(9, nano.config.hidden_size)), jnp.float32)
    every = np.ones(9, bool)
    gaps = np.array([float(_router_margin(scored, x[i : i + 1], every[:1])) for i in range(9)])
    least, second = np.sort(gaps)[:2]
    np.testing.assert_allclose(_router_margin(scored, x, every), least, atol=1e-6)
    np.testing.assert_allclose(_router_margin(scored, x, gaps != least), second, atol=1e-6)
    assert second > least + 1e-5 and _router_margin(hashed, x, every) == np.inf


def test_head_off_zeroes_the_bias_alone_and_shares_programs(nano: LM):
    with head_off(nano) as silent:
        assert isinstance(silent, LM) and silent._decoders is nano._decoders
        before, after = (jax.tree_util.tree_leaves_with_path(lm._params) for lm in (nano, silent))
    changed = [(path, b) for (path, a), (_, b) in zip(before, after, strict=True) if np.any(a != b)]
    assert len(changed) == 1 and "markov_w2" in jax.tree_util.keystr(changed[0][0]) and not np.any(changed[0][1])


@pytest.mark.long
def test_the_sequential_head_is_worth_its_place(nano: LM):
    prompts = [p for p in read_prompts(PROMPTS, "code") if len(nano.encode(p.prompt)) < 60][:4]
    (e,) = evaluate(nano, prompts, SamplingParams(max_tokens=48), batch=4)
    assert e.identical == 4 and e.tokens > 100
    assert e.acceptance.tau and e.head_off and e.head_off.tau
    assert e.acceptance.tau > 1.1 * e.head_off.tau > 1.1


def run(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["dspark-jax", "evaluate", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    printed = capsys.readouterr()
    return int(stop.value.code or 0), printed.out, printed.err


def test_command_line(spelling: LM, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("dspark_jax.api.load", lambda *_, **__: spelling)
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"kind": "x", "prompt": "abc"}\n\n{"kind": "y", "prompt": "d"}\n')
    code, out, err = run(monkeypatch, capsys, "--prompts", str(path), "--max-tokens", "26", "--json")
    assert code == 0 and err == ""
    found = json.loads(out)
    assert [r["kind"] for r in found["results"]] == ["x", "y", "all"] and found["max_tokens"] == 26
    last = found["results"][-1]
    assert last["with_head"]["tau"] == GAMMA + 1 and last["identical"] == 2 and last["differences"] == []
    code, out, _ = run(monkeypatch, capsys, "--prompts", str(path), "--max-tokens", "26", "--kind", "y")
    assert code == 0 and "all (1)" in out and "5.00" in out and "1/1" in out


def test_differences_are_printed(spelling: LM, monkeypatch, capsys, tmp_path):
    whole = spelling.generate

    def crooked(prompts, params, speculate):
        results = whole(prompts, params, speculate=speculate)
        return [dataclasses.replace(r, tokens=(5, *r.tokens[1:])) for r in results] if speculate else results

    monkeypatch.setattr(spelling, "generate", crooked)
    monkeypatch.setattr("dspark_jax.api.load", lambda *_, **__: spelling)
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "abc"}')
    code, out, _ = run(monkeypatch, capsys, "--prompts", str(path), "--max-tokens", "6")
    assert code == 0 and "0/1" in out
    assert "prompt 0 differs from token 1 on: NOT EXCUSED (margins: logit 2.0e+01, router inf, indexer inf)" in out


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ('{"prompt": "a"}\nnonsense\n{"prompt": 3}\n[1]', ["line 2 is not JSON", "line 3: the prompt is 3", "line 4 has no"]),
        ('{"prompt": "a", "kind": 3}', ["line 1: kind is 3"]),
        ('{"prompt": "a", "kind": "code"}', ["no prompt of kind 'prose' (there are: code)"]),
        ("", ["holds no prompt; expected at least one"]),
        (None, ["cannot be read: No such file"]),
    ],
)
def test_bad_prompt_files(monkeypatch, capsys, tmp_path, text, messages):
    path = tmp_path / "prompts.jsonl"
    if text is not None:
        path.write_text(text)
    code, out, err = run(monkeypatch, capsys, "--prompts", str(path), "--kind", "prose")
    assert code == 2 and out == "" and "Traceback" not in err and str(path) in err
    assert all(message in err for message in messages)


def test_a_model_without_a_drafter_is_refused():
    plain = lookup_lm(chain({}), None)
    with pytest.raises(RequestError, match="no drafter"):
        evaluate(plain, [EvalPrompt("a")], SamplingParams())
    with pytest.raises(RequestError, match="batch is 0"):
        evaluate(lookup_lm(alphabet(), agreeing(alphabet())), [EvalPrompt("a")], SamplingParams(), batch=0)
