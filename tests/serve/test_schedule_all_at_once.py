"""Mesh 2x4, replicated experts, an early stop, prompts in chunks and aborts at once: the text stays plain decoding's."""

import functools

import jax
import numpy as np
import pytest

from dspark_jax.decode.sampling import SamplingParams
from dspark_jax.decode.schedule import EarlyStop, Schedule, StaleSize, StepCost
from dspark_jax.eplb import ExpertLayers, Placement
from dspark_jax.parallel.mesh import make_mesh
from dspark_jax.serve.engine import Engine
from helpers.mesh_model import CONFIG, DRAFT, GAMMA, MAX_LEN, VOCAB, lm

SLOTS = 16
COST = StepCost(tuple(1 + 0.05 * n for n in range(20)))
SCHEDULES = {"early stop": EarlyStop(COST), "stale size": StaleSize(COST)}


@functools.cache
def requests() -> list[tuple[list[int], SamplingParams]]:
    """Greedy, ragged, most prompts of several chunks, some with stop tokens."""
    rng = np.random.default_rng(4)
    found = []
    for i in range(40):
        prompt = rng.integers(0, VOCAB, int(rng.integers(1, 30))).tolist()
        stop = tuple(rng.integers(0, VOCAB, 2).tolist()) if i % 3 == 2 else ()
        found.append((prompt, SamplingParams(max_tokens=int(rng.integers(4, 30)), stop_token_ids=stop)))
    return found


@functools.cache
def plain() -> list[tuple[tuple[int, ...], str]]:
    """One token a round on one device."""
    prompts, params = zip(*requests(), strict=True)
    return [(c.tokens, c.finish_reason) for c in lm().generate(prompts, params, speculate=False)]


@pytest.mark.long
@pytest.mark.parametrize("name", SCHEDULES)
def test_all_at_once(name):
    layers = ExpertLayers.of(CONFIG, DRAFT)
    rng = np.random.default_rng(7)  # every expert once, and four replicas, in random order, another in every layer
    rows = [rng.permutation([*range(8), *rng.integers(0, 8, 4)]) for _ in range(layers.num_layers)]
    placed = Placement(np.array(rows), 8, 4)
    e = Engine(
        lm(), mesh=make_mesh(2, 4), slots=SLOTS, chunk=5, max_len=MAX_LEN, placement=placed,
        scheduler=Schedule(SCHEDULES[name], (0.05,) * GAMMA),
    )  # fmt: skip
    e.warmup()
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event) if "backend_compile" in event else None
    )
    try:
        waiting = list(enumerate(requests()))
        keys, lengths = {}, {}
        while waiting or e.busy:
            if waiting and rng.random() < 0.5:
                i, (prompt, params) = waiting.pop(0)
                keys[e.submit(prompt, params)] = i
            running = [key for key in keys if e._entries[key].finish_reason is None]
            if running and rng.random() < 0.1:
                key = running[int(rng.integers(len(running)))]
                e.abort(key)
                del keys[key]
            for key, output in e.step():
                if output.round:
                    lengths.setdefault(key, []).append(output.verified)
    finally:
        jax.monitoring.clear_event_listeners()
    answers = {i: e.result(key) for key, i in keys.items()}
    different = [i for i, a in answers.items() if (a.tokens, a.finish_reason) != plain()[i]]
    changes = [a != b for n in lengths.values() for a, b in zip(n, n[1:], strict=False)]
    buckets = {b for tick in e.timeline for b in tick.bucket or ()}
    print(f"{len(answers)} answers, {sum(changes)} of {len(changes)} lengths changed, buckets {sorted(buckets)}")
    assert 20 < len(answers) < len(requests()) - 3 and different == []
    assert compiled == [] and np.mean(changes) > 0.1 and len(buckets) >= 3
