"""Schedulers on the mesh: greedy text stays the target's own while lengths and buckets change from round to round."""

import dataclasses

import jax
import jax.monitoring
import numpy as np
import pytest

from dspark_jax.parallel.mesh import EXPERT
from dspark_jax.parallel.ring import Ring
from helpers.scheduled_model import GAMMA, NAMES, SLOTS, check_plain, chosen, engine, requests

MESHES = [(2, 2), *(pytest.param(mesh, marks=pytest.mark.long) for mesh in ((1, 1), (2, 1), (1, 2)))]


def answers(e, name: str) -> list:
    return e.generate(*chosen(name), ignore_eos=True)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mesh", MESHES, ids=lambda m: f"{m[0]}x{m[1]}")
def test_the_text_is_plain_decodings(mesh, name):
    e = engine(*mesh)
    e.warmup()
    e.timeline.clear()
    found = answers(e, name)
    check_plain(found)
    assert [len(a.tokens) for a in found] == [p.max_tokens for _, p in requests()]
    assert sum(sum(a.drafted) for a in found) > 5
    assert {b for tick in e.timeline for b in tick.bucket or ()} == set(e.ring.buckets)
    steps = [a != b for c in found for a, b in zip(c.verify_lengths, c.verify_lengths[1:], strict=False)]
    assert np.mean(steps) > 0.1 or name == "fixed"
    longest = 2 if name == "fixed" else GAMMA
    assert {n for c in found for n in c.verify_lengths} <= set(range(longest + 1))


def test_every_rank_runs_the_bucket_that_the_last_one_chose(monkeypatch):
    """The same on all expert ranks, the same on the next pipe rank a tick later, and the smallest that holds the rows."""
    e, outputs, chunks = engine(2, 2), [], []
    e.warmup()
    run, plan = e._run, e._scheduler.plan

    def keep_output(step, record):
        outputs.append(run(step, record))
        return outputs[-1]

    def keep_chunks(record):
        chunks.append(plan(record).bucket[:, 0].copy())
        return record

    monkeypatch.setattr(e, "_run", keep_output)
    monkeypatch.setattr(e._scheduler, "plan", keep_chunks)
    for name in ("threshold", "stale size"):
        answers(e, name)
    host = jax.device_get(outputs)
    bucket, rows = (np.concatenate([getattr(o, field) for o in host], axis=1) for field in ("bucket", "rows"))
    assert (bucket == bucket[:, :, :1]).all()
    assert (bucket[1, 1:] == bucket[0, :-1]).all()
    fullest = rows.reshape(*rows.shape[:2], 2, -1).sum(axis=3).max(axis=2)[0]
    small, large = min(e.ring.buckets), max(e.ring.buckets)
    chunk = np.concatenate(chunks) > 0  # tick by tick of the first rank: a prompt's chunk needs room in every slot
    assert (bucket[0, :, 0] == np.where(chunk | (fullest > small), large, small)).all()
    assert (fullest > small).sum() > 10 and ((fullest <= small) & ~chunk).sum() > 10


def test_nothing_compiles_while_buckets_and_requests_change():
    """And the text of a slot's next request knows nothing of an aborted one."""
    e, compiled, rng, done = engine(2, 2), [], np.random.default_rng(0), []
    e.warmup()
    e.timeline.clear()

    def listen(event: str, *_, **__) -> None:
        if "backend_compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for name in ("fixed", "early stop", "stale size"):
            live = [e.submit(p, s, ignore_eos=True) for p, s in zip(*chosen(name), strict=True)]
            while e.busy:
                if live and rng.random() < 0.15:
                    e.abort(live.pop(int(rng.integers(len(live)))))
                e.step()
            done += [e.result(key) for key in live]
    finally:
        jax.monitoring.clear_event_listeners()
    changes = [a.bucket != b.bucket for a, b in zip(e.timeline, list(e.timeline)[1:], strict=False)]
    assert sum(changes) > 20 and compiled == []
    finished = [a for a in done if a.finish_reason == "length"]
    assert len(finished) > 12
    check_plain(finished)


def test_packed_equals_padded():
    """The same state and item through the packed branch and through the padded one: equal drafts, logits to 1e-5."""
    e = engine(2, 2)
    e.warmup()
    small, large = min(e.ring.buckets), max(e.ring.buckets)
    keys = [e.submit(p, s, ignore_eos=True) for p, s in zip(*chosen("threshold"), strict=True)]
    while any(len(e._entries[key].tally.tokens) < 4 for key in keys[:SLOTS]):
        e.step()
    compared, state = 0, e._state  # of which the calls get copies
    record = e.ring.place_control(e.ring.idle_control())
    for _ in range(6):
        results = [e._step(e._params, in_bucket(e.ring, state, bucket), record) for bucket in (0, 1)]
        (packed, one), (padded, other) = jax.device_get(results)
        state = results[1][0]
        # A call has two ticks: the first rank's item in the first one is the last rank's in the second.
        given = np.eye(2, dtype=bool)
        if one.rows.reshape(2, 2, 2, -1).sum(axis=3)[given].max() > small:  # what packed rows cannot hold is never put there
            continue
        assert (one.bucket[given] == small).all() and (other.bucket[given] == large).all()
        assert (one.bucket[~given] == other.bucket[~given]).all()
        compared += int(one.rows[given].sum())
        for x, y in zip(jax.tree.leaves(one.emission), jax.tree.leaves(other.emission), strict=True):
            np.testing.assert_allclose(x, y, rtol=0, atol=1e-5)
        for field in ("length", "anchor", "drafts", "num_drafts", "confidence"):
            x, y = getattr(packed.requests, field), getattr(padded.requests, field)
            np.testing.assert_allclose(x, y, rtol=0, atol=1e-4 if field == "confidence" else 0)
    assert compared > 20
    check_plain([e.result(key) for key in keys])  # the engine is idle again


def in_bucket(ring: Ring, state, bucket: int):
    """A copy of the state whose first rank will run the last one's item in this bucket; the rows of others are laid out."""

    def changed(packed: dict) -> dict:
        item = ring._packing.unpack(packed)
        control = dataclasses.replace(item.control, bucket=np.full_like(item.control.bucket, bucket))
        return ring._packing.pack(dataclasses.replace(item, control=control))

    host = jax.device_get(state)
    parts = {k: np.split(x[-1], ring.mesh.shape[EXPERT]) for k, x in host.item.items()}
    made = [changed(dict(zip(parts, own, strict=True))) for own in zip(*parts.values(), strict=True)]
    last = {k: np.concatenate([own[k] for own in made]) for k in parts}
    host = dataclasses.replace(host, item={k: np.stack([*x[:-1], last[k]]) for k, x in host.item.items()})
    return jax.tree.map(lambda x, old: jax.device_put(x, old.sharding), host, state)
