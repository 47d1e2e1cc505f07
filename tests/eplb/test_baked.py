"""A placement in the compiled program: the same tokens and logits wherever the experts are, target and drafter alike."""

import json
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from dspark_jax.config import to_hf
from dspark_jax.eplb import Placement, PlacementNotice
from dspark_jax.eplb.placement import PlacedLayer
from dspark_jax.errors import ConfigError
from dspark_jax.models.moe import MoE, Routed
from dspark_jax.parallel.mesh import EXPERT, make_mesh
from dspark_jax.parallel.planner import plan_stages
from dspark_jax.parallel.ring import Ring, RingConfig
from dspark_jax.parallel.stage import PipelineSpec
from dspark_jax.serve.engine import Engine
from helpers.jaxprs import equations
from helpers.placed_model import (
    CONFIG,
    DRAFT,
    EXPERTS,
    LAYERS,
    MAX_LEN,
    PLACEMENTS,
    base_outputs,
    lm,
    make_engine,
    outputs,
    read,
    requests,
    rotated,
    same,
    shuffled,
)

LARGER = [pytest.param(*mesh, marks=pytest.mark.long) for mesh in ((1, 4), (2, 2), (2, 4))]


def test_the_requests_draft_and_accept():
    found = base_outputs(1, 2)
    assert sum(sum(accepted) for *_, accepted, _ in found.exact) > 3
    assert len({len(tokens) for tokens, *_ in found.exact}) > 4 and np.ptp(found.law) > 1


