"""Batches: a function of (seed, step), every token of an epoch once, streams mixed in fixed shares."""

import numpy as np
import pytest

from dspark_jax.errors import ConfigError
from dspark_jax.train.data import MixedStream, TokenStream, load_tokens, mix

LENGTH, BATCH = 7, 3


def stream(seed: int = 0, count: int = 200) -> TokenStream:
    return TokenStream(np.arange(count, dtype=np.uint16), LENGTH, BATCH, seed)


def test_batches_are_cuts_of_the_stream():
    for step in range(20):
        batch = stream().at(step)
        assert batch.shape == (BATCH, LENGTH + 1) and batch.dtype == np.int32
        assert (np.diff(batch, axis=1) == 1).all()


def test_an_epoch_visits_every_cut_once_in_a_new_order_and_offset():
    one = stream()
    epochs = []
    for epoch in range(3):
        steps = range(epoch * one.steps_per_epoch, (epoch + 1) * one.steps_per_epoch)
        starts = np.concatenate([one.at(step)[:, 0] for step in steps])
        assert len(set(starts.tolist())) == len(starts)  # no sequence twice
        assert len(set((starts % (LENGTH + 1)).tolist())) == 1  # cuts do not overlap
        epochs.append(starts)
        assert (np.diff(starts) < 0).any()  # not in the stream's own order
    assert len(epochs[0]) == one.steps_per_epoch * BATCH == 24
    places = [starts // (LENGTH + 1) for starts in epochs]
    assert (places[0] != places[1]).any() and (places[1] != places[2]).any()
    assert len({int(starts[0] % (LENGTH + 1)) for starts in epochs}) > 1


def test_a_step_needs_no_step_before_it():
    forward = [stream().at(step) for step in range(30)]
    shuffled = stream()
    for step in (29, 3, 17, 0, 29, 8):
        np.testing.assert_array_equal(shuffled.at(step), forward[step])
    np.testing.assert_array_equal(np.stack([b for b, _ in zip(stream(), range(30), strict=False)]), forward)
    assert any((stream(seed=1).at(step) != forward[step]).any() for step in range(8))


def test_too_few_tokens():
    least = (BATCH + 2) * (LENGTH + 1)
    stream(count=least).at(0)
    with pytest.raises(ConfigError, match=rf"{least - 1} tokens are fewer than one batch of 3 × 8"):
        stream(count=least - 1)


def test_a_mixed_stream_keeps_its_shares_in_every_batch():
    first, second = np.arange(300), 1000 + np.arange(300)
    mixed = mix(first, second, 0.3, LENGTH, 10, seed=4)
    assert isinstance(mixed, MixedStream) and (mixed.length, mixed.batch, mixed.seed) == (LENGTH, 10, 4)
    for step in range(40):
        batch = mixed.at(step)
        assert batch.shape == (10, LENGTH + 1) and batch.dtype == np.int32
        assert ((batch >= 1000).all(axis=1) == (np.arange(10) >= 7)).all()
    np.testing.assert_array_equal(mixed.at(5)[:7], TokenStream(first, LENGTH, 7, 4).at(5))
    np.testing.assert_array_equal(mixed.at(5)[7:], TokenStream(second, LENGTH, 3, 4).at(5))


def test_streams_of_a_mix_have_epochs_of_their_own():
    """The short stream begins anew while the long one still is in its first epoch."""
    mixed = mix(np.arange(4000), 5000 + np.arange(60), 0.5, LENGTH, 4, seed=0)
    assert isinstance(mixed, MixedStream)
    short, long = mixed.second.steps_per_epoch, mixed.first.steps_per_epoch
    assert short == 3 and long > 100
    tail = np.stack([mixed.at(step)[2:] for step in range(2 * short)])
    assert (tail[:short] != tail[short:]).any()
    assert len(np.unique(np.concatenate([mixed.at(step)[:2, 0] for step in range(long)]))) == 2 * long


def test_shares_zero_and_one_are_one_stream():
    first, second = np.arange(300), 1000 + np.arange(300)
    for share, whole in ((0.0, first), (0.01, first), (1.0, second)):
        single = mix(first, second, share, LENGTH, 10, seed=4)
        assert isinstance(single, TokenStream) and single.tokens is whole
    assert isinstance(mix(first, second[:0], 0.0, LENGTH, 10, seed=4), TokenStream)
    for share in (-0.1, 1.1, float("nan")):
        with pytest.raises(ConfigError, match="share is"):
            mix(first, second, share, LENGTH, 10, seed=4)
    with pytest.raises(ConfigError, match="lengths are 7 and 8"):
        MixedStream(TokenStream(first, 7, 2, 0), TokenStream(second, 8, 2, 0))


def test_token_files(tmp_path):
    np.save(tmp_path / "good.npy", np.arange(50, dtype=np.uint16))
    np.testing.assert_array_equal(load_tokens(tmp_path / "good.npy", 50), np.arange(50))
    with pytest.raises(ConfigError, match="token id 49; the model's vocabulary has 49"):
        load_tokens(tmp_path / "good.npy", 49)
    with pytest.raises(ConfigError, match=r"missing\.npy does not exist; build it with"):
        load_tokens(tmp_path / "missing.npy", 50)
    for name, array in (("float", np.ones(5)), ("matrix", np.ones((2, 2), np.int32))):
        np.save(tmp_path / f"{name}.npy", array)
        with pytest.raises(ConfigError, match="expected one axis of token ids"):
            load_tokens(tmp_path / f"{name}.npy", 50)
