"""The hyper-connection kernels against the reference: interpreted on CPU, compiled on a GPU; and lowered for CUDA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_kernels import hyper_connection as hc
from dspark_kernels.hyper_connection import reference
from dspark_kernels.hyper_connection.triton import mix_blocks
from helpers.cuda import count_kernels, lower_for_cuda

KERNEL = "triton" if jax.default_backend() == "gpu" else "interpret"
OPTIONS = {"iters": 20, "eps": 1e-6, "norm_eps": 1e-6}
ALWAYS = [(17, 4, 384, "bfloat16"), (5, 2, 256, "float32"), (3, 4, 224, "bfloat16")]
SHAPES = [*ALWAYS, pytest.param((1, 4, 128, "float32"), marks=pytest.mark.long)]  # the gradients' test has four fp32 streams


def inputs(rows: int, n: int, width: int, dtype: str = "float32") -> tuple[jax.Array, ...]:
    """Streams, fn, base, scale; streams of uneven size, so that one statistic over all of them shows."""
    rng = np.random.default_rng(rows)
    streams = rng.normal(size=(rows, n, width)) * (1 + np.arange(n))[:, None]
    columns = (2 + n) * n
    arrays = (rng.normal(0, 0.1, (n * width, columns)), rng.normal(size=columns), [0.7, 1.3, 0.9])
    return jnp.asarray(streams, dtype), *(jnp.asarray(a, jnp.float32) for a in arrays)


def close(got, expected) -> None:
    """To fp32 rounding; bf16 to one of its steps."""
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        wide = np.asarray(b, np.float32)
        tolerance = {"rtol": 2**-7, "atol": 2**-9} if b.dtype == jnp.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
        np.testing.assert_allclose(np.asarray(a, np.float32), wide, **tolerance)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
class TestKernels:
    def test_pre(self, shape):
        arguments = inputs(*shape)
        run = jax.jit(functools.partial(hc.pre, **OPTIONS), static_argnames="implementation")
        x, post, comb = run(*arguments, implementation=KERNEL)
        expected = run(*arguments, implementation="reference")
        close((x, post, comb), expected)
        # The sums are full fp32 products: far closer than bf16 or TF32 products would come.
        np.testing.assert_allclose(comb, expected[2], rtol=2e-5, atol=2e-6)
        np.testing.assert_allclose(post, expected[1], rtol=2e-5, atol=2e-6)

    def test_expand(self, shape):
        streams, *weights = inputs(*shape)
        arguments = (streams, *jax.jit(functools.partial(reference.pre, **OPTIONS))(streams, *weights))
        run = jax.jit(hc.expand, static_argnames="implementation")
        close([run(*arguments, implementation=KERNEL)], [run(*arguments, implementation="reference")])


def test_collapse_in_front_of_the_head():
    streams, fn, base, scale = inputs(7, 4, 256)
    run = jax.jit(functools.partial(hc.collapse_head, eps=1e-6, norm_eps=1e-6), static_argnames="implementation")
    arguments = (streams, fn[:, :4], base[:4], scale[:1])
    close([run(*arguments, implementation=KERNEL)], [run(*arguments, implementation="reference")])


@pytest.mark.long
def test_gradients_are_the_references():
    arguments = inputs(3, 4, 128)

    def loss(arguments, implementation):
        streams = arguments[0]
        x, post, comb = hc.pre(*arguments, **OPTIONS, implementation=implementation)
        return jnp.sum(jnp.sin(hc.expand(streams, x, post, comb, implementation=implementation)))

    grad = jax.jit(jax.grad(loss), static_argnums=1)
    for a, b in zip(grad(arguments, KERNEL), grad(arguments, "reference"), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4 * np.abs(b).max())


@pytest.mark.parametrize(("rows", "width"), [(6, 4096), (48, 4096), (512, 4096), (6, 224)])
def test_lowers_for_cuda_without_a_gpu(rows, width):
    _, parts = mix_blocks(rows, 4 * width)
    assert (4 * width) % (parts * 128) == 0
    arguments = [jax.ShapeDtypeStruct((rows, 4, width), "bfloat16")]
    arguments += [jax.ShapeDtypeStruct(shape, "float32") for shape in ((4 * width, 24), (24,), (3,))]
    pre = functools.partial(hc.pre, **OPTIONS)
    assert count_kernels(lower_for_cuda(functools.partial(pre, implementation="triton"), *arguments)) == 2
    expand = (arguments[0], *jax.eval_shape(pre, *arguments))
    assert count_kernels(lower_for_cuda(functools.partial(hc.expand, implementation="triton"), *expand)) == 1


def test_cpu_runs_the_reference_and_cuda_the_kernel(monkeypatch):
    arguments = inputs(3, 4, 128)
    pre = functools.partial(hc.pre, **OPTIONS)
    assert KERNEL == "triton" or "triton" not in jax.jit(pre).lower(*arguments).as_text()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert count_kernels(lower_for_cuda(pre, *arguments)) == 2
    assert not count_kernels(lower_for_cuda(pre, *inputs(3, 4, 130)))  # 520 is no multiple of 128: the reference


def test_what_the_kernel_cannot_take_is_refused():
    with pytest.raises(ValueError, match="3 streams of width 128"):
        hc.pre(*inputs(2, 3, 128), **OPTIONS, implementation="triton")
    with pytest.raises(ValueError, match="4 streams of width 100"):
        hc.pre(*inputs(2, 4, 100), **OPTIONS, implementation="triton")
