"""The grouped products against the reference: interpreted on CPU, compiled on a GPU; and lowered for CUDA without one."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_kernels.block_scaled import BlockScaled
from dspark_kernels.expert_mlp import expert_mlp, tiles
from dspark_kernels.expert_mlp.api import grouped
from dspark_kernels.expert_mlp.triton import Blocks
from dspark_kernels.expert_mlp.tuning import Plan, WeightFormat
from dspark_kernels.formats import block_shapes
from dspark_kernels.lowerings import Implementation
from helpers.cuda import count_kernels, lower_for_cuda

ON_GPU = jax.default_backend() == "gpu"
KERNEL: Implementation = "triton" if ON_GPU else "interpret"
WIDTH, INNER, LIMIT = 128, 256, 1.5


class Case(NamedTuple):
    """Sizes of one call; kept: which rows have ids, the others -1."""

    rows: int
    experts: int
    top_k: int
    kind: WeightFormat
    kept: str = "some"


CASES = [
    Case(9, 12, 6, "f32"),
    Case(3, 4, 2, "f32", "none"),
    Case(7, 12, 8, "bf16"),
    Case(9, 12, 6, "fp8"),
    Case(9, 12, 6, "fp4"),
    Case(31, 3, 2, "fp8", "one expert"),
    Case(1, 16, 4, "fp4", "all"),
]
# The same paths in other sizes.
MORE_CASES = [
    Case(1, 12, 1, "f32", "all"),
    Case(33, 5, 3, "f32", "one expert"),
    Case(5, 24, 3, "fp4"),
    Case(11, 32, 2, "fp8", "one expert"),
]
ALL_CASES = [*CASES, *(pytest.param(case, marks=pytest.mark.long) for case in MORE_CASES)]


def matrices(kind: WeightFormat, experts: int, inputs: int, outputs: int, rng: np.random.Generator):
    """Random [experts, inputs, outputs] of about unit gain, every code with a finite value."""
    if kind in ("f32", "bf16"):
        values = rng.normal(0, inputs**-0.5, (experts, inputs, outputs))
        return jnp.asarray(values, jnp.float32 if kind == "f32" else jnp.bfloat16)
    codes, scale = ((experts, *shape) for shape in block_shapes(kind, inputs, outputs))
    raw = rng.integers(0, 256, codes).astype(np.uint8)
    raw = jnp.asarray(raw if kind == "fp4" else np.where(raw & 127 == 127, 0, raw))
    low = 121 if kind == "fp4" else 114  # fp8 codes reach 448
    values = raw if kind == "fp4" else jax.lax.bitcast_convert_type(raw, jnp.float8_e4m3fn)
    return BlockScaled(values, jnp.asarray(rng.integers(low, low + 3, scale), jnp.uint8))


def inputs(case: Case) -> list:
    """Arguments of `expert_mlp`, with ids that lie on another rank too."""
    rng = np.random.default_rng(case.rows)
    x = jnp.asarray(rng.normal(size=(case.rows, WIDTH)), jnp.float32 if case.kind == "f32" else jnp.bfloat16)
    ids = rng.permuted(np.tile(np.arange(case.experts), (case.rows, 1)), axis=1)[:, : case.top_k].astype(np.int32)
    if case.kept == "some":
        ids[rng.random(ids.shape) < 0.2] = -1
        ids[rng.random(ids.shape) < 0.1] = case.experts + 3
    elif case.kept != "all":
        ids[:] = -1
        ids[:, 0] = -1 if case.kept == "none" else case.experts - 1
    weights = jnp.asarray(rng.random(ids.shape), jnp.float32)
    sizes = ((WIDTH, INNER), (WIDTH, INNER), (INNER, WIDTH))
    return [x, jnp.asarray(ids), weights, *(matrices(case.kind, case.experts, i, o, rng) for i, o in sizes)]


def run(arguments: list, implementation: Implementation):
    return jax.jit(lambda *a: expert_mlp(*a, limit=LIMIT, implementation=implementation))(*arguments)


def tolerance(case: Case) -> float:
    """Of the output's largest value. Sums in another order may round gate, up or hidden to a bf16 neighbour here and there;
    on a GPU exp differs too, and where one value of hidden makes up most of an output, its step of 2^-8 is all of the
    difference. Rounding none of them would differ by about 2e-3.
    """
    return 2e-6 if case.kind == "f32" else 2**-8 if ON_GPU else 3e-4


class TestKernels:
    @pytest.mark.parametrize("case", ALL_CASES, ids=lambda c: "-".join(map(str, c)))
    def test_against_the_reference(self, case):
        arguments = inputs(case)
        expected = np.asarray(run(arguments, "reference"))
        np.testing.assert_allclose(run(arguments, KERNEL), expected, rtol=0, atol=tolerance(case) * abs(expected).max())
        assert expected.any() == (case.kept != "none")

    @pytest.mark.parametrize("kind", ["bf16", "fp4", pytest.param("fp8", marks=pytest.mark.long)])
    def test_weights_as_the_left_operand(self, kind):
        case = Case(40, 3, 2, kind)
        arguments = inputs(case)
        expected = np.asarray(run(arguments, "reference"))
        blocks = Blocks(64, 64, 4, 2, swap=True)
        got = jax.jit(
            lambda *a: grouped(*a, limit=LIMIT, sizes=Plan(16, blocks, blocks), interpret=not ON_GPU)
        )(*arguments)
        np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance(case) * abs(expected).max())

    def test_gradients_are_the_references(self):
        arguments = inputs(Case(5, 4, 2, "f32"))

        def loss(arguments, implementation):
            return jnp.sum(jnp.sin(expert_mlp(*arguments, limit=LIMIT, implementation=implementation)))

        grad = jax.jit(jax.grad(loss, allow_int=True), static_argnums=1)
        got, expected = (grad(arguments, name) for name in (KERNEL, "reference"))
        for a, b in zip(got[2:] + got[:1], expected[2:] + expected[:1], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 37, 300])
@pytest.mark.parametrize("block_m", [16, 64])
def test_tiles(rows, block_m):
    experts, top_k = 12, 5
    ids = np.random.default_rng(rows).integers(-2, experts + 2, (rows, top_k))
    ids[ids == 3] = 4  # one expert without rows
    flat = ids.reshape(-1)
    got = jax.tree.map(np.asarray, jax.jit(tiles.build, static_argnums=(1, 2))(ids, experts, block_m))
    assert sorted(got.order) == list(range(flat.size))
    found = [(e, entry) for e, f, n in zip(*got[1:], strict=True) for entry in got.order[f : f + n]]
    assert found == sorted((e, i) for i, e in enumerate(flat) if 0 <= e < experts)
    active = got.rows > 0
    assert (got.rows <= block_m).all() and list(active) == sorted(active, reverse=True)
    assert active.sum() == sum(-(-(flat == e).sum() // block_m) for e in range(experts))


def test_the_bound_of_tiles_is_reached():
    for counts in ([1, 1, 1], [17, 1, 33], [16, 16, 17]):
        needed = sum(-(-c // 16) for c in counts)
        assert needed <= tiles.tile_bound(sum(counts), 3, 16)
    assert tiles.tile_bound(3, 256, 16) == 3 and tiles.tile_bound(19, 1, 16) == 2


def empty(kind: WeightFormat, experts: int, inputs: int, outputs: int):
    """Zeros; under `eval_shape`, shapes."""
    if kind in ("f32", "bf16"):
        return jnp.zeros((experts, inputs, outputs), jnp.float32 if kind == "f32" else jnp.bfloat16)
    codes, scale = ((experts, *shape) for shape in block_shapes(kind, inputs, outputs))
    return BlockScaled(jnp.zeros(codes, jnp.uint8 if kind == "fp4" else jnp.float8_e4m3fn), jnp.zeros(scale, jnp.uint8))


@pytest.mark.parametrize("rows", [8, 4096])
@pytest.mark.parametrize("kind", ["f32", "bf16", "fp8", "fp4"])
def test_lowers_for_cuda_without_a_gpu(kind, rows):
    experts, width, inner = 256, 4096, 2048
    sizes = ((width, inner), (width, inner), (inner, width))
    arguments = jax.eval_shape(
        lambda: [
            jnp.zeros((rows, width), jnp.float32 if kind == "f32" else jnp.bfloat16),
            jnp.zeros((rows, 6), jnp.int32),
            jnp.zeros((rows, 6)),
            *(empty(kind, experts, i, o) for i, o in sizes),
        ]
    )
    text = lower_for_cuda(lambda *a: expert_mlp(*a, limit=10.0, implementation="triton"), *arguments)
    assert count_kernels(text) == 2


def test_cpu_runs_the_reference_and_cuda_the_kernel(monkeypatch):
    arguments = inputs(CASES[0])
    lower = lambda *a: lower_for_cuda(lambda *a: expert_mlp(*a, limit=LIMIT), *a)  # noqa: E731
    assert ON_GPU or not count_kernels(lower(*arguments))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert count_kernels(lower(*arguments)) == 2
    narrow = [arguments[0][:, :64], *arguments[1:3], arguments[3][:, :64], arguments[4][:, :64], arguments[5][..., :64]]
    assert not count_kernels(lower(*narrow))


def test_what_the_kernel_cannot_take_is_refused():
    x, ids, weights, w1, w3, w2 = inputs(CASES[0])
    with pytest.raises(ValueError, match="an expert's matrix is 64 x 256"):
        expert_mlp(x[:, :64], ids, weights, w1[:, :64], w3, w2, limit=LIMIT, implementation="triton")
    with pytest.raises(ValueError, match="rows of bfloat16 with f32 weights"):
        expert_mlp(x.astype(jnp.bfloat16), ids, weights, w1, w3, w2, limit=LIMIT, implementation="interpret")
    fp8 = inputs(CASES[3])
    with pytest.raises(ValueError, match="rows of float32 with fp8 weights"):
        expert_mlp(x, *fp8[1:], limit=LIMIT, implementation="triton")
