"""Linear maps with fp8 codes: interpreted on CPU, compiled on a GPU, against the reference; lowered for CUDA without one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_kernels.block_linear import block_linear, triton
from dspark_kernels.block_linear.bench import SHAPES, candidates
from dspark_kernels.block_linear.tuning import MOST_ROWS, TUNED, bucket, plan
from dspark_kernels.block_scaled import BlockScaled, widened
from dspark_kernels.expert_mlp.few_rows import Lanes
from dspark_kernels.expert_mlp.triton import Blocks
from dspark_kernels.formats import block_shapes
from dspark_kernels.lowerings import Implementation
from helpers.cuda import count_kernels, lower_for_cuda

ON_GPU = jax.default_backend() == "gpu"
KERNEL: Implementation = "triton" if ON_GPU else "interpret"


def weight(inputs: int, outputs: int, groups: int | None = None) -> BlockScaled:
    """Every finite code, scales that differ from block to block."""
    rng = np.random.default_rng(inputs + outputs)
    codes, scale = (shape if groups is None else (groups, *shape) for shape in block_shapes("fp8", inputs, outputs))
    raw = rng.integers(0, 256, codes).astype(np.uint8)
    raw = jnp.asarray(np.where(raw & 127 == 127, 0, raw))
    scales = jnp.asarray(rng.integers(112, 119, scale), jnp.uint8)
    return BlockScaled(jax.lax.bitcast_convert_type(raw, jnp.float8_e4m3fn), scales)


def rows(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(shape[0]).normal(size=shape), jnp.bfloat16)


def close(found, expected) -> None:
    """fp32 sums of the same products in another order."""
    expected = np.asarray(expected)
    assert expected.any()
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 * abs(expected).max())


class TestKernels:
    @pytest.mark.parametrize(("shape", "groups", "wide"), [
        ((1, 256), None, False), ((6, 2, 128), 2, True), ((2, 5, 512), None, True), ((21, 256), None, False),
    ])  # fmt: skip
    def test_against_the_reference(self, shape, groups, wide):
        x, w = rows(*shape), weight(shape[-1], 384, groups)
        run = jax.jit(lambda x, w, i: block_linear(x, w, wide=wide, implementation=i), static_argnums=2)
        found, expected = run(x, w, KERNEL), run(x, w, "reference")
        assert found.shape == (*shape[:-1], 384)
        close(found, expected)

    @pytest.mark.parametrize("sizes", [
        triton.Plan(8, Lanes(16, 128), 2), triton.Plan(8, Lanes(8, 64), 4, direct=True),
        triton.Plan(16, Blocks(64, 64, 4, 2), 2),
    ], ids=str)  # fmt: skip
    def test_other_sizes(self, sizes):
        x, w = rows(11, 2, 256), weight(256, 256, 2)
        options = {"sizes": sizes, "interpret": not ON_GPU}
        run = jax.jit(lambda x, w, wide: triton.block_linear(x, w, wide=wide, **options), static_argnums=2)
        expected = block_linear(x, w, implementation="reference")
        close(run(x, w, False), expected)
        close(run(x, w, True), expected)

    def test_rows_beyond_fp16(self):
        x, w = rows(3, 256) * 2**20, weight(256, 128)
        close(block_linear(x, w, wide=True, implementation=KERNEL), block_linear(x, w, implementation="reference"))

    def test_gradients_are_the_references(self):
        x, w = rows(3, 256), weight(256, 128)
        loss = lambda x, i: jnp.sum(jnp.sin(block_linear(x, w, implementation=i) / 100))  # noqa: E731
        got, expected = (jax.jit(jax.grad(loss), static_argnums=1)(x, i).astype(jnp.float32) for i in (KERNEL, "reference"))
        assert jnp.any(expected != 0)
        np.testing.assert_allclose(got, expected, rtol=0, atol=2**-7 * abs(expected).max())

    def test_a_row_does_not_depend_on_others(self):
        x, w = rows(9, 256), weight(256, 128)
        run = jax.jit(lambda x: block_linear(x, w, implementation=KERNEL))
        np.testing.assert_array_equal(run(x)[2], run(x.at[3:].set(jnp.nan).at[0].set(jnp.inf))[2])


@pytest.mark.parametrize(("inputs", "outputs", "groups"), [(130, 258, None), (24, 40, 3), (256, 128, None)])
def test_the_reference_is_the_dense_product(inputs, outputs, groups):
    if groups is None:
        x, w = rows(5, inputs).astype(jnp.float32), weight(inputs, outputs)
        expected = np.asarray(x, np.float64) @ np.asarray(widened(w, jnp.float32), np.float64)
    else:
        x, w = rows(5, groups, inputs).astype(jnp.float32), weight(inputs, outputs, groups)
        expected = np.einsum("tgk,gkn->tgn", np.asarray(x, np.float64), np.asarray(widened(w, jnp.float32), np.float64))
    close(jax.jit(block_linear)(x, w), expected.astype(np.float32))


@pytest.mark.parametrize("tokens", [1, 8, 48])
def test_lowers_for_cuda_without_a_gpu(tokens):
    for groups, inputs, outputs in SHAPES.values():
        x = jax.ShapeDtypeStruct((tokens, groups, inputs), jnp.bfloat16)
        codes, scale = ((groups, *shape) for shape in block_shapes("fp8", inputs, outputs))
        w = BlockScaled(jax.ShapeDtypeStruct(codes, jnp.float8_e4m3fn), jax.ShapeDtypeStruct(scale, jnp.uint8))
        assert count_kernels(lower_for_cuda(lambda x, w: block_linear(x, w, implementation="triton"), x, w)) == 1


@pytest.mark.parametrize("direct", [False, True])
def test_other_ways_lower_for_cuda(direct):
    sizes = triton.Plan(16, Lanes(16, 128), 4, direct)
    for some in (sizes, sizes._replace(block_m=64)):
        run = lambda x, w, some=some: triton.block_linear(x, w, sizes=some, wide=direct)  # noqa: E731
        assert count_kernels(lower_for_cuda(run, rows(9, 1, 512), weight(512, 128, 1))) == 1


def test_cpu_runs_the_reference_and_cuda_the_kernel_for_some_rows(monkeypatch):
    lower = lambda x, w: count_kernels(lower_for_cuda(lambda x, w: block_linear(x, w), x, w))  # noqa: E731
    assert ON_GPU or not lower(rows(4, 128), weight(128, 128))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert lower(rows(4, 128), weight(128, 128)) == 1
    assert not lower(rows(4, 96), weight(96, 128)) and not lower(rows(4, 128).astype(jnp.float32), weight(128, 128))
    assert not lower(jax.ShapeDtypeStruct((1024, 128), jnp.bfloat16), weight(128, 128))


def test_sizes_fit_the_matrices():
    """What a launch would leave out otherwise; measured sizes are no exception."""
    for groups, inputs, outputs in [*SHAPES.values(), *TUNED, (1, 128, 128), (3, 384, 640)]:
        for tokens in (1, 8, 16, 17, 64, 200, MOST_ROWS):
            sizes = plan(tokens, groups, inputs, outputs)
            assert sizes.fits(inputs, outputs), (inputs, outputs, sizes)
            more = candidates(tokens, sizes, inputs, outputs)
            assert all(p.fits(inputs, outputs) for p in more) and sizes not in more
    with pytest.raises(ValueError, match="does not fit a matrix of 128 x 128"):
        triton.block_linear(rows(2, 1, 128), weight(128, 128, 1), sizes=triton.Plan(8, Lanes(8, 64), 4), interpret=True)


def test_measured_sizes_are_for_rows_up_to_the_next_power_of_two(monkeypatch):
    assert [bucket(t) for t in (1, 2, 8, 9, 33, 48, 64, 65, 512)] == [1, 8, 8, 16, 64, 64, 64, 128, 512]
    measured = triton.Plan(32, Lanes(16, 32), 2, True)
    monkeypatch.setitem(TUNED, (1, 256, 128), {32: measured})
    assert plan(17, 1, 256, 128) == plan(32, 1, 256, 128) == measured not in (plan(16, 1, 256, 128), plan(33, 1, 256, 128))


def test_what_it_cannot_take_is_refused():
    with pytest.raises(ValueError, match="the matrix is 96 x 128"):
        block_linear(rows(2, 96), weight(96, 128), implementation=KERNEL)
    with pytest.raises(ValueError, match="rows of float32"):
        block_linear(rows(2, 128).astype(jnp.float32), weight(128, 128), implementation=KERNEL)
    with pytest.raises(ValueError, match=r"rows of shape \[2, 128\] with codes of shape \[256, 128\]"):
        block_linear(rows(2, 128), weight(256, 128))
    with pytest.raises(ValueError, match="codes are uint8"):
        block_linear(rows(2, 128), BlockScaled(jnp.zeros((64, 128), jnp.uint8), jnp.zeros((4, 128), jnp.uint8)))
