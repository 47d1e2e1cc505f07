"""The draft head's kernels against the reference: interpreted on CPU, compiled on a GPU; and lowered for CUDA without one.

The weights are small integers and the base logits small fractions, so that sums are exact in any order: logits, and the choice
between equal ones, must be the same to the last bit.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_kernels import draft_head
from dspark_kernels.draft_head import triton
from helpers.cuda import count_kernels, lower_for_cuda

ON_GPU = jax.default_backend() == "gpu"
KERNEL = "triton" if ON_GPU else "interpret"
TEMPERATURES = (0.0, 1.0, 0.5, 4.0, 2.0**-100)  # whose quotients are exact


class Case(NamedTuple):
    """Sizes; blocks None are those of `triton.sizes`."""

    rows: int
    gamma: int
    vocab: int
    rank: int
    dtype: str = "bfloat16"
    blocks: triton.Sizes | None = None


CASES = [
    Case(1, 2, 257, 32),
    Case(5, 3, 100, 16, "float32"),  # a single tile
    Case(5, 3, 331, 48, blocks=triton.Sizes(16, 16, 4, 2, 32)),
    Case(67, 2, 160, 32, blocks=triton.Sizes(64, 32, 4, 2, 64, turn=False)),  # two blocks of rows
]


def inputs(case: Case) -> dict:
    """Arguments of `draft`: logits with many ties in the even rows, and some that bf16 rounds in the odd ones."""
    rng = np.random.default_rng(case.vocab)
    whole = lambda low, high, shape: rng.integers(low, high, shape).astype(np.float32)  # noqa: E731
    r, gamma, v = case[:3]
    base = whole(-2, 3, (r, gamma, v))
    base[1::2] += whole(-1024, 1025, (r // 2, gamma, v)) / 512
    return {
        "base": jnp.asarray(base),
        "anchor": jnp.asarray(rng.integers(0, v, r), jnp.int32),
        "w1": jnp.asarray(whole(-2, 3, (v, case.rank)), case.dtype),
        "w2": jnp.asarray(whole(-2, 3, (case.rank, v)), case.dtype),
        "temperature": jnp.asarray(np.resize(TEMPERATURES, r), jnp.float32),
        "noise": [jnp.asarray(rng.gumbel(size=(r, v)), jnp.float32) for _ in range(gamma)],
    }


GREEDY = {"temperature": None, "noise": None}


@functools.cache
def program(blocks: triton.Sizes | None):
    """The operation by implementation; `blocks` other than the default are the kernels' alone."""

    def run(arguments, implementation):
        if blocks is not None and implementation != "reference":
            return triton.draft(**arguments, blocks=blocks, interpret=implementation == "interpret")
        return draft_head.draft(**arguments, implementation=implementation)

    return jax.jit(run, static_argnums=1)


def both(case: Case, arguments: dict):
    """Of kernel and reference: tokens and logits, in numpy, fp32."""
    runs = (program(case.blocks)(arguments, name) for name in (KERNEL, "reference"))
    return [(np.asarray(tokens), np.asarray(logits, np.float32)) for tokens, logits in runs]


@pytest.mark.parametrize("case", CASES, ids=str)
class TestKernels:
    def test_drawn_with_noise(self, case):
        arguments = inputs(case)
        (tokens, logits), expected = both(case, arguments)
        np.testing.assert_array_equal(logits, expected[1])
        np.testing.assert_array_equal(tokens, expected[0])
        # What makes speculative sampling exact: the choice is made from the logits that are kept.
        noise = np.stack(arguments["noise"], axis=1)
        np.testing.assert_array_equal(tokens, (logits + noise).argmax(-1))

    def test_greedy(self, case):
        (tokens, logits), expected = both(case, inputs(case) | GREEDY)
        np.testing.assert_array_equal(tokens, expected[0])
        np.testing.assert_array_equal(logits, expected[1])


def test_ties_go_to_the_lowest_id():
    case = CASES[2]
    arguments = inputs(case)
    arguments["w1"] = jnp.zeros_like(arguments["w1"])
    base = np.zeros((5, 3, 331), np.float32)
    base[1, :, [40, 41, 300]] = 5  # within a tile, and in another one
    base[2] = -np.inf
    arguments["base"] = jnp.asarray(base)
    lowest = [[0] * 3, [40] * 3, *[[0] * 3] * 3]
    assert both(case, arguments | GREEDY)[0][0].tolist() == lowest
    even = {"temperature": jnp.ones(5), "noise": [jnp.zeros((5, 331))] * 3}
    (tokens, logits), expected = both(case, arguments | even)
    assert tokens.tolist() == lowest
    np.testing.assert_array_equal(logits, expected[1])


