"""Dense targets against transformers (fp32), and what a round relies on: chunks, rejections, padding, NaN elsewhere."""

import functools
import json
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dspark_jax import LM, SamplingParams, cli
from dspark_jax.decode.rows import compact_rows, padded_rows
from dspark_jax.errors import ConfigError
from dspark_jax.models.qwen3 import Keys, KeyValueCache, Qwen3, grouped_attention
from dspark_jax.near_tie import margins
from dspark_jax.parallel.mesh import make_mesh
from dspark_jax.serve.engine import Engine
from helpers.dense import FAMILIES, dense, letters, loaded
from helpers.runner import scaled_error

LIMIT, SLOTS, WIDTH, MAX_LEN = 1e-4, 3, 9, 64


class Runner:
    """A model whose taps are its first two layers, `SLOTS` slots of up to MAX_LEN positions."""

    def __init__(self, name: str, folder):
        self.found = loaded(name, folder)
        model = nnx.merge(self.found.graph, self.found.params)
        model.target.taps = (0, 1)
        graph, self.params = nnx.split(model.target)
        self.embedding = model.target.model.embed_tokens.weight[...]

        @functools.partial(jax.jit, static_argnames="packed")
        def forward(params, token, start, count, cache, packed: int | None):
            target: Qwen3 = nnx.merge(graph, params)
            rows = compact_rows(token, start, count, packed) if packed else padded_rows(token, start, count)
            hidden, taps, cache = target.forward(rows, cache)
            return rows.to_lanes(target.logits(hidden)), rows.to_lanes(taps), cache

        self.forward = forward
        self.cache = model.target.init_cache(SLOTS, MAX_LEN, WIDTH)

    def feed(self, parts, start, cache, width: int = WIDTH, packed: int | None = None, params=None):
        """Logits and taps [SLOTS, width, …] of a tick with `parts[r]` at `start[r]`, and the new state."""
        token = np.zeros((SLOTS, width), np.int32)
        for r, part in enumerate(parts):
            token[r, : len(part)] = part
        count = np.array([len(part) for part in parts], np.int32)
        params = self.params if params is None else params
        *found, cache = self.forward(params, token, np.array(start, np.int32), count, cache, packed)
        return (*map(np.asarray, found), cache)

    def read(self, text: list[int], sizes, cache, slot: int = 0):
        """All logits and taps of a text in chunks of the given sizes, in turn; other slots read other tokens."""
        at, logits, taps = 0, [], []
        while at < len(text):
            part = text[at : at + sizes[len(logits) % len(sizes)]]
            parts = [[5, 6, 7][: 1 + len(logits) % 3] if r == 2 else [] for r in range(SLOTS)]
            parts[slot] = part
            starts = [0] * SLOTS
            starts[slot] = at
            one, two, cache = self.feed(parts, starts, cache)
            logits.append(one[slot, : len(part)])
            taps.append(two[slot, : len(part)])
            at += len(part)
        return np.concatenate(logits), np.concatenate(taps), cache


@pytest.fixture(scope="module", params=FAMILIES)
def case(request, tmp_path_factory):
    name = request.param
    return dense(name), Runner(name, tmp_path_factory.mktemp(name))


def check(golden, logits, taps) -> None:
    assert scaled_error(logits, golden.arrays["logits"]) <= LIMIT
    assert scaled_error(taps, np.concatenate([golden.arrays["layer_0"], golden.arrays["layer_1"]], axis=1)) <= LIMIT


def test_whole_and_in_chunks(case):
    golden, runner = case
    size = len(golden.text)
    logits, taps, _ = runner.feed([golden.text, [], []], [0, 0, 0], runner.cache, width=size)
    check(golden, logits[0], taps[0])
    for slot, sizes in ((0, (WIDTH,)), (1, (1, 4, 7, 2))):
        chunked, chunked_taps, _ = runner.read(golden.text, sizes, runner.cache, slot)
        check(golden, chunked, chunked_taps)
        assert scaled_error(chunked, logits[0]) <= 1e-5


def test_what_later_positions_other_slots_and_padding_hold_does_not_matter(case):
    """Rejected rows, an earlier request's rows, NaN: the same bits."""
    golden, runner = case
    text = golden.text[:30]
    *_, cache = runner.read(text[:20], (WIDTH,), runner.cache)
    clean = runner.feed([text[20:24], [], []], [20, 0, 0], cache)
    other = next(i for i in range(96) if i not in text)
    _, _, rejected = runner.feed([[other] * 7, [8] * 7, []], [20, 0, 0], cache)
    # The same with NaN for that token's vector, also at the beginning of the other slots.
    params = jax.tree.map(lambda x: x, runner.params)
    params["model"]["embed_tokens"]["weight"].set_value(runner.embedding.at[other].set(jnp.nan))
    *_, poisoned = runner.feed([[other] * 7] + [[other] * WIDTH] * 2, [20, 0, 0], cache, params=params)
    for state, beside in ((rejected, []), (poisoned, []), (poisoned, [5])):
        again = runner.feed([text[20:24], beside, []], [20, WIDTH, 0], state)
        for a, b in zip(clean[:2], again[:2], strict=True):
            np.testing.assert_array_equal(a[0, :4], b[0, :4])
        assert not beside or np.isnan(again[0][1, 0]).all()  # whose own context it is learns of it
    # An idle slot keeps nothing and disturbs nobody, and only the rows of the tick were written.
    before, after = jax.device_get((cache, clean[2]))
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        changed = (old != new).any(axis=(1, 3))[:, :-1]
        assert changed[0, 20:24].all() and changed.sum() == 4


