"""The stage planner: the best of all cuts, memory to the byte, costs that follow the work, refusals with all reasons."""

import itertools
import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.checkpoint import layout
from dspark_jax.config import DraftConfig, TargetConfig
from dspark_jax.decode.round import init_requests
from dspark_jax.errors import ConfigError
from dspark_jax.parallel.leaves import ITEM_SIZE, rank_leaves
from dspark_jax.parallel.mesh import EXPERT, make_mesh
from dspark_jax.parallel.planner import _best_cut, given_stages, parse_stages, plan_stages
from dspark_jax.parallel.ring import Ring, RingConfig
from dspark_jax.parallel.stage import PipelineSpec
from dspark_jax.parallel.stage_cost import CostModel, Work, Workload, active_experts
from dspark_jax.presets import v4_flash, v4_pro
from helpers.checkpoints import DRAFT, TARGET, with_head
from helpers.micro import MICRO, MICRO_DRAFT

# Two ratios of heavy compression, hash layers on two ranks, taps next to every boundary.
SIX = replace(TARGET, num_hidden_layers=6, compress_ratios=(0, 8, 4, 3, 4, 0), num_hash_layers=4, n_shared_experts=2)
SIX_DRAFT = replace(DRAFT, target_layer_ids=(1, 2, 5))
FLASH, FLASH_DRAFT = v4_flash()
TICK = {"rows": 48, "context": 8192}


def shapes_of(config: TargetConfig, draft: DraftConfig | None, dtype: str):
    """Parameters as the reader makes them: what the architecture keeps in fp32 stays fp32."""
    _, params = layout.skeleton(config, draft, dtype=jnp.dtype(dtype), axis=None)
    kinds = {"weight": jnp.dtype(dtype), "fp32": jnp.dtype("float32"), "int": jnp.dtype("int32")}
    dtypes = iter([kinds[entry.dtype] for entry in layout.entries(params)])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, next(dtypes)), params)


def nbytes(x) -> int:
    return math.prod(x.shape) * x.dtype.itemsize


