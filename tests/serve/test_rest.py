"""Resting on the mesh: greedy text stays the target's own while rounds come and go between drafting and plain steps."""

import functools

import jax
import jax.monitoring
import numpy as np
import pytest

from dspark_jax.decode.schedule import Schedule, StaleRate, StepCost
from dspark_jax.decode.state import RUNNING
from dspark_jax.parallel.mesh import make_mesh
from dspark_jax.serve.engine import Engine
from helpers.scheduled_model import CONFIG, DRAFT, GAMMA, MAX_LEN, SLOTS, TOP, check_plain, lm, requests

COUNTED = 10_000


def schedule(slots: int) -> Schedule:
    """For so many slots of a microbatch on an expert rank: drafting pays where confidences are high."""
    cost = StepCost(tuple(1 + 0.05 * n for n in range(slots * (GAMMA + 1) + 1)), plain=(0.42,))
    return Schedule(StaleRate(cost, memory=1, probe=4), (0.5, 1.5, 3.0))


@functools.cache
def engine(pipe: int, expert: int) -> Engine:
    """With a bucket of the anchors alone; rows of experts are counted, draft stages too."""
    slots = SLOTS // expert
    return Engine(
        lm(), mesh=make_mesh(pipe, expert), slots=SLOTS * pipe, chunk=GAMMA + 1, max_len=MAX_LEN, max_logprobs=TOP,
        scheduler=schedule(slots), buckets=[slots], count_experts=(0, COUNTED),
    )  # fmt: skip


@pytest.mark.parametrize("mesh", [(2, 2), *(pytest.param(m, marks=pytest.mark.long) for m in ((1, 1), (2, 1), (1, 2)))])
def test_the_text_is_plain_decodings_and_nothing_compiles(mesh):
    e, compiled = engine(*mesh), []
    e.warmup()
    e.timeline.clear()

    def listen(event: str, *_, **__) -> None:
        if "backend_compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        prompts, params = zip(*requests(), strict=True)
        found = e.generate(list(prompts), list(params), ignore_eos=True)
    finally:
        jax.monitoring.clear_event_listeners()
    assert compiled == []
    check_plain(found)
    rested, rounds = (sum(getattr(c, f) for c in found) for f in ("rested_rounds", "rounds"))
    assert 0.1 * rounds < rested < 0.9 * rounds and sum(sum(c.drafted) for c in found) > 5, (rested, rounds)
    for c in found:
        assert sum(n == 0 for n in c.verify_lengths) >= c.rested_rounds
    # A microbatch that rests has its anchors alone, on every pipe rank.
    anchors = min(e.ring.buckets)
    assert sum(tick.bucket == (anchors,) * mesh[0] for tick in e.timeline) > 5


def test_the_drafters_experts_have_no_rows_while_it_rests():
    """Where a request drafts, each of its block's rows goes to `num_experts_per_tok` experts of every draft stage."""
    e = engine(2, 2)
    e.warmup()
    outputs, run = [], e._run

    def keep(step, record):
        outputs.append(run(step, record))
        return outputs[-1]

    e._run = keep  # type: ignore[method-assign]
    try:
        prompts, params = zip(*requests(), strict=True)
        e.generate(list(prompts), list(params), ignore_eos=True)
    finally:
        e._run = run  # type: ignore[method-assign]
    host = jax.device_get(outputs)
    emission = [jax.tree.map(lambda x: x[-1], o.emission) for o in host]
    going_on = np.concatenate([(x.count > 0) & (x.reason == RUNNING) for x in emission])
    rested = np.concatenate([x.rested for x in emission]).astype(bool)
    positions = e.ring.spec.expert_layers[-1]
    counts = np.concatenate([o.expert_counts[-1] for o in host])
    counts = counts.reshape(len(counts), 2, -1, counts.shape[-1])[:, :, positions.index(CONFIG.num_hidden_layers)].sum((1, 2))
    drafting = (going_on & ~rested).sum(axis=1)
    np.testing.assert_array_equal(counts, drafting * GAMMA * CONFIG.num_experts_per_tok)
    assert (rested.any(axis=1) & (drafting == 0)).sum() > 5 and (drafting > 0).sum() > 5 and DRAFT.num_stages == 1
    assert not (rested.any(axis=1) & (drafting > 0)).any()  # all of a microbatch, on all expert ranks, or none