def test_noise_is_added_to_the_rounded_logits():
    """-299.4 and -300 are equal in bf16, so that the least noise decides between them."""
    arguments = inputs(CASES[2])
    base, noise = np.full((5, 3, 331), -1e4, np.float32), np.full((5, 331), -1e6, np.float32)
    base[..., 200], base[..., 40], base[..., 300] = 0, -300, -299.4
    noise[:, 40], noise[:, 300] = 0.1, 0
    arguments |= {"base": jnp.asarray(base), "noise": [jnp.asarray(noise)] * 3, "temperature": jnp.ones(5)}
    arguments["w1"] = jnp.zeros_like(arguments["w1"])
    (tokens, logits), _ = both(CASES[2], arguments)
    assert (tokens == 40).all() and (logits[..., 300] == logits[..., 40]).all()


def test_a_row_of_nan_gets_a_token_and_changes_no_other():
    case = CASES[2]
    clean = inputs(case)
    spoilt = clean | {"base": clean["base"].at[1, 1, 7:].set(jnp.nan), "anchor": clean["anchor"].at[3].set(2**31 - 1)}
    others = [0, 2, 4]
    for mode in ({}, GREEDY):
        (tokens, logits), _ = both(case, spoilt | mode)
        (expected, expected_logits), _ = both(case, clean | mode)
        np.testing.assert_array_equal(tokens[others], expected[others])
        np.testing.assert_array_equal(logits[others], expected_logits[others])
        assert (tokens >= 0).all() and (tokens < case.vocab).all()


def test_other_temperatures_to_one_step_of_bf16():
    """A device's division may round in another way."""
    case = CASES[2]
    arguments = inputs(case) | {"temperature": jnp.asarray([0.7, 1.3, 0.05, 3.0, 0.9])}
    (tokens, logits), _ = both(case, arguments)
    noise = np.stack(arguments["noise"], axis=1)
    np.testing.assert_array_equal(tokens, (logits + noise).argmax(-1))
    w1, w2 = (np.asarray(arguments[name], np.float32) for name in ("w1", "w2"))
    raw = arguments["base"][:, 0] + w1[arguments["anchor"]] @ w2
    scaled = (raw - raw.max(-1, keepdims=True)) / arguments["temperature"][:, None]
    np.testing.assert_allclose(logits[:, 0], scaled, rtol=2**-8)


def shapes(rows: int, gamma: int, rank: int = 256, vocab: int = 129280, dtype: str = "bfloat16") -> dict:
    shape = jax.ShapeDtypeStruct
    return {
        "base": shape((rows, gamma, vocab), "float32"),
        "anchor": shape((rows,), "int32"),
        "w1": shape((vocab, rank), dtype),
        "w2": shape((rank, vocab), dtype),
        "temperature": shape((rows,), "float32"),
        "noise": [shape((rows, vocab), "float32")] * gamma,
    }


def kernels(arguments: dict, implementation=None) -> int:
    return count_kernels(lower_for_cuda(lambda a: draft_head.draft(**a, implementation=implementation), arguments))


@pytest.mark.parametrize(("rows", "gamma"), [(1, 3), (8, 2), (64, 2), (100, 2)])
def test_lowers_for_cuda_without_a_gpu_two_launches_a_draft(rows, gamma):
    assert kernels(shapes(rows, gamma), "triton") == 2 * gamma
    assert kernels(shapes(rows, gamma) | GREEDY, "triton") == 2 * gamma


def test_an_odd_vocabulary_and_fp32_lower_too():
    assert kernels(shapes(3, 2, rank=48, vocab=131, dtype="float32"), "triton") == 4
    assert kernels(shapes(3, 2, rank=16, vocab=100), "triton") == 4  # a single tile


def test_cpu_runs_the_reference_and_cuda_the_kernel(monkeypatch):
    assert ON_GPU or not kernels(shapes(2, 2, vocab=300))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert kernels(shapes(2, 2, vocab=300)) == 4
    assert not kernels(shapes(2, 2, vocab=300, rank=24))


def test_what_the_kernel_cannot_take_is_refused():
    with pytest.raises(ValueError, match=r"rank 24 \(expected a multiple of 16\)"):
        kernels(shapes(2, 2, rank=24), "triton")
    with pytest.raises(ValueError, match="W1 is bfloat16 and W2 float32"):
        kernels(shapes(2, 2) | {"w2": shapes(2, 2, dtype="float32")["w2"]}, "interpret")
    with pytest.raises(ValueError, match="2500 rows of 7 x 129280 logits"):
        kernels(shapes(2500, 7), "triton")