@pytest.mark.parametrize(
    ("pipe", "expert", "names"),
    [
        # The program without a placement is `base_engine`'s; test_relayout.py has weights laid out from the host's.
        (1, 2, ["none", "rotated"]),
        *(pytest.param(*mesh, [*PLACEMENTS], marks=pytest.mark.long) for mesh in ((1, 2), (1, 4), (2, 2), (2, 4))),
    ],
)
def test_placements_give_the_same_tokens_and_logits_also_when_they_change_in_flight(pipe, expert, names):
    """The first placement is laid out from the host's weights, the others from those of the running engine."""
    expected = base_outputs(pipe, expert)
    first, *others = ((PLACEMENTS | {"none": lambda ranks: None})[name] for name in names)
    engine = make_engine(pipe, expert, placement=first(expert), count_experts=(0, 10**6))
    same(outputs(engine), expected)
    for make in others:
        prompts, params = requests()
        keys = [engine.submit(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
        for _ in range(4):
            engine.step()
        assert engine._scheduler.running and engine._scheduler.waiting
        engine.set_placement(make(expert))
        same(read(engine, [engine.result(key) for key in keys]), expected)
        assert engine.placement == make(expert)
        same(outputs(engine), expected)


@pytest.mark.parametrize(("pipe", "expert"), LARGER)
@pytest.mark.parametrize("name", ["random", "auto"])
def test_every_placement_from_the_hosts_weights(pipe, expert, name):
    same(outputs(make_engine(pipe, expert, placement=PLACEMENTS[name](expert))), base_outputs(pipe, expert))


def test_each_layer_and_stage_has_its_own_tables_and_weights():
    """Weights by slot are those of the layer whose tables the stage's program holds: draft stages are layers L + s."""
    engine = Engine(lm(), mesh=make_mesh(2, 2), slots=4, max_len=MAX_LEN, placement=shuffled(2))
    pipeline, whole = engine.ring.pipeline, lm()._params
    layers = {0: whole["target"]["layers"][0], 1: whole["target"]["layers"][1]}
    layers |= {LAYERS.num_hidden_layers + s: whole["draft"]["mtp"][s] for s in range(DRAFT.num_stages)}
    seen = []
    for rank in range(2):
        stage = pipeline.stage({key: np.asarray(leaf)[rank] for key, leaf in engine._params.items()}, rank)
        for block in [*stage.layers, *(stage.draft.mtp if stage.draft else ())]:
            placed = block.ffn.placed
            seen.append(placed.index)
            for name in ("w1", "w3", "w2"):
                expected = np.asarray(layers[placed.index]["ffn"]["experts"][name].get_value())
                by_slot = np.asarray(getattr(block.ffn.experts, name)[...])
                np.testing.assert_array_equal(by_slot, expected[shuffled(2).slot_to_expert[placed.index]])
    assert seen == [*range(LAYERS.num_layers)] and engine.ring.spec.expert_layers == ((0,), (1, 2, 3))


def test_the_planned_memory_counts_slots():
    engine = Engine(lm(), mesh=make_mesh(1, 2), slots=4, max_len=MAX_LEN, placement=rotated(2))
    assert engine.plan.memory.parameters == sum(x.addressable_shards[0].data.nbytes for x in engine._params.values())


def test_the_stage_planner_names_slots_that_do_not_divide():
    sizes: dict[str, Any] = {"rows": 4, "context": MAX_LEN, "expert": 4}
    assert plan_stages(CONFIG, DRAFT, 1, **sizes, num_slots=12).memory.parameters > 0
    for slots in (4, 10):
        with pytest.raises(ConfigError, match=f"num_slots is {slots}; expected at least 8"):
            plan_stages(CONFIG, DRAFT, 1, **sizes, num_slots=slots)


def test_tables_are_as_wide_as_the_layer_needs():
    """A layer pays for its own largest replica count, whatever the other layers have."""
    once, often = [*range(EXPERTS), 0, 1], [*range(EXPERTS), 5, 5]
    placement = Placement(np.array([once, often]), EXPERTS, 2)
    assert [PlacedLayer(placement, i).tables.expert_slots.shape for i in (0, 1)] == [(EXPERTS, 2), (EXPERTS, 3)]
    assert PlacedLayer(placement, 0) == PlacedLayer(Placement(np.array([once, often]), EXPERTS, 2), 0)
    assert PlacedLayer(placement, 0) != PlacedLayer(placement, 1)


def slots_of_rows(placed: PlacedLayer, tokens: np.ndarray, table: np.ndarray, ranks: int) -> np.ndarray:
    """Whether a slot computes a row, [B, slots], seen from outside: w2 of slot s writes to channel s alone.

    Row i has token i; the experts of a token are those of its line of `table`. Negative tokens are padding.
    """
    slots, config = placed.num_slots, CONFIG
    moe = MoE(config, True, placed, rngs=nnx.Rngs(0))
    nnx.update(moe.shared_experts, jax.tree.map(jnp.zeros_like, nnx.state(moe.shared_experts)))
    assert slots <= config.hidden_size and moe.gate.tid2eid is not None
    moe.experts.w2[...] = jnp.broadcast_to(jnp.eye(slots, config.hidden_size)[:, None], moe.experts.w2.shape)
    moe.gate.tid2eid[...] = jnp.asarray(table, jnp.int32)
    graph, params = nnx.split(moe)
    specs = jax.tree_util.tree_map_with_path(
        lambda path, _: PartitionSpec(EXPERT) if "experts" in {getattr(k, "key", None) for k in path} else PartitionSpec(),
        params,
    )

    def run(params, tokens):
        x = jnp.ones((len(tokens), config.hidden_size))
        return nnx.merge(graph, params)(x, tokens, tokens >= 0, EXPERT)[0]

    mapped = jax.shard_map(
        run, mesh=make_mesh(1, ranks), in_specs=(specs, PartitionSpec(EXPERT)), out_specs=PartitionSpec(EXPERT),
        check_vma=False,
    )  # fmt: skip
    return np.asarray(jax.jit(mapped)(params, jnp.asarray(tokens))) != 0


def test_replicas_share_the_rows_of_a_hot_expert():
    """Within a block the rows of an expert's slots differ by at most one; each rank begins with another replica."""
    slots = [0, 3, 1, 3, 2, 3, 4, 5, 3, 6, 7, 3]  # five replicas of expert 3, on both ranks
    placed = PlacedLayer(Placement(np.array([slots]), EXPERTS, 2), 0)
    rng = np.random.default_rng(1)
    every = np.tile(np.arange(EXPERTS), (CONFIG.vocab_size, 1))
    table = rng.permuted(every, axis=1)[:, : CONFIG.num_experts_per_tok]
    table[:, 0] = np.where((table == 3).any(axis=1), table[:, 0], 3)  # expert 3 in every row
    tokens = rng.integers(0, CONFIG.vocab_size, 48).astype(np.int32)
    tokens[::7] = -1
    used = slots_of_rows(placed, tokens, table, ranks=2)
    chosen = [set(table[t]) if t >= 0 else set() for t in tokens]
    for row, experts in zip(used, chosen, strict=True):
        assert {slots[s] for s in np.flatnonzero(row)} == experts and row.sum() == len(experts)
    hot = [s for s, expert in enumerate(slots) if expert == 3]
    firsts = []
    for own in (used[:24, hot], used[24:, hot]):
        rows = own.sum(0)
        assert rows.sum() > 10 and rows.max() - rows.min() <= 1
        firsts.append(int(np.argmax(own[own.any(1)][0])))
    assert firsts == [0, 1]


def traced(**options):
    """The ring's program as JAX traces it."""
    placement = options.pop("placement", None)
    spec = PipelineSpec(CONFIG, DRAFT, ((0, 2),), 2, placement=placement)
    ring = Ring(spec, lm()._params, make_mesh(1, 2), RingConfig(slots=4, max_len=MAX_LEN, chunk=2, **options))
    state, record = jax.eval_shape(ring.init_state), ring.idle_control()
    return ring.step.trace(ring.pipeline.abstract(ring.mesh), state, record)


def sums_over_rows(jaxpr) -> int:
    """Equations that add something up by expert."""
    found = [e for e in equations(jaxpr) if e.primitive.name == "reduce_sum"]
    return sum(e.outvars[0].aval.shape == (EXPERTS,) for e in found)


def test_without_placement_and_counting_the_program_has_neither_tables_nor_counters(monkeypatch):
    on = traced(placement=rotated(2), count_experts=True)
    assert sums_over_rows(on.jaxpr.jaxpr) == LAYERS.num_layers  # one for each layer and stage
    assert on.out_info[1].expert_counts.shape == (1, 1, 2 * LAYERS.num_layers, EXPERTS)

    def unwanted(*_, **__):
        raise AssertionError("not in this program")

    monkeypatch.setattr("dspark_jax.models.moe.choose_slots", unwanted)
    monkeypatch.setattr(Routed, "load", unwanted)
    off = traced()
    assert sums_over_rows(off.jaxpr.jaxpr) == 0 and off.out_info[1].expert_counts is None
    with pytest.raises(AssertionError, match="not in this program"):
        traced(placement=rotated(2))
    with pytest.raises(AssertionError, match="not in this program"):
        traced(count_experts=True)


def test_an_impossible_placement_is_refused_before_weights_are_read_or_devices_touched(tmp_path, monkeypatch):
    """On 8 devices, as one error, in under two seconds; the folder has no weights at all."""
    (tmp_path / "config.json").write_text(json.dumps(to_hf(CONFIG, DRAFT)))
    models = (tmp_path, lm())

    def unwanted(*_, **__):
        raise AssertionError("a device was touched")

    for name in ("device_put", "make_array_from_callback", "device_get"):
        monkeypatch.setattr(jax, name, unwanted)
    bad = {"num_slots": 9, "initial_global_assignments": {0: [0] * 9, 1: list(range(8))}, "layer_updates_per_iter": 2}
    for model in models:
        begin = time.perf_counter()
        with pytest.raises(ConfigError) as error:
            Engine(model, mesh=make_mesh(2, 4), placement=bad)
        assert time.perf_counter() - begin < 2
        for words in ("num_slots is 9; expected a multiple of the 4", "experts [1, 2, 3", "static EPLB only", "[2, 3]"):
            assert words in str(error.value)
    other = Placement.auto(LAYERS.num_layers, EXPERTS, 8, 2)
    with pytest.raises(ConfigError, match="the placement was made with expert_ranks = 2; expected 4"):
        Engine(lm(), mesh=make_mesh(2, 4), placement=other)


def test_with_one_expert_rank_a_placement_has_no_effect_and_one_warning():
    with pytest.warns(PlacementNotice, match="there is one expert rank") as seen:
        engine = Engine(lm(), mesh=make_mesh(2, 1), slots=2, max_len=MAX_LEN, placement={"num_slots": 3})
    assert len(seen) == 1 and engine.placement is None


def test_without_its_drafter_a_model_takes_the_same_file():
    with pytest.warns(PlacementNotice, match=r"has layers \[2, 3\], which are ignored"):
        engine = Engine(lm(), mesh=make_mesh(1, 2), slots=2, max_len=MAX_LEN, speculate=False, placement=rotated(2))
    assert engine.placement is not None and engine.placement.num_layers == 2
    with pytest.raises(ConfigError, match="num_slots is 5"):
        engine.set_placement({"num_slots": 5})
    assert engine.placement.num_slots == EXPERTS + 8


def test_experts_need_not_divide_among_the_ranks():
    """Slots must: 8 experts on 3 ranks are 9 slots, and impossible without a placement."""
    with pytest.raises(ConfigError, match="expert is 3; expected a divisor of the model's 8 routed experts"):
        Engine(lm(), mesh=make_mesh(1, 3), slots=3, max_len=MAX_LEN)
    engine = Engine(lm(), mesh=make_mesh(1, 3), slots=3, max_len=MAX_LEN, placement={"num_slots": 9})
    assert engine.placement is not None and engine.placement.slots_per_rank == 3
