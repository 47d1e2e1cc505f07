"""The routing kernels against the reference: interpreted on CPU, compiled on a GPU; and lowered for CUDA without one."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_kernels import routing
from dspark_kernels.routing import triton
from dspark_kernels.routing.replicas import choose_slots_numpy
from helpers.cuda import count_kernels, lower_for_cuda

ON_GPU = jax.default_backend() == "gpu"
KERNEL = "triton" if ON_GPU else "interpret"
RTOL = 1e-5 if ON_GPU else 2e-6
SCALE = 1.5


class Case(NamedTuple):
    """Sizes and options of one routing; `copies` is the largest number of slots of an expert."""

    rows: int
    experts: int
    top_k: int
    score: str = "sqrt_softplus"
    biased: bool = True
    copies: int = 1
    hashed: bool = False
    kept: float = 0.8
    offset: int = 0


CASES = [
    Case(1, 4, 1, biased=False, kept=1),
    Case(8, 12, 6, "sigmoid", copies=3, offset=2),
    Case(9, 12, 6, "softmax", copies=3, offset=2),
    Case(7, 384, 8, "softmax", copies=2),
    Case(33, 256, 6, copies=4, offset=5),
    Case(150, 12, 8, copies=3, offset=1),  # two blocks of the counters, and a row across them
    Case(5, 256, 6, copies=2, kept=0),
    Case(40, 12, 6, "softmax", biased=False, hashed=True, copies=5),
]


def inputs(case: Case) -> dict:
    """Arguments of `route_to_slots`; padded rows hold NaN."""
    rng = np.random.default_rng(case.rows)
    valid = np.arange(case.rows) < case.kept * case.rows if case.kept in (0, 1) else rng.random(case.rows) < case.kept
    logits = rng.normal(0, 2, (case.rows, case.experts)).astype(np.float32)
    logits[~valid] = np.nan
    ids = rng.permuted(np.tile(np.arange(case.experts), (case.rows, 1)), axis=1)[:, : case.top_k]
    arrays = {
        "logits": logits,
        "valid": valid,
        # Below 0 for most, so that what fills the columns behind the experts would win if it were chosen from.
        "bias": rng.normal(-2, 0.3, case.experts).astype(np.float32) if case.biased else None,
        "ids": ids.astype(np.int32) if case.hashed else None,
    }
    arrays = {name: None if array is None else jnp.asarray(array) for name, array in arrays.items()}
    return arrays | {"top_k": case.top_k, "scale": SCALE, "score": case.score} | placement(case)


def placement(case: Case) -> dict:
    """Uneven replica counts with shuffled slots; none with one copy."""
    if case.copies == 1:
        return {}
    rng = np.random.default_rng(0)
    count = rng.integers(1, case.copies + 1, case.experts)
    count[0] = case.copies
    slots, table = rng.permutation(count.sum()), np.full((case.experts, case.copies), -1)
    for e, end in enumerate(np.cumsum(count)):
        table[e, : count[e]] = slots[end - count[e] : end]
    return {"expert_slots": table, "replica_count": count, "offset": case.offset}


def run(arguments: dict, implementation: str) -> routing.SlotRouting:
    """`route_to_slots` as one program."""
    arrays = {name: arguments[name] for name in ("logits", "valid", "bias", "ids")}
    rest = {name: value for name, value in arguments.items() if name not in arrays}
    return jax.jit(lambda arrays: routing.route_to_slots(**arrays, **rest, implementation=implementation))(arrays)


class TestKernels:
    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_slots_and_rows(self, case):
        arguments = inputs(case)
        got = run(arguments, KERNEL)
        expected = run(arguments, "reference")
        np.testing.assert_array_equal(got.ids, expected.ids)
        np.testing.assert_allclose(got.weights, expected.weights, rtol=RTOL)
        np.testing.assert_array_equal(got.slots, expected.slots)
        np.testing.assert_array_equal(got.rows, expected.rows)
        slots = np.asarray(got.ids)
        if case.copies > 1:
            slots = choose_slots_numpy(slots, arguments["expert_slots"], arguments["replica_count"], offset=case.offset)
        np.testing.assert_array_equal(got.slots, slots)
        np.testing.assert_array_equal(got.rows, np.bincount(slots[slots >= 0], minlength=got.rows.size))
        padded = ~np.asarray(arguments["valid"])
        assert (np.asarray(got.ids)[padded] == -1).all() and not np.asarray(got.weights)[padded].any()

    @pytest.mark.parametrize("case", CASES[2:4], ids=str)
    def test_two_calls_give_what_one_gives(self, case):
        arguments = inputs(case)
        tables = {name: arguments.pop(name) for name in ("expert_slots", "replica_count", "offset")}
        chosen = routing.route(**arguments, implementation=KERNEL)
        got = (*chosen, routing.choose_slots(chosen.ids, **tables, implementation=KERNEL))
        for a, b in zip(got, routing.route_to_slots(**arguments, **tables, implementation=KERNEL)[:3], strict=True):
            np.testing.assert_allclose(a, b, rtol=RTOL)

    @pytest.mark.parametrize("score", ["sqrt_softplus", "sigmoid", "softmax"])
    def test_ties_go_to_the_lowest_id(self, score):
        logits = np.zeros((5, 12), np.float32)
        logits[1, 7:] = 1
        logits[2, 3] = -1
        logits[3] = np.tile([0, 2, 1, 2], 3)
        logits[4] = np.random.default_rng(0).integers(0, 3, 12)
        got = routing.route(jnp.asarray(logits), top_k=6, scale=1, valid=jnp.ones(5, bool), score=score, implementation=KERNEL)
        np.testing.assert_array_equal(got.ids, jax.lax.top_k(logits, 6)[1])

    @pytest.mark.parametrize("rows", [5, 40])
    def test_all_rows_on_one_expert_take_its_slots_in_turn(self, rows):
        case = Case(rows, 12, 1, biased=False, copies=5, kept=1, offset=3)
        arguments = inputs(case)
        arguments["logits"] = arguments["logits"].at[:, 0].set(50)
        got = run(arguments, KERNEL)
        assert not got.ids.any()
        own = arguments["expert_slots"][0]
        np.testing.assert_array_equal(got.slots[:, 0], own[(np.arange(rows) + 3) % 5])
        np.testing.assert_array_equal(got.rows[own], np.full(5, rows // 5))
        assert got.rows.sum() == rows

    def test_a_given_id_may_come_twice_in_a_row(self):
        case = Case(6, 12, 4, hashed=True, biased=False, copies=3, kept=1)
        arguments = inputs(case) | {"ids": jnp.asarray(np.random.default_rng(1).integers(0, 3, (6, 4)), jnp.int32)}
        for a, b in zip(run(arguments, KERNEL), run(arguments, "reference"), strict=True):
            np.testing.assert_allclose(a, b, rtol=RTOL)

    def test_gradients_are_the_references(self):
        arguments = inputs(CASES[1]) | {"valid": jnp.ones(8, bool)}
        logits = jnp.nan_to_num(arguments.pop("logits"))
        target = jnp.asarray(np.random.default_rng(0).normal(size=(8, 6)), jnp.float32)

        def loss(logits, implementation):
            got = routing.route_to_slots(logits, **arguments, implementation=implementation)
            return jnp.sum(got.weights * target)

        grad = jax.jit(jax.grad(loss), static_argnums=1)
        np.testing.assert_allclose(grad(logits, KERNEL), grad(logits, "reference"), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "case", [Case(8, 256, 6, copies=3), Case(512, 384, 8, copies=3), Case(64, 256, 6, hashed=True)], ids=str
)
def test_lowers_for_cuda_without_a_gpu(case):
    arguments = inputs(case)
    arrays = {name: arguments.pop(name) for name in ("logits", "valid", "bias", "ids")}
    text = lower_for_cuda(lambda a: routing.route_to_slots(**a, **arguments, implementation="triton"), arrays)
    assert count_kernels(text) == 2


def test_cpu_runs_the_reference_and_cuda_the_kernel(monkeypatch):
    arguments = inputs(CASES[0])
    text = jax.jit(lambda: routing.route_to_slots(**arguments)).lower().as_text()
    assert ON_GPU or "triton" not in text
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert count_kernels(lower_for_cuda(lambda: routing.route(arguments["logits"], top_k=1, scale=1, valid=arguments["valid"])))
    wide = jnp.zeros((2, 513))
    assert not count_kernels(lower_for_cuda(lambda: routing.route(wide, top_k=1, scale=1, valid=jnp.ones(2, bool))))


def test_what_the_kernel_cannot_take_is_refused():
    valid = jnp.ones(2, bool)
    for experts, top_k in ((513, 6), (16, 9), (4, 5)):
        with pytest.raises(ValueError, match=f"{experts} experts, top_k {top_k}"):
            routing.route(jnp.zeros((2, experts)), top_k=top_k, scale=1, valid=valid, implementation="triton")
    with pytest.raises(ValueError, match="implementation is 'cuda'"):
        routing.route(jnp.zeros((2, 4)), top_k=1, scale=1, valid=valid, implementation="cuda")
    with pytest.raises(ValueError, match="jax arrays"):
        routing.choose_slots(jnp.zeros((2, 1), int), jnp.zeros((4, 1), int), np.ones(4, int), implementation="triton")
    with pytest.raises(ValueError, match="every slot 0 … 3 once"):
        triton.Tables.build(np.array([[0], [1], [2], [2]]), np.ones(4, int))
