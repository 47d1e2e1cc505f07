"""The ring's construction: what travels, what is collected, who owns what. Whole generations are in tests/serve."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from dspark_jax.decode.item import Packing, idle_control
from dspark_jax.decode.round import init_requests
from dspark_jax.decode.rows import mask_rows, padded_rows
from dspark_jax.errors import CheckpointError, ConfigError
from dspark_jax.parallel.mesh import EXPERT, PIPE, make_mesh
from dspark_jax.parallel.ring import Ring, RingConfig
from dspark_jax.parallel.stage import Pipeline, PipelineSpec
from helpers.jaxprs import equations
from helpers.mesh_model import CONFIG, DRAFT, GAMMA, MAX_LEN, model
from helpers.runner import scaled_error

FEWER = (((0, 1), (1, 4)), ((0, 2), (2, 4)), ((0, 3), (3, 4)), ((0, 1), (1, 2), (2, 4)))
SPLITS = [((0, 1), (1, 2), (2, 3), (3, 4)), *(pytest.param(r, marks=pytest.mark.long) for r in FEWER)]


def ring(ranges=((0, 2), (2, 4)), expert=2, draft=DRAFT, **sizes) -> Ring:
    spec = PipelineSpec(CONFIG, draft, ranges, expert)
    sizes = {"slots": 4, "max_len": MAX_LEN, "chunk": 8} | sizes
    return Ring(spec, model(draft is not None)[1], make_mesh(len(ranges), expert), RingConfig(**sizes))


def axes_of(eqn) -> set[str]:
    names = eqn.params.get("axis_name", eqn.params.get("axes", ()))
    return {names} if isinstance(names, str) else {n for n in names if isinstance(n, str)}


def trace(r: Ring):
    state = jax.eval_shape(r.init_state)
    params = {k: jax.ShapeDtypeStruct((r.pipe, *x.shape), x.dtype) for k, x in r.pipeline.params.shapes.items()}
    return r.step.trace(params, state, r.idle_control()).jaxpr


def test_b2_b9_one_exchange_a_tick_and_nothing_else_between_pipeline_ranks():
    """One array a dtype is sent on; whatever else is collective stays inside an expert group."""
    found = [(e.primitive.name, axes_of(e), [x.aval.dtype.name for x in e.invars]) for e in equations(trace(ring()).jaxpr)]
    across = [(name, dtypes) for name, axes, dtypes in found if PIPE in axes and name != "axis_index"]
    assert sorted(across) == [("ppermute", ["float32"]), ("ppermute", ["int32"])]  # bf16 activations make a third
    assert {name for name, axes, _ in found if axes == {EXPERT}} >= {"all_gather", "reduce_scatter", "all_to_all"}


def test_b4_b8_the_item_has_one_shape_whatever_it_carries():
    r = ring()
    shapes = {k: x.shape for k, x in jax.eval_shape(r._idle_item).items()}
    assert set(shapes) == {"int32", "float32"} and all(s[0] == r.local_slots for s in shapes.values())
    assert r.item_bytes == sum(4 * s[0] * s[1] for s in shapes.values())
    sent = jax.eval_shape(lambda: r._packing.pack(r._next_item(r._empty_item(), init_requests(r.local_slots, GAMMA, 29, 8))))
    assert {k: x.shape for k, x in sent.items()} == shapes


def test_packing_keeps_every_bit():
    rng = np.random.default_rng(0)
    control = idle_control(3, 5, 2)
    control = jax.tree.map(lambda x: jnp.asarray(rng.integers(0, 2**31, x.shape).astype(x.dtype)), control)
    control = dataclasses.replace(
        control, sampling=dataclasses.replace(control.sampling, seed=jnp.asarray([2**32 - 1, 5, 2**31], jnp.uint32))
    )
    tree = (control, jnp.asarray(rng.normal(size=(3, 4, 2)), jnp.bfloat16), jnp.asarray(rng.normal(size=(3, 7)), jnp.float32))
    packing = Packing.of(tree)
    packed = packing.pack(tree)
    assert {k: (x.dtype.name, x.ndim) for k, x in packed.items()} == {k: (k, 2) for k in ("int32", "float32", "bfloat16")}
    for before, after in zip(jax.tree.leaves(tree), jax.tree.leaves(packing.unpack(packed)), strict=True):
        assert before.dtype == after.dtype
        np.testing.assert_array_equal(np.asarray(before), np.asarray(after))


def test_b10_a_record_is_captured_when_it_is_placed():
    r = ring()
    record = r.idle_control()
    placed = r.place_control(record)
    for leaf in jax.tree.leaves(record):
        leaf[...] = 1
    for leaf, idle in zip(jax.tree.leaves(placed), jax.tree.leaves(r.idle_control()), strict=True):
        np.testing.assert_array_equal(np.asarray(leaf), idle)


@pytest.mark.long
def test_b11_the_last_rank_has_its_own_embedding_and_cannot_do_without():
    r = ring(expert=1)
    placed = r.pipeline.place(model()[1], r.mesh)
    (key,) = [k for k in placed if k.startswith("embed.weight")]
    first, last = np.asarray(placed[key])
    np.testing.assert_array_equal(first, model()[1]["target"]["embed"]["weight"].get_value())
    np.testing.assert_array_equal(last, first)
    plain = ring(expert=1, draft=None)
    (key,) = [k for k in plain.pipeline.params.shapes if k.startswith("embed.weight")]
    assert not np.asarray(plain.pipeline.place(model(False)[1], plain.mesh)[key])[1].any()  # nothing drafts there
    lacking = jax.tree.map(lambda x: x, model()[1])
    del lacking["target"]["embed"]
    with pytest.raises(CheckpointError, match=r"lacks target\.embed\.weight"):
        Pipeline(r.spec, lacking)


def test_leaves_are_one_for_each_layer_position():
    """A position's leaf has the ranks as its leading axis; draft stages are positions behind the last rank's layers."""
    r = ring(((0, 3), (3, 4)), expert=1)
    shapes = r.pipeline.params.shapes
    experts = [k for k in shapes if ".ffn.experts.w1 " in k]
    assert sorted(k.split(" ")[0] for k in experts) == [f"layers.{j}.ffn.experts.w1" for j in range(3)]
    assert not any(k.startswith("draft.mtp.0.ffn") for k in shapes)
    placed = r.pipeline.place(model()[1], r.mesh)
    stage = np.asarray(placed[next(k for k in experts if "layers.2." in k)])[1]
    np.testing.assert_array_equal(stage, model()[1]["draft"]["mtp"][1]["ffn"]["experts"]["w1"].get_value())


@functools.cache
def context_and_hidden(ranges) -> tuple[np.ndarray, np.ndarray]:
    """The context projection and the hidden rows of a tick behind the stages of `ranges`, one after the other."""
    token = np.random.default_rng(3).integers(0, CONFIG.vocab_size, (2, GAMMA + 1)).astype(np.int32)
    pipeline = Pipeline(PipelineSpec(CONFIG, DRAFT, ranges, 1), model()[1])
    placed = pipeline.place(model()[1], Mesh(np.array(jax.devices()[: len(ranges)]).reshape(-1, 1), (PIPE, EXPERT)))
    leaves = {k: np.asarray(x) for k, x in placed.items()}

    def forward(leaves):
        rows = padded_rows(jnp.asarray(token), jnp.zeros(2, jnp.int32), jnp.asarray([3, 2]))
        context = jnp.zeros((rows.token.shape[0], CONFIG.hidden_size), jnp.float32)
        stages = [pipeline.stage({k: x[rank] for k, x in leaves.items()}, rank) for rank in range(len(ranges))]
        streams = stages[0].embed_streams(rows.token)
        for stage in stages:
            streams, context, *_ = stage.forward(rows, streams, context, stage.init_cache(2, MAX_LEN, GAMMA + 1))
        return mask_rows(context, rows.valid), mask_rows(stages[-1].hidden(streams), rows.valid)

    here = PartitionSpec()
    mapped = jax.shard_map(forward, mesh=make_mesh(), in_specs=(here,), out_specs=here, check_vma=False)
    context, hidden = jax.jit(mapped)(leaves)
    return np.asarray(context), np.asarray(hidden)


@pytest.mark.parametrize("ranges", SPLITS, ids=lambda r: "|".join(f"{a}-{b}" for a, b in r))
def test_b12_b14_taps_at_before_and_after_every_boundary_give_the_same_context(ranges):
    """Every rank adds the projections of its own tapped layers; the sum is the whole projection, normed once at the end."""
    for whole, parts in zip(context_and_hidden(((0, 4),)), context_and_hidden(ranges), strict=True):
        assert np.abs(whole).max() > 0.01
        assert scaled_error(parts, whole) < 1e-6


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"slots": 3}, "slots is 3; expected a positive multiple of the expert axis, 2"),
        ({"slots": 0}, "slots is 0"),
        ({"max_len": 65}, "max_len is 65; expected 2 … 64"),
        ({"chunk": 0}, "chunk is 0"),
        ({"rounds": 0}, "rounds is 0"),
    ],
)
def test_impossible_sizes_are_named(changes, words):
    with pytest.raises(ConfigError, match=words):
        ring(**changes)


def test_all_faults_of_a_ring_at_once():
    with pytest.raises(ConfigError) as error:
        Ring(PipelineSpec(CONFIG, DRAFT, ((0, 4),), 3), model()[1], make_mesh(2, 2), RingConfig(slots=4, max_len=1))
    for words in ("pipe = 1 and expert = 3", "slots is 4", "expert is 3; expected a divisor of the model's 8", "max_len is 1"):
        assert words in str(error.value)


@pytest.mark.parametrize("ranges", [((0, 2), (3, 4)), ((0, 4), (4, 4)), ((1, 4),), ((0, 5),), ((0, 3), (2, 4))])
def test_ranges_that_do_not_cover_the_layers_are_refused(ranges):
    with pytest.raises(ConfigError, match=r"cover \[0, 4\)"):
        Pipeline(PipelineSpec(CONFIG, DRAFT, ranges, 1), model()[1])
