"""Text from the target: prompts, continuations that equal step-by-step decoding, and the stream made of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dspark_jax.errors import ConfigError
from dspark_jax.train.regenerate import documents, regenerate, save_tokens, temperatures
from dspark_jax.train.rollout import Continuations, Prompts, PromptSource, Rollout, distinct_ngrams, join
from dspark_jax.train.target import trainable
from helpers.micro import MICRO, micro_model

BOS, EOS = 0, 1
SLOTS, PROMPT, NEW = 8, 5, 16
RNG = np.random.default_rng(0)
# Documents of 1 to 30 tokens: bos, 2.., eos.
STREAM = np.concatenate([[BOS, *RNG.integers(2, 5, n), EOS] for n in RNG.integers(1, 31, 60)]).astype(np.uint16)
SOURCE = PromptSource(STREAM, 3, PROMPT, BOS, seed=1)


def fits(stream: np.ndarray, prompt: np.ndarray) -> list[int]:
    """Places of the stream where the prompt behind its bos begins."""
    tail = len(prompt) - 1
    windows = np.lib.stride_tricks.sliding_window_view(stream, tail)
    return np.flatnonzero((windows == prompt[1:]).all(axis=1)).tolist()


def test_prompts_come_out_of_documents():
    prompts = SOURCE.draw(200, 0)
    assert prompts.token.shape == (200, PROMPT) and prompts.token.dtype == prompts.length.dtype == np.int32
    assert set(prompts.length.tolist()) == {3, 4, 5}
    for token, length in zip(prompts.token, prompts.length, strict=True):
        prompt = token[:length]
        assert prompt[0] == BOS and not np.isin(prompt[1:], [BOS, EOS]).any() and not token[length:].any()
        assert fits(STREAM, prompt)


def test_half_of_the_prompts_begin_a_document():
    long = np.concatenate([[BOS, 2, 2, 2, *RNG.integers(3, 5, 300), EOS]] * 8)
    prompts = PromptSource(long, 4, 4, BOS, seed=0).draw(2000, 3)
    share = (prompts.token[:, 1:] == 2).all(axis=1).mean()
    assert 0.45 < share < 0.56


def test_prompts_are_a_function_of_seed_and_index():
    first = SOURCE.draw(20, 4)
    for a, b in zip(first, PromptSource(STREAM, 3, PROMPT, BOS, seed=1).draw(20, 4), strict=True):
        np.testing.assert_array_equal(a, b)
    assert (first.token != SOURCE.draw(20, 5).token).any()
    assert (first.token != PromptSource(STREAM, 3, PROMPT, BOS, seed=2).draw(20, 4).token).any()


def test_short_documents_give_no_prompts():
    stream = np.array([BOS, 2, EOS, BOS, 3, 3, 3, EOS, BOS, 2, 2, EOS])
    prompts = PromptSource(stream, 4, 6, BOS, seed=0).draw(50, 0)
    assert (prompts.length == 4).all() and (prompts.token[:, :4] == [BOS, 3, 3, 3]).all()
    with pytest.raises(ConfigError, match="no document of the stream has 5 tokens"):
        PromptSource(stream, 5, 6, BOS, seed=0)
    with pytest.raises(ConfigError, match="low = 4, high = 3; expected 2 <= low <= high"):
        PromptSource(stream, 4, 3, BOS, seed=0)


@pytest.fixture(scope="module")
def target():
    return nnx.split(micro_model(seed=1).target, trainable, ...)


@pytest.fixture(scope="module")
def rollout(target) -> Rollout:
    return Rollout(target[0], SLOTS, PROMPT, NEW, EOS)


@pytest.fixture(scope="module")
def greedy(target, rollout) -> tuple[Prompts, Continuations]:
    prompts = SOURCE.draw(SLOTS, 0)
    new = rollout(target[1:], prompts, np.zeros(SLOTS), np.zeros(SLOTS))
    return prompts, jax.device_get(new)


@pytest.mark.long
def test_greedy_continuations_are_the_argmax_of_whole_sequences(target, greedy):
    prompts, new = greedy
    graph, *states = target
    text = np.asarray(join(prompts.token, prompts.length, new))

    @jax.jit
    def predictions(states, text):
        model = nnx.merge(graph, *states)
        return jnp.argmax(model.logits(model.sequence(text).hidden), axis=-1)

    best = np.asarray(predictions(states, text[:, :-1]))
    assert set(new.count.tolist()) != {NEW}  # some end early, so that the padding is seen too
    for row in range(SLOTS):
        start, count = prompts.length[row], new.count[row]
        np.testing.assert_array_equal(text[row, start : start + count], best[row, start - 1 : start + count - 1])


@pytest.mark.long
def test_continuations_end_with_eos_or_at_the_limit(greedy):
    _, new = greedy
    for token, count in zip(new.token, new.count, strict=True):
        assert EOS not in token[: count - 1]
        assert token[count - 1] == EOS or count == NEW


@pytest.mark.long
def test_sampled_continuations_depend_on_the_seed_alone(target, rollout, greedy):
    prompts, plain = greedy
    hot = np.full(SLOTS, 1.0)
    first = jax.device_get(rollout(target[1:], prompts, hot, np.arange(SLOTS)))
    again = jax.device_get(rollout(target[1:], prompts, hot, np.arange(SLOTS)))
    other = jax.device_get(rollout(target[1:], prompts, hot, np.arange(SLOTS) + 100))
    np.testing.assert_array_equal(first.token, again.token)
    assert (first.token != other.token).any() and (first.token != plain.token).any()
    # A greedy slot beside sampled ones stays greedy.
    mixed = jax.device_get(rollout(target[1:], prompts, hot * (np.arange(SLOTS) > 0), np.arange(SLOTS)))
    np.testing.assert_array_equal(mixed.token[0], plain.token[0])


def test_join_puts_the_continuation_behind_the_prompt():
    prompt = np.array([[7, 8, 0, 0], [5, 6, 7, 8]], np.int32)
    new = Continuations(jnp.array([[1, 2, 3], [4, 9, 9]]), jnp.array([3, 1]))
    joined = join(prompt, np.array([2, 4]), new)
    assert joined.tolist() == [[7, 8, 1, 2, 3, 0, 0, 0], [5, 6, 7, 8, 4, 0, 0, 0]]


def test_distinct_ngrams_counts_real_tokens_of_all_texts():
    token = np.array([[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 9, 9], [3, 3, 3, 3, 3, 3]])
    assert distinct_ngrams(Continuations(token, np.array([6, 4, 0]))) == 3 / 4  # 1234 occurs twice
    assert distinct_ngrams(Continuations(token, np.array([0, 0, 6]))) == 1 / 3
    assert distinct_ngrams(Continuations(token, np.array([6, 6, 6])), texts=1) == 1
    assert distinct_ngrams(Continuations(token, np.array([0, 0, 6])), n=1, tokens=2) == 1 / 2


def test_rollout_faults(target, rollout):
    with pytest.raises(ConfigError, match="2 faults\n  - slots is 0; expected at least 1\n  - new is 1; expected at"):
        Rollout(target[0], 0, 4, 1, EOS)
    with pytest.raises(ConfigError, match=r"prompts have shape \(3, 5\); expected \(8, 5\)"):
        rollout(target[1:], SOURCE.draw(3, 0), np.zeros(3), np.zeros(3))


def test_documents_drop_the_padding():
    prompts = Prompts(np.array([[0, 7, 0], [0, 8, 9]]), np.array([2, 3]))
    new = Continuations(np.array([[5, 1, 3], [6, 6, 6]]), np.array([2, 3]))
    stream = documents(prompts, new)
    assert stream.dtype == np.uint16 and stream.tolist() == [0, 7, 5, 1, 0, 8, 9, 6, 6, 6]


def test_temperatures_come_in_equal_shares():
    values, counts = np.unique(temperatures(12, (0.0, 0.6, 1.0)), return_counts=True)
    np.testing.assert_allclose(values, [0, 0.6, 1.0], rtol=1e-6)
    assert counts.tolist() == [4, 4, 4] and temperatures(12).dtype == np.float32


@pytest.mark.long
def test_regenerated_text_is_the_target_s_own(target, rollout):
    totals: list[int] = []
    own = regenerate(rollout, target[1:], SOURCE, 300, values=(0.0,), report=totals.append)
    assert own.dtype == np.uint16 and len(own) >= 300 and totals == sorted(totals)
    np.testing.assert_array_equal(own, regenerate(rollout, target[1:], SOURCE, 300, values=(0.0,)))
    # Greedy continuations of the source's prompts, with the batch that was drawn while the last one was packed.
    prompts = [SOURCE.draw(SLOTS, i) for i in range(len(totals) + 1)]
    zeros = np.zeros(SLOTS)
    parts = [documents(p, jax.device_get(rollout(target[1:], p, zeros, zeros))) for p in prompts]
    np.testing.assert_array_equal(own, np.concatenate(parts))
    assert totals == np.cumsum([len(part) for part in parts[:-1]]).tolist() and totals[-1] >= 300
    hot = regenerate(rollout, target[1:], SOURCE, 300, values=(1.0,))
    assert len(hot) != len(own) or (hot != own).any()


def test_regenerate_faults(target, rollout):
    with pytest.raises(ConfigError, match="tokens is 0; expected at least 1"):
        regenerate(rollout, target[1:], SOURCE, 0)
    for values in ((), (-1.0,)):
        with pytest.raises(ConfigError, match="temperatures are"):
            regenerate(rollout, target[1:], SOURCE, 10, values=values)


def test_a_saved_stream_is_whole_or_absent(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "own.npy"
    save_tokens(path, np.arange(5, dtype=np.uint16))
    np.testing.assert_array_equal(np.load(path), np.arange(5))
    assert [p.name for p in path.parent.iterdir()] == ["own.npy"]

    def torn(file, array):
        file.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(np, "save", torn)
    with pytest.raises(OSError, match="disk full"):
        save_tokens(path, np.arange(9, dtype=np.uint16))
    np.testing.assert_array_equal(np.load(path), np.arange(5))


def test_the_micro_target_is_the_one_that_serves():
    assert MICRO.bos_token_id == BOS and MICRO.eos_token_id == EOS
