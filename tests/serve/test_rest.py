"""Resting on the mesh: greedy text stays the target's own while rounds come and go between drafting and plain steps."""

import jax
import jax.monitoring
import numpy as np
import pytest

from dspark_jax.decode.schedule import Schedule, StaleRate, StepCost
from dspark_jax.decode.state import RUNNING
from dspark_jax.parallel.mesh import make_mesh
from dspark_jax.serve.engine import Engine
from helpers.scheduled_model import CONFIG, GAMMA, MAX_LEN, SLOTS, TOP, check_plain, lm, requests


@pytest.mark.parametrize("mesh", [(2, 2), *(pytest.param(m, marks=pytest.mark.long) for m in ((1, 1), (2, 1), (1, 2)))])
def test_the_text_is_plain_decodings_and_the_drafter_does_not_run(mesh, monkeypatch):
    """With a bucket of the anchors alone, and counted experts: a draft stage has rows where requests draft."""
    pipe, expert = mesh
    slots, compiled, outputs = SLOTS // expert, [], []
    cost = StepCost(tuple(1 + 0.05 * n for n in range(slots * (GAMMA + 1) + 1)), plain=(0.42,))
    e = Engine(
        lm(), mesh=make_mesh(*mesh), slots=SLOTS * pipe, chunk=GAMMA + 1, max_len=MAX_LEN, max_logprobs=TOP,
        scheduler=Schedule(StaleRate(cost, memory=1, probe=4), (0.5, 1.5, 3.0)), buckets=[slots], count_experts=(0, 10_000),
    )  # fmt: skip
    e.warmup()
    run = e._run
    monkeypatch.setattr(e, "_run", lambda *call: outputs.append(run(*call)) or outputs[-1])
    prompts, params = zip(*requests(), strict=True)
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: compiled.append(event))
    try:
        found = e.generate(list(prompts), list(params), ignore_eos=True)
    finally:
        jax.monitoring.clear_event_listeners()
    assert not [event for event in compiled if "backend_compile" in event]
    check_plain(found)
    rested, rounds = (sum(getattr(c, f) for c in found) for f in ("rested_rounds", "rounds"))
    assert 0.1 * rounds < rested < 0.9 * rounds and sum(sum(c.drafted) for c in found) > 5, (rested, rounds)
    assert all(c.verify_lengths.count(0) >= c.rested_rounds for c in found)
    assert sum(tick.bucket == (slots,) * pipe for tick in e.timeline) > 5  # anchors alone, on every pipe rank
    # All of a microbatch rest, on all expert ranks, or none; the stage's experts have rows for those that draft alone.
    host = jax.device_get(outputs)
    count, reason, rests = (np.concatenate([getattr(o.emission, f)[-1] for o in host]) for f in ("count", "reason", "rested"))
    drafting = ((count > 0) & (reason == RUNNING) & (rests == 0)).sum(axis=1)
    resting = rests.any(axis=1)
    assert (resting & (drafting == 0)).sum() > 5 and (drafting > 0).sum() > 5 and not (resting & (drafting > 0)).any()
    counts = np.concatenate([o.expert_counts[-1] for o in host])
    stage = e.ring.spec.expert_layers[-1].index(CONFIG.num_hidden_layers)
    counts = counts.reshape(len(counts), expert, -1, counts.shape[-1])[:, :, stage].sum((1, 2))
    np.testing.assert_array_equal(counts, drafting * GAMMA * CONFIG.num_experts_per_tok)