# -- memory ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "draft", "counts", "expert", "dtype"),
    [
        (TARGET, DRAFT, "3", 1, "float32"),
        (TARGET, DRAFT, "1,1,1", 2, "bfloat16"),
        (TARGET, with_head("rnn"), "1,2", 4, "bfloat16"),
        (TARGET, with_head("gated"), "2,1", 1, "float16"),
        (TARGET, with_head("none"), "2,1", 2, "bfloat16"),
        (MICRO, MICRO_DRAFT, "1,1", 4, "float32"),
        (SIX, SIX_DRAFT, "2,1,2,1", 2, "bfloat16"),
        (SIX, SIX_DRAFT, "1,1,1,1,1,1", 1, "bfloat16"),
        (SIX, None, "4,2", 4, "bfloat16"),
    ],
)
def test_memory_is_that_of_the_ring(config, draft, counts, expert, dtype):
    chunk, stops, context = 7, 3, 29
    gamma = draft.block_size if draft else 0
    rows = 3 * expert * (gamma + 1)
    plan = given_stages(
        config, draft, counts, rows=rows, context=context, expert=expert, chunk=chunk, stops=stops, dtype=dtype
    )
    spec = PipelineSpec(config, draft, plan.ranges, expert, jnp.dtype(dtype))
    sizes = RingConfig(slots=3 * expert, max_len=context, chunk=chunk, stops=stops)
    ring = Ring(spec, shapes_of(config, draft, dtype), make_mesh(plan.pipe, expert), sizes)

    held, parts = ring.pipeline.params, ring.pipeline.specs
    device = {key: nbytes(x) // (expert if EXPERT in parts[key] else 1) for key, x in held.shapes.items()}
    assert plan.memory.parameters == sum(device.values())
    assert plan.memory.own == tuple(sum(device[key] for key in keys) for keys in held.paths)
    requests = jax.eval_shape(partial(init_requests, ring.lanes, gamma, config.vocab_size, stops))
    generation = 4 * ring.lanes
    assert plan.memory.slots == ring.lanes
    assert plan.memory.cache * ring.lanes == sum(map(nbytes, ring.caches.shapes.values()))
    assert plan.memory.request * ring.lanes == sum(map(nbytes, jax.tree.leaves(requests))) + generation
    assert plan.memory.item == ring.item_bytes

    # Not only the sums: every rank's leaves by name and shape.
    kinds = {"weight": dtype, "fp32": "float32", "int": "int32"}
    for rank, keys in enumerate(held.paths):
        found = rank_leaves(config, draft, plan.ranges, expert, rank)
        names = [f"{leaf.name} {'x'.join(map(str, leaf.shape))} {kinds[leaf.kind]}" for leaf in found]
        assert sorted(names) == sorted(keys)


def test_defaults_are_those_of_the_ring():
    sizes, load = RingConfig(slots=1, max_len=2), Workload(1, 2)
    assert (load.chunk, load.stops) == (sizes.chunk, sizes.stops)
    assert {name: jnp.dtype(name).itemsize for name in ITEM_SIZE} == ITEM_SIZE


def test_published_models_are_as_large_as_published():
    flash = plan_stages(FLASH, None, 1, **TICK).memory
    # 284 and 1600 thousand million parameters; bf16.
    assert flash.parameters == pytest.approx(2 * 284e9, rel=0.01) and flash.padding == (0,)
    assert plan_stages(v4_pro()[0], None, 1, **TICK).memory.parameters == pytest.approx(2 * 1.6e12, rel=0.02)
    with_drafter = plan_stages(FLASH, FLASH_DRAFT, 1, **TICK).memory
    assert with_drafter.parameters > 1.06 * flash.parameters


def test_positions_of_the_longest_rank_are_paid_by_all():
    even, odd = (given_stages(FLASH, FLASH_DRAFT, cut, **TICK).memory for cut in ("23,20", "33,10"))
    block = 2 * 6.6e9  # bytes of a V4-Flash layer
    assert odd.parameters - even.parameters == pytest.approx(10 * block, rel=0.02)
    assert odd.padding[1] == pytest.approx(20 * block, rel=0.02) and max(even.padding) < block


# -- cuts ------------------------------------------------------------------------------------------------------------------


def all_cuts(layers: int, pipe: int):
    for cuts in itertools.combinations(range(1, layers), pipe - 1):
        edges = (0, *cuts, layers)
        yield tuple(zip(edges[:-1], edges[1:], strict=True))


@pytest.mark.parametrize("pipe", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("rows", [6, 600])
def test_no_cut_is_better(pipe, rows):
    ratios = (0, 0, 4, 128, 4, 128, 4, 128, 4)
    config = replace(FLASH, num_hidden_layers=9, compress_ratios=ratios)
    draft = replace(FLASH_DRAFT, target_layer_ids=(6, 7, 8))
    tick = {"rows": rows, "context": 100_000}
    found = plan_stages(config, draft, pipe, **tick)
    plans = [given_stages(config, draft, cut, pipe, **tick) for cut in all_cuts(9, pipe)]
    best = min(p.tick_seconds for p in plans)
    tied = [p for p in plans if p.tick_seconds <= best * (1 + 1e-9)]
    evenest = min((sum(n * n for n in p.positions), p.ranges) for p in tied)
    assert found.tick_seconds == pytest.approx(best, rel=1e-9)
    assert (sum(n * n for n in found.positions), found.ranges) == evenest


def test_search_equals_brute_force_for_random_costs():
    rng = np.random.default_rng(0)
    for layers, pipe in [(5, 2), (7, 3), (8, 8), (8, 5), (6, 1)]:
        table = rng.integers(1, 4, (pipe, layers)).cumsum(axis=1)
        table = np.concatenate([np.zeros((pipe, 1)), table], axis=1)

        def score(rank, first, end, table=table):
            return float(table[rank, end] - table[rank, first])

        for join, fold in ((max, max), (lambda a, b: a + b, sum)):
            value, ends = _best_cut(layers, pipe, score, join)
            every = [
                (fold(score(r, *cut) for r, cut in enumerate(c)), tuple(e for _, e in c))
                for c in all_cuts(layers, pipe)
            ]
            assert value == min(every)[0] and (value, ends) in every
            if join is not max:
                assert (value, ends) == min(every)


def test_equal_costs_are_cut_evenly():
    """Ten equal layers on four ranks: three is the most however they are cut, but 3, 3, 3, 1 is the less even way."""
    config = replace(FLASH, num_hidden_layers=10, compress_ratios=(0,) * 10, num_hash_layers=0)
    plan = plan_stages(config, None, 4, rows=64, context=2)
    assert plan.ranges == ((0, 2), (2, 5), (5, 8), (8, 10))
    uneven = given_stages(config, None, "3,3,3,1", rows=64, context=2)
    assert uneven.tick_seconds == pytest.approx(plan.tick_seconds, rel=1e-9)


@pytest.mark.parametrize(("pipe", "expert"), [(2, 1), (4, 1), (2, 4), (4, 2)])
@pytest.mark.parametrize("model", [v4_flash, v4_pro])
def test_published_models_are_balanced(model, pipe, expert):
    plan = plan_stages(*model(), pipe, rows=48 * expert, context=8192, expert=expert)
    assert plan.balance >= 0.94  # a layer is 2 to 3 % of the whole
    counts = [end - first for first, end in plan.ranges]
    assert counts[-1] == min(counts) < max(counts)  # the last rank drafts
    assert sum(plan.share) == pytest.approx(1) and max(plan.positions) - min(plan.positions) <= 2


# -- costs -----------------------------------------------------------------------------------------------------------------


def test_active_experts():
    assert active_experts(FLASH, 1) == pytest.approx(6)
    assert active_experts(FLASH, 8) == pytest.approx(44.3, abs=0.1) and active_experts(FLASH, 10**5) == pytest.approx(
        256
    )
    rng = np.random.default_rng(1)
    seen = [len({e for _ in range(8) for e in rng.choice(256, 6, replace=False)}) for _ in range(400)]
    assert np.mean(seen) == pytest.approx(active_experts(FLASH, 8), rel=0.02)


# Rates and counts of these tests, so that the defaults can follow measurements.
MODEL = CostModel(
    read_bandwidth=4.19e12,
    matmul_rate=766e12,
    overlap=1,
    launch=5e-6,
    layer_launches=20,
    compressor_launches=3,
    indexer_launches=12,
    head_launches=8,
    step_launches=5,
    logit_passes=8,
    head_passes=0,
    block_spread=1,
    grouped_experts=True,
)

# A window layer of V4-Flash that one row passes, in parameters by hand: bf16, then fp32.
ATTENTION = 4096 * 1024 + 1024 * 64 * 512 + 4096 * 512 + 64 * 512 * 1024 + 8 * 1024 * 4096 + 1024 + 512
BF16 = ATTENTION + 4096 * 256 + 3 * 4096 * 2048 * (6 + 1) + 2 * 4096
FP32 = 64 + 2 * (4 * 4096 * 24 + 24 + 3) + 256
ONE_KIND = replace(FLASH, num_hash_layers=0)


def test_a_layer_costs_its_bytes():
    reading = replace(MODEL, read_bandwidth=1.0, matmul_rate=1e30, launch=0.0)
    load = Workload(rows=1, context=64)
    window = 64 * 512
    plain = reading.layer(ONE_KIND, None, 0, load)
    assert plain == pytest.approx(2 * (BF16 + window) + 4 * FP32, rel=1e-12)
    tapped = reading.layer(ONE_KIND, replace(FLASH_DRAFT, target_layer_ids=(0,)), 0, load)
    assert tapped - plain == pytest.approx(2 * 4096 * 4096)


def test_a_layer_costs_its_products():
    computing = replace(MODEL, read_bandwidth=1e30, matmul_rate=1.0, launch=0.0)
    one, two = (computing.layer(ONE_KIND, None, 0, Workload(rows, 64)) for rows in (1, 2))
    assert one == pytest.approx(2 * (BF16 + FP32) + 4 * 64 * 512 * 64, rel=1e-12) and two == pytest.approx(2 * one)
    dense = replace(computing, grouped_experts=False).layer(ONE_KIND, None, 0, Workload(1, 64))
    assert dense - one == pytest.approx(2 * 250 * 3 * 4096 * 2048)
    assert computing.experts(ONE_KIND, Workload(1, 64)) == pytest.approx(2 * 6 * 3 * 4096 * 2048)


def test_reading_and_computing_overlap():
    """Both times of equal length take 2^(1/p) of one; a short one beside a long one hardly counts."""
    for p in (1.0, 2.0, 4.0):
        model = replace(MODEL, read_bandwidth=1.0, matmul_rate=1.0, overlap=p)
        assert model.seconds([Work(3.0, 0.0), Work(0.0, 3.0)], 0) == pytest.approx(3 * 2 ** (1 / p))
    assert model.seconds([Work(10.0, 1.0)], 0) < 10.001 and model.seconds([], 2) == pytest.approx(2 * model.launch)


def test_a_layer_costs_its_launches():
    launching = replace(MODEL, read_bandwidth=1e30, matmul_rate=1e30, launch=1.0)
    kinds = [launching.layer(FLASH, None, index, Workload(1, 64)) for index in (0, 3, 2)]
    assert kinds == pytest.approx([20, 23, 35])


def test_costs_follow_kind_rows_context_and_ranks():
    model, draft = MODEL, FLASH_DRAFT

    def layer(index, **changes):
        return model.layer(FLASH, draft, index, replace(Workload(48, 8192), **changes))

    assert layer(4) > layer(3) > layer(1)  # with an indexer, with a compressor, with neither
    assert layer(4, context=10**6) > 1.05 * layer(4) and layer(3, context=10**6) > layer(3)
    assert layer(1, context=10**6) == layer(1)
    assert layer(1, rows=96) > 1.2 * layer(1) and layer(1, dtype="float32") > 1.9 * layer(1)
    assert layer(4, expert=4) < 0.5 * layer(4)
    dense = replace(model, grouped_experts=False).layer(FLASH, draft, 1, Workload(48, 8192))
    assert dense > 1.3 * layer(1)
    load = Workload(48, 8192)
    drafter = model.drafter(FLASH, draft, load)
    assert drafter > 3 * layer(1, rows=40) and drafter > model.drafter(FLASH, replace(draft, head="none"), load)
    # Rows of a block that stay together visit no more experts than the anchors do, and still pass the products.
    together = replace(model, block_spread=0.0)
    saved = active_experts(FLASH, 40) - active_experts(FLASH, 8)
    bound = 3 * saved * 3 * 4096 * 2048 * 2 / model.read_bandwidth
    assert drafter - together.drafter(FLASH, draft, load) == pytest.approx(bound, rel=0.01)
    # Each pass over the fp32 heads of 48 rows is read by every layer and, of 40 rows, by every stage.
    passes = replace(model, head_passes=1)
    width = 64 * 512 * 4 / model.read_bandwidth
    assert passes.layer(FLASH, draft, 1, load) - layer(1) == pytest.approx(48 * width, rel=0.01)
    assert passes.drafter(FLASH, draft, load) - drafter == pytest.approx(3 * 40 * width, rel=0.01)
    # Five steps read markov_w2, whatever the number of expert ranks.
    reading = replace(MODEL, matmul_rate=1e30)
    for expert in (1, 4):
        heads = (draft, replace(draft, head="none"))
        full, none = (reading.drafter(FLASH, head, replace(load, expert=expert)) for head in heads)
        assert full - none == pytest.approx(5 * 129280 * 256 * 2 / model.read_bandwidth, rel=0.01)
    assert model.head(FLASH, draft, load) > 129280 * 4096 * 2 / model.read_bandwidth


def test_ends_are_costed_on_the_last_rank_alone():
    plan = plan_stages(FLASH, FLASH_DRAFT, 4, **TICK)
    assert all(cost.head == cost.drafter == 0 for cost in plan.costs[:-1])
    assert plan.costs[-1].head > 0 and plan.costs[-1].drafter > 0
    assert plan_stages(FLASH, None, 4, **TICK).costs[-1].drafter == 0
    found = plan.as_dict()
    assert [r["total"] for r in found["ranks"]] == [c.total for c in plan.costs]
    assert found["balance"] == plan.balance and found["memory"]["padding"] == list(plan.memory.padding)


# -- the user's cuts and refusals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stages", "ranges"),
    [
        ("0-20,21-42", ((0, 21), (21, 43))),
        (" 0 - 20 , 21-42", ((0, 21), (21, 43))),
        ("21,22", ((0, 21), (21, 43))),
        ("43", ((0, 43),)),
        ("0-42", ((0, 43),)),
        ([(0, 1), (1, 43)], ((0, 1), (1, 43))),
    ],
)
def test_given_stages(stages, ranges):
    plan = given_stages(FLASH, FLASH_DRAFT, stages, len(ranges), **TICK)
    assert plan.ranges == ranges and plan.draft_stages == 3
    assert plan == given_stages(FLASH, FLASH_DRAFT, ranges, **TICK)
    assert parse_stages("1,42", 43) == (((0, 1), (1, 43)), [])


@pytest.mark.parametrize(
    ("stages", "pipe", "messages"),
    [
        ("0-20,22-42", 2, ["layer 21 in front of rank 1 is on no rank"]),
        ("0-20,20-42", 2, ["rank 1 begins at layer 20, but layers up to 20 are on ranks before it"]),
        ("0-20,21-41", 2, ["layer 42 behind the last rank is on no rank"]),
        ("0-20,21-43", 2, ["rank 1 (21-43) is out of range; the model has layers 0-42"]),
        ("21-42,0-20", 2, ["layers 0-20 in front of rank 0", "rank 1 begins at layer 0, but"]),
        ("0-20,30-25,21-42", 3, ["rank 1 (30-25) has no layer"]),
        (
            "1-20,22-50",
            3,
            ["layer 0 in front", "layer 21 in front", "out of range", "2 stages given for 3 pipe"],
        ),
        ("21,21", 2, ["the layer counts [21, 21] sum to 42; the model has 43 layers"]),
        ("0,44", 2, ["rank 0 has no layer", "sum to 44"]),
        ("21,21-42", 2, ["'21,21-42' mixes layer ranges and layer counts; expected either 0-20,21-42 or 21,22"]),
        ("0-20,rest", 2, ["'rest' is no range of layers"]),
        ("", 1, ["'' is no range of layers"]),
        ("-1,44", 2, ["'-1,44' mixes layer ranges and layer counts"]),
        ([], 1, ["layers 0-42 behind the last rank"]),
        ([(-1, 43)], 1, ["rank 0 (-1-42) is out of range"]),
        (
            "43",
            44,
            ["44 pipe ranks for 43 layers; expected at most one rank a layer", "1 stages given for 44 pipe ranks"],
        ),
    ],
)
def test_impossible_stages_are_refused_with_all_reasons(stages, pipe, messages):
    with pytest.raises(ConfigError) as error:
        given_stages(FLASH, FLASH_DRAFT, stages, pipe, **TICK)
    text = str(error.value)
    assert text.startswith("stages: ") and all(message in text for message in messages), text
    assert text.count("\n  - ") == (len(messages) if len(messages) > 1 else 0), text


def test_everything_else_that_is_impossible_is_refused_at_once():
    with pytest.raises(ConfigError) as error:
        plan_stages(
            SIX, replace(SIX_DRAFT, target_layer_ids=(6,)), 7, rows=0, context=33, expert=3, chunk=0, dtype="int8"
        )
    for part in (
        "stages: 7 faults",
        "7 pipe ranks for 6 layers",
        "dspark_target_layer_ids is [6]",
        "expert is 3; expected a divisor of the model's 4 routed experts",
        "rows is 0; expected at least 1",
        "chunk is 0; expected at least 1",
        "context is 33; expected 2 … 32",
        "dtype is 'int8'; expected float32, bfloat16, float16",
    ):
        assert part in str(error.value)
    with pytest.raises(ConfigError, match="pipe is 0; expected at least 1"):
        plan_stages(SIX, None, 0, rows=1, context=2)


def test_impossible_rates_are_refused():
    with pytest.raises(ConfigError) as error:
        CostModel(read_bandwidth=0, matmul_rate=math.inf, launch=-1)
    for part in (
        "3 faults",
        "read_bandwidth is 0; expected a number above 0",
        "launch is -1; expected a number of at least 0",
    ):
        assert part in str(error.value)
