"""A placement in the compiled program that runs the kernels, interpreted: the references' tokens without a placement."""

import collections
from dataclasses import replace

import numpy as np
import pytest

from dspark_jax import LM, Engine
from dspark_jax.checkpoint.layout import skeleton
from dspark_jax.parallel.mesh import make_mesh
from dspark_kernels import draft_head, expert_mlp, hyper_connection, routing
from helpers import placed_model
from helpers.checkpoints import random_params
from helpers.jaxprs import equations
from helpers.placed_model import GAMMA, MAX_LEN, TOP, outputs, same, shuffled

# As small as the kernels of all operations allow: widths of 128, a draft head of rank 16. A hash layer and a scored one,
# and a draft stage.
CONFIG = replace(placed_model.CONFIG, hidden_size=128, moe_intermediate_size=128)
DRAFT = replace(placed_model.DRAFT, num_stages=1, markov_rank=16)
LAYERS = CONFIG.num_hidden_layers + DRAFT.num_stages


@pytest.fixture(scope="module")
def lm() -> LM:
    graph, _ = skeleton(CONFIG, DRAFT, dtype=np.float32, axis="expert")
    return LM(CONFIG, DRAFT, graph, random_params(CONFIG, DRAFT, 6), placed_model.Letters(), max_len=MAX_LEN)


def engine(lm: LM, **options) -> Engine:
    return Engine(lm, mesh=make_mesh(1, 2), slots=4, chunk=GAMMA + 1, max_len=MAX_LEN, max_logprobs=TOP, **options)


@pytest.mark.long
def test_kernels_with_baked_tables_give_the_references_tokens(lm: LM, monkeypatch):
    expected = outputs(engine(lm))
    assert sum(sum(accepted) for *_, accepted, _ in expected.exact) > 3 and np.ptp(expected.law) > 1

    def kernel(implementation, unsuited):
        assert unsuited is None and implementation in (None, "interpret"), unsuited
        return "interpret"

    for operation in (routing, expert_mlp, hyper_connection, draft_head):
        monkeypatch.setattr(operation.api, "choose", kernel)
    placed = engine(lm, placement=shuffled(2, layers=LAYERS))
    same(outputs(placed), expected)

    ring = placed.ring
    jaxpr = ring.step.trace(ring.pipeline.abstract(ring.mesh), placed._state, ring.place_control(ring.idle_control())).jaxpr
    calls = collections.Counter(e.params["name"] for e in equations(jaxpr.jaxpr) if e.primitive.name == "pallas_call")
    for name in ("route_select", "route_place", "expert_gate_up", "expert_down"):
        assert calls[name] == LAYERS, name  # prompts and rounds have rows of one width
    assert calls["hyper_expand"] == 2 * LAYERS and calls["draft_bias"] > 0