def test_a_value_that_is_not_finite_spoils_only_those_that_see_it():
    rows = padded_rows(jnp.zeros((2, 2), jnp.int32), jnp.array([0, 0]), jnp.array([2, 1]))
    key = value = jnp.ones((2, 2, 1, 4))
    cache = KeyValueCache(*[jnp.zeros((2, 1, 4, 4))] * 2).write(key, value.at[0, 1, 0, 2].set(jnp.inf), rows)
    np.testing.assert_array_equal(cache.value[0, 0, :3, 0], [1, 0, 0])
    np.testing.assert_array_equal(cache.key[0, 0, :3, 0], [1, np.nan, 0])
    np.testing.assert_array_equal(cache.key[1, 0, :3, 0], [1, 0, 0])  # its second row is not valid
    visible = jnp.array([[[True, False, False, False], [True, True, False, False]]] * 2).at[1, 1].set(False)
    out = grouped_attention(jnp.ones((2, 2, 2, 4)), Keys(cache.key, cache.value, visible))
    np.testing.assert_array_equal(out[0, :, :, 0], [[1, 1], [np.nan, np.nan]])
    np.testing.assert_array_equal(out[1, :, :, 0], [[1, 1], [0, 0]])  # a query that sees nothing


def test_packed_rows(case):
    golden, runner = case
    parts = [golden.text[:5], [7, 8], golden.text[:3]]
    padded = runner.feed(parts, [0, 0, 0], runner.cache)
    packed = runner.feed(parts, [0, 0, 0], runner.cache, packed=12)
    for r, part in enumerate(parts):
        for a, b in zip(padded[:2], packed[:2], strict=True):
            assert scaled_error(a[r, : len(part)], b[r, : len(part)]) <= 1e-5


@pytest.fixture(scope="module")
def lm(case) -> LM:
    found = case[1].found
    config = replace(found.config, max_position_embeddings=MAX_LEN)
    return LM(config, None, found.graph, found.params, letters(), chunk=8)


def test_greedy_text(case, lm: LM):
    """The prompt takes three chunks; its neighbour is shorter, and the answer is what either gets alone."""
    golden = case[0]
    params = SamplingParams(max_tokens=len(golden.answer))
    first, second = lm.generate([golden.prompt, golden.prompt[:4]], params, ignore_eos=True)
    assert list(first.tokens) == golden.answer
    assert first.rounds == len(golden.answer) - 1 and not any(first.drafted)
    assert lm.generate([golden.prompt[:4], golden.prompt], params, ignore_eos=True)[0].tokens == second.tokens


def test_a_text_begins_with_a_token_only_where_the_tokenizer_adds_one_and_any_end_token_ends_it(case, lm: LM):
    golden, config = case[0], lm.config
    assert config.bos_token_id is None and lm.encode("ab") == [65, 66]
    found = case[1].found
    ends = golden.answer[3], 95
    other = LM(replace(lm.config, bos_token_id=1, eos_token_ids=ends), None, found.graph, found.params, letters(), chunk=8)
    other._decoders = lm._decoders  # the same programs
    assert other.encode("ab") == [1, 65, 66]
    (answer,) = other.generate([golden.prompt, golden.prompt[:4]], SamplingParams(max_tokens=40))[:1]
    assert list(answer.tokens) == golden.answer[: golden.answer.index(ends[0]) + 1] and answer.finish_reason == "stop"


@pytest.mark.long
def test_margins_and_a_mesh_of_two(case, lm: LM):
    golden, found = case[0], case[1].found
    best = np.sort(golden.arrays["logits"][len(golden.prompt) - 1])[::-1]
    assert abs(margins(lm, golden.prompt).logit - (best[0] - best[1])) < 1e-4
    pair = LM(lm.config, None, found.graph, found.params, letters(), chunk=8, mesh=make_mesh(1, 2))
    params = SamplingParams(max_tokens=len(golden.answer))
    answers = pair.generate([golden.prompt, golden.prompt[:4]], params, ignore_eos=True)
    assert list(answers[0].tokens) == golden.answer


@pytest.mark.long
def test_command_line(case, lm: LM, tmp_path, monkeypatch, capsys):
    folder = case[0].write(tmp_path / "model", letters())
    (answer,) = lm.generate(["abc"], SamplingParams(max_tokens=9))
    arguments = ["generate", "--model", str(folder), "--prompt", "abc", "--max-tokens", "9", "--json"]
    monkeypatch.setattr(sys, "argv", ["dspark-jax", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    found = json.loads(capsys.readouterr().out)
    assert not end.value.code and tuple(found["token_ids"]) == answer.tokens and found["text"] == answer.text


def test_what_needs_experts_says_so(case, lm: LM, tmp_path):
    with pytest.raises(ConfigError, match=r"engine: the LM is a dense model, which has no experts"):
        Engine(lm, placement={})
    with pytest.raises(ConfigError, match=r"is a dense model, which has no experts"):
        Engine(case[0].write(tmp_path / "model", letters()), placement={})
