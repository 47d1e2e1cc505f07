"""Linear maps with fp8 codes: interpreted on CPU, compiled on a GPU, against the reference; lowered for CUDA without one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_kernels.block_linear import block_linear, triton
from dspark_kernels.block_linear.bench import SHAPES
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
    run = lambda x, w: triton.block_linear(x, w, sizes=sizes, wide=direct)  # noqa: E731
    assert count_kernels(lower_for_cuda(run, rows(9, 1, 512), weight(512, 128, 1))) == 1


def test_cpu_runs_the_reference_and_cuda_the_kernel_for_some_rows(monkeypatch):
    lower = lambda x, w: count_kernels(lower_for_cuda(lambda x, w: block_linear(x, w), x, w))  # noqa: E731
    assert ON_GPU or not lower(rows(4, 128), weight(128, 128))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert lower(rows(4, 128), weight(128, 128)) == 1
    assert not lower(rows(4, 96), weight(96, 128)) and not lower(rows(4, 128).astype(jnp.float32), weight(128, 128))
    assert not lower(jax.ShapeDtypeStruct((1024, 128), jnp.bfloat16), weight(128, 128))


def test_what_it_cannot_take_is_refused():
    with pytest.raises(ValueError, match="the matrix is 96 x 128"):
        block_linear(rows(2, 96), weight(96, 128), implementation=KERNEL)
    with pytest.raises(ValueError, match="rows of float32"):
        block_linear(rows(2, 128).astype(jnp.float32), weight(128, 128), implementation=KERNEL)
    with pytest.raises(ValueError, match=r"rows of shape \[2, 128\] with codes of shape \[256, 128\]"):
        block_linear(rows(2, 128), weight(256, 128))
    with pytest.raises(ValueError, match="codes are uint8"):
        block_linear(rows(2, 128), BlockScaled(jnp.zeros((64, 128), jnp.uint8), jnp.zeros((4, 128), jnp.uint8)))
