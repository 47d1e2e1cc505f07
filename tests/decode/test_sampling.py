"""processed_logits against a sort-based reference, and the checks of SamplingParams."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.decode.sampling import SamplingParams, SamplingState, processed_logits
from dspark_jax.errors import DSparkError, RequestError
from helpers.sampling_reference import ranking, reference_law, softmax

process = jax.jit(processed_logits)


def run(logits, temperature=1.0, top_k=0, top_p=1.0):
    logits = np.asarray(logits, np.float32)
    shape = logits.shape[:-1]
    full = [np.broadcast_to(np.asarray(v, t), shape) for v, t in ((temperature, np.float32), (top_k, np.int32))]
    return np.asarray(process(logits, *full, np.broadcast_to(np.asarray(top_p, np.float32), shape)))


def check_row(row, out, temperature, top_k, top_p):
    """The kept set is a prefix of the ranking with the right size and mass, and the law on it is the softmax."""
    row = np.asarray(row, np.float64)
    order = ranking(row)
    if temperature == 0:
        expected = np.full(len(row), -np.inf)
        expected[order[0]] = 0
        np.testing.assert_array_equal(out, expected)
        return
    finite = int(np.isfinite(row).sum())
    limit = min(top_k or finite, finite)
    kept = np.isfinite(out)
    size = int(kept.sum())
    assert set(np.flatnonzero(kept)) == set(order[:size]), "not the top of the ranking"
    mass = softmax(row[order[:limit]] / temperature)
    if top_p < 1:
        slack = 2e-6
        assert mass[:size].sum() >= top_p - slack, "too little mass"
        assert size == 1 or mass[: size - 1].sum() < top_p + slack, "not the smallest set"
        assert size <= limit
    else:
        assert size == limit
    np.testing.assert_allclose(
        softmax(out), np.where(kept, softmax(np.where(kept, row, -np.inf) / temperature), 0), atol=2e-6
    )
    assert out.max() == 0


@pytest.mark.parametrize("vocab", [1, 4, 129, 1000])
def test_matches_the_sorted_reference_on_random_rows(vocab):
    rng = np.random.default_rng(vocab)
    rows = 64
    logits = rng.normal(0, 3, (rows, vocab)).astype(np.float32)
    logits[1::4] = np.round(logits[1::4])  # heavy ties
    logits[2::4] = rng.choice([-1.0, -0.0, 0.0, 2.0], (len(logits[2::4]), vocab))
    hide = (rng.random((rows, vocab)) < 0.3) & (np.arange(rows)[:, None] % 8 == 3)
    hide[:, 0] = False
    logits[hide] = -np.inf
    temperature = rng.choice([0.0, 0.3, 1.0, 1.7], rows).astype(np.float32)
    top_k = rng.choice([0, 1, 2, max(vocab // 3, 1), vocab, vocab + 5], rows).astype(np.int32)
    top_p = rng.choice([1.0, 1e-9, 0.1, 0.5, 0.9, 0.99], rows).astype(np.float32)
    out = run(logits, temperature, top_k, top_p)
    for i in range(rows):
        check_row(logits[i], out[i], temperature[i], int(top_k[i]), float(top_p[i]))


@given(
    logits=st.lists(st.sampled_from([-2.0, -0.5, 0.0, 0.5, 1.0, 3.0, -np.inf]), min_size=7, max_size=7),
    temperature=st.sampled_from([0.0, 0.25, 1.0, 2.0]),
    top_k=st.integers(0, 8),
    top_p=st.sampled_from([1e-12, 0.05, 0.3, 0.5, 0.77, 0.999, 1.0]),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_matches_the_sorted_reference_on_small_rows(logits, temperature, top_k, top_p):
    logits = [*logits, 0.25]  # at least one finite entry
    check_row(logits, run(logits, temperature, top_k, top_p), temperature, top_k, top_p)


def test_ties_go_to_the_lowest_id():
    kept = lambda *a, **k: np.flatnonzero(np.isfinite(run(*a, **k))).tolist()  # noqa: E731
    assert kept([1, 2, 2, 2, 0], top_k=2) == [1, 2]
    assert kept([5, 2, 2, 2, 2], top_k=3) == [0, 1, 2]
    assert kept([0.0, -0.0, 0.0, -0.0], top_k=3) == [0, 1, 2]
    assert kept([0, 0, 0, 0], top_p=0.5) == [0, 1]
    assert kept([0, 0, 0, 0], top_p=0.51) == [0, 1, 2]
    assert kept([0] * 10, top_p=0.7) == list(range(7))
    assert kept([2, 2, 1], temperature=0) == [0]
    assert kept([-np.inf, -np.inf, 1, 1], temperature=0) == [2]


def test_top_p_counts_the_mass_that_top_k_left():
    # p = .4 .3 .2 .1; top-2 leaves 4/7 and 3/7, so .55 needs the first alone and .6 needs both.
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    assert np.isfinite(run(logits, top_k=2, top_p=0.55)).sum() == 1
    assert np.isfinite(run(logits, top_k=2, top_p=0.6)).sum() == 2
    assert np.isfinite(run(logits, top_p=0.6)).sum() == 2
    assert np.isfinite(run(logits, top_p=0.75)).sum() == 3


def test_top_p_stops_where_the_mass_is_reached_exactly():
    # Weights 1, 1/2, 1/2 are exact: the first entry alone has half of the mass.
    assert np.isfinite(run([0, -np.log(2), -np.log(2)], top_p=0.5)).sum() == 1


def test_temperature_acts_before_top_p():
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    assert np.isfinite(run(logits, temperature=0.25, top_p=0.7)).sum() == 1
    assert np.isfinite(run(logits, temperature=4.0, top_p=0.7)).sum() == 3


def test_a_row_that_asks_for_nothing_is_only_scaled():
    logits = np.array([[1.0, 3.0, -2.0], [1.0, 3.0, -2.0]], np.float32)
    out = run(logits, temperature=[2.0, 2.0], top_k=[0, 1], top_p=[1.0, 0.5])
    np.testing.assert_allclose(out[0], [-1.0, 0.0, -2.5])
    np.testing.assert_array_equal(out[1], [-np.inf, 0.0, -np.inf])


def test_extreme_temperatures_stay_finite():
    logits = np.array([30.0, -30.0, 29.0], np.float32)
    np.testing.assert_allclose(softmax(run(logits, temperature=1e-30)), [1, 0, 0])
    np.testing.assert_allclose(softmax(run(logits, temperature=1e30)), [1 / 3] * 3, atol=1e-6)


def test_nan_and_infinity_stay_in_their_row():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(6, 50)).astype(np.float32)
    args = {"temperature": [1, 1, 0, 1, 1, 0], "top_k": [0, 5, 5, 0, 5, 0], "top_p": [1, 1, 1, 0.7, 0.7, 1]}
    clean = run(logits, **args)
    for bad in (np.nan, np.inf, -np.inf):
        dirty = logits.copy()
        dirty[[1, 3]] = bad
        out = run(dirty, **args)
        np.testing.assert_array_equal(out[[0, 2, 4, 5]], clean[[0, 2, 4, 5]])


def test_rows_do_not_depend_on_the_batch():
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(8, 33)).astype(np.float32)
    top_k, top_p = np.arange(8, dtype=np.int32), np.linspace(0.3, 1, 8, dtype=np.float32)
    whole = run(logits, 0.8, top_k, top_p)
    order = rng.permutation(8)
    np.testing.assert_array_equal(run(logits[order], 0.8, top_k[order], top_p[order]), whole[order])


def test_leading_axes_are_free():
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(2, 3, 5)).astype(np.float32)
    nested = run(logits, 0.7, 3, 0.8)
    np.testing.assert_array_equal(nested.reshape(6, 5), run(logits.reshape(6, 5), 0.7, 3, 0.8))


def primitives(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        for value in eqn.params.values():
            for sub in value if isinstance(value, tuple | list) else (value,):
                if hasattr(sub, "eqns"):
                    yield from primitives(sub)
                elif hasattr(sub, "jaxpr"):
                    yield from primitives(sub.jaxpr)


def test_no_sort_and_no_top_k_operation():
    args = (jnp.zeros((2, 64)), jnp.ones(2), jnp.ones(2, jnp.int32), jnp.ones(2))
    names = set(primitives(jax.make_jaxpr(processed_logits)(*args).jaxpr))
    assert "cond" in names and names & {"while", "scan"}  # the walk reached the branches
    assert not {n for n in names if "sort" in n or "top_k" in n}, names
    # The walk itself would notice one.
    assert any("sort" in n for n in primitives(jax.make_jaxpr(jax.jit(jnp.sort))(jnp.zeros(4)).jaxpr))


def test_reference_law_by_hand():
    np.testing.assert_allclose(reference_law(np.log([0.4, 0.3, 0.2, 0.1]), 1.0, 3, 0.75), [4 / 7, 3 / 7, 0, 0])
    np.testing.assert_allclose(reference_law(np.log([0.25, 0.5, 0.25]), 1.0, 2), [1 / 3, 2 / 3, 0])


def test_default_parameters_are_valid_and_greedy():
    params = SamplingParams()
    params.validate(vocab_size=10)
    assert params.temperature == 0 and params.max_tokens == 128


def test_validate_lists_every_fault_at_once():
    bad = SamplingParams(temperature=-1.0, top_k=-2, top_p=0.0, seed=-5, max_tokens=0, stop_token_ids=(3, 99))
    with pytest.raises(RequestError) as info:
        bad.validate(vocab_size=10)
    message = str(info.value)
    for part in ("temperature = -1.0", "top_k = -2", "top_p = 0.0", "seed = -5", "max_tokens = 0", "[99]", "size 10"):
        assert part in message, part
    assert "6 faults" in message and isinstance(info.value, DSparkError)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", float("nan")), ("temperature", float("inf")), ("temperature", "hot"), ("temperature", None),
        ("top_k", 1.5), ("top_k", True), ("top_p", 1.01), ("top_p", float("nan")), ("seed", 2**32), ("seed", "x"),
        ("max_tokens", 2.0), ("stop_token_ids", 7), ("stop_token_ids", (-1,)), ("stop_token_ids", ("a",)),
    ],
)  # fmt: skip
def test_validate_names_the_field(name, value):
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: value}).validate(vocab_size=10)


@pytest.mark.parametrize("top_k", [10, 11, 10**6])
def test_a_top_k_of_the_vocabulary_or_more_is_off(top_k):
    SamplingParams(top_k=top_k).validate(vocab_size=10)
    assert np.isfinite(run(np.arange(10.0), top_k=top_k)).all()


@pytest.mark.parametrize(
    "name",
    [
        "presence_penalty", "frequency_penalty", "repetition_penalty", "min_p", "logit_bias", "best_of", "prompt_logprobs",
        "guided_json", "typical_p", "min_tokens", "use_beam_search",
    ],
)  # fmt: skip
def test_from_dict_refuses_by_name(name):
    with pytest.raises(RequestError, match=f"{name} = 1.5 is not offered"):
        SamplingParams.from_dict({"temperature": 0.5, name: 1.5})


def test_from_dict_reports_names_and_values_together():
    with pytest.raises(RequestError) as info:
        SamplingParams.from_dict({"n": 3, "min_p": 0.1, "temprature": 1.0, "colour": 2, "top_p": 7})
    message = str(info.value)
    for part in ("n = 3 is not offered", "min_p", "did you mean temperature?", "colour", "top_p = 7", "5 faults"):
        assert part in message, part


def test_from_dict_takes_what_is_offered():
    params = SamplingParams.from_dict({"temperature": 1, "n": 1, "stop_token_ids": [1, 2], "seed": 9})
    assert params == SamplingParams(temperature=1, stop_token_ids=(1, 2), seed=9)


def test_state_rows_follow_the_parameters():
    state = SamplingState.from_params([SamplingParams(0.5, 3, 0.9, seed=2**32 - 1), SamplingParams()])
    assert [x.dtype.name for x in jax.tree.leaves(state)] == ["float32", "int32", "float32", "uint32"]
    assert state.seed.tolist() == [2**32 - 1, 0] and state.top_k.tolist() == [3, 0]
    np.testing.assert_allclose(state.temperature, [0.5, 0.0])
