"""The engine on emulated meshes: the same tokens as one device, whatever comes and goes; nothing compiles in service."""

import dataclasses
import functools
import threading

import jax
import jax.monitoring
import numpy as np
import pytest

from dspark_jax.decode.sampling import SamplingParams
from dspark_jax.errors import ConfigError, RequestError
from dspark_jax.parallel.mesh import make_mesh
from dspark_jax.parallel.ring import Ring
from dspark_jax.serve.engine import Engine
from helpers.mesh_model import GAMMA, MAX_LEN, VOCAB, engine, lm

MESHES = [
    (2, 2),
    *(pytest.param(m, marks=pytest.mark.long) for m in ((1, 1), (4, 1), (2, 1), (1, 2), (1, 4), (2, 4), (4, 2))),
]


@functools.cache
def requests(count: int = 11, seed: int = 0) -> list[tuple[list[int], SamplingParams]]:
    """Ragged prompts, greedy and sampled, some with stop tokens, one that runs into the context limit."""
    rng = np.random.default_rng(seed)
    found = []
    for i in range(count):
        prompt = rng.integers(0, VOCAB, int(rng.integers(1, 30))).tolist()
        stop = tuple(rng.integers(0, VOCAB, 2).tolist()) if i % 3 == 2 else ()
        temperature = float(i % 2) * 0.9
        found.append((prompt, SamplingParams(temperature, 0, 0.95, i, int(rng.integers(1, 36)), stop)))
    found[4] = (found[4][0] + [3] * (MAX_LEN - len(found[4][0]) - 4), SamplingParams(max_tokens=20))
    return found


@functools.cache
def solo() -> list[tuple[tuple[int, ...], str]]:
    """Every request, through the batch interface on one device: another program of the same model, without slots."""
    prompts, params = zip(*requests(), strict=True)
    return [(a.tokens, a.finish_reason) for a in lm().generate(prompts, params)]


def answers(e: Engine) -> list[tuple[tuple[int, ...], str]]:
    prompts, params = zip(*requests(), strict=True)
    return [(c.tokens, c.finish_reason) for c in e.generate(prompts, params)]


def test_the_requests_try_everything():
    tokens, reasons = zip(*solo(), strict=True)
    assert set(reasons) == {"stop", "length", "context"}
    assert len({len(t) for t in tokens}) > 5


@pytest.mark.parametrize("mesh", MESHES, ids=lambda m: f"{m[0]}x{m[1]}")
def test_b1_a_mesh_gives_the_tokens_of_one_device(mesh):
    """Greedy and sampled, ragged, with more requests than slots."""
    if mesh[0] * mesh[1] > len(jax.devices()):  # `make test-gpus`, on as many as there are
        pytest.skip(f"needs {mesh[0] * mesh[1]} devices")
    e = engine(*mesh)
    assert e.slots < len(requests())
    assert answers(e) == solo()


@pytest.mark.long
def test_prompts_in_larger_chunks_beside_decoding_give_the_same():
    assert answers(engine(2, 1, chunk=8)) == solo()


@pytest.mark.long
def test_b1_without_the_drafts_in_the_item_the_tokens_are_wrong(monkeypatch):
    """The test above can fail: a first rank that does not get the drafts embeds other tokens."""
    honest = Ring._next_item

    def without(self, item, requests):
        sent = honest(self, item, requests)
        token = sent.control.token.at[:, 1 : self.gamma + 1].set(0)
        return dataclasses.replace(sent, control=dataclasses.replace(sent.control, token=token))

    monkeypatch.setattr(Ring, "_next_item", without)
    e = Engine(lm(), mesh=make_mesh(2, 1), slots=4, chunk=GAMMA + 1, max_len=MAX_LEN)
    assert answers(e) != solo()


@pytest.mark.long
def test_plain_decoding_on_the_ring_gives_the_same_greedy_tokens():
    e = engine(2, 1, speculate=False)
    greedy = [(p, s) for p, s in requests() if s.temperature == 0]
    expected = [solo()[i][0] for i, (_, s) in enumerate(requests()) if s.temperature == 0]
    prompts, params = zip(*greedy, strict=True)
    done = e.generate(prompts, params)
    assert [c.tokens for c in done] == expected
    assert all(c.rounds == len(c.tokens) - 1 for c in done)


def test_b3_nothing_compiles_during_200_mixed_steps():
    e, rng, compiled = engine(2, 2), np.random.default_rng(5), []

    def listen(name: str, *_, **__) -> None:
        if "backend_compile" in name:
            compiled.append(name)

    e.warmup()
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        live = []
        for _ in range(200):
            if rng.random() < 0.3:
                prompt = rng.integers(0, VOCAB, int(rng.integers(1, 40))).tolist()
                params = SamplingParams(float(rng.integers(2)), seed=7, max_tokens=int(rng.integers(1, 20)))
                live.append(e.submit(prompt, params))
            if live and rng.random() < 0.1:
                e.abort(live[int(rng.integers(len(live)))])
            e.step()
        for key in live:
            list(e.stream(key))
    finally:
        jax.monitoring.clear_event_listeners()
    assert len(live) > 30 and compiled == []


def storm(e: Engine, steps: int, seed: int) -> int:
    """Random submits and aborts; every finished answer is the request's own. Returns how many were compared."""
    rng, live, checked = np.random.default_rng(seed), {}, 0
    for step in range(steps):
        if rng.random() < 0.35 and len(live) < 3 * e.slots:
            i = int(rng.integers(len(requests())))
            live[e.submit(*requests()[i], request_id=(step, i))] = []
        if live and rng.random() < 0.1:
            key = list(live)[int(rng.integers(len(live)))]
            e.abort(key)
            *_, last = e.stream(key)
            assert last.finish_reason == "abort"
            del live[key]
        for key, output in e.step():
            live[key] += output.tokens
            if output.finish_reason:
                assert (tuple(live.pop(key)), output.finish_reason) == solo()[key[1]]
                list(e.stream(key))
                checked += 1
            else:
                assert tuple(live[key]) == solo()[key[1]][0][: len(live[key])]
    for key in list(live):
        e.abort(key)
        list(e.stream(key))
    return checked


@pytest.mark.parametrize("mesh", MESHES, ids=lambda m: f"{m[0]}x{m[1]}")
def test_b15_no_token_of_an_aborted_request_reaches_the_next_one_in_its_slot(mesh):
    assert storm(engine(*mesh), 250, seed=1) > 20


@pytest.mark.long
def test_b9_b15_ten_thousand_steps_of_submits_and_aborts():
    checked = storm(engine(2, 2), 10_000, seed=2)
    print(f"{checked} answers compared")
    assert checked > 1000


def test_b19_b39_b40_nan_in_unwritten_state_and_idle_lanes_changes_nothing():
    """Every cache is NaN before the first request; trash slots and idle lanes stay so."""
    e = engine(2, 2)
    e.warmup()
    list(e.step())
    e._state.caches.update(
        {k: jax.device_put(np.full(x.shape, np.nan, x.dtype), x.sharding) for k, x in e._state.caches.items()}
    )
    prompt, params = requests()[1]
    assert e.generate([prompt], params)[0].tokens == solo()[1][0]
    assert any(np.isnan(np.asarray(x)).any() for x in e._state.caches.values())
    assert answers(e) == solo()


def test_two_microbatches_keep_both_ranks_at_work():
    e = engine(2, 2)
    prompts = [[i] * 3 for i in range(e.slots)]

    def ticks(count: int):
        while e.busy:
            e.step()
        e.timeline.clear()
        e.generate(prompts[:count], SamplingParams(max_tokens=20), ignore_eos=True)
        return list(e.timeline)

    # 20 tokens take at least 7 rounds of 2 ticks, behind the one that reads the prompts.
    steady = ticks(e.slots)[2:14]
    assert all(min(tick.rows) > 0 and sorted(tick.microbatch) == [0, 1] for tick in steady)
    alone = ticks(1)[2:14]
    assert all(0 in tick.rows and max(tick.rows) > 0 for tick in alone)  # one request: at every tick one rank waits


def test_stream_gives_the_tokens_as_they_come_and_forgets_the_request():
    e = engine(2, 2)
    key = e.submit(*requests()[0], request_id="name")
    outputs = list(e.stream(key))
    assert tuple(t for o in outputs for t in o.tokens) == solo()[0][0]
    assert [o.round for o in outputs] == list(range(len(outputs))) and outputs[-1].finish_reason == solo()[0][1]
    assert {o.request_id for o in outputs} == {"name"}
    with pytest.raises(RequestError, match="'name' is unknown"):
        e.stream("name")


def test_a_closed_stream_aborts_its_request():
    e = engine(2, 2)
    key = e.submit([1, 2], SamplingParams(max_tokens=40))
    stream = e.stream(key)
    next(stream)
    stream.close()
    while e.busy:
        e.step()
    with pytest.raises(RequestError, match="unknown"):
        e.abort(key)


def test_threads_share_an_engine():
    e, found = engine(2, 2), {}

    def work(i: int) -> None:
        found[i] = e.result(e.submit(*requests()[i], request_id=("thread", i))).tokens

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert [found[i] for i in range(6)] == [tokens for tokens, _ in solo()[:6]]


BAD = [
    (([],), "the prompt is empty"),
    (("",), "the prompt is empty"),
    (([1] * MAX_LEN,), f"has {MAX_LEN} tokens; expected at most {MAX_LEN - 1}"),
    (([VOCAB],), f"holds {VOCAB}; expected token ids in 0 … {VOCAB - 1}"),
    (([-1],), "holds -1"),
    (([1], SamplingParams(temperature=float("nan"))), "temperature = nan"),
]


@pytest.mark.parametrize(("arguments", "words"), BAD)
def test_a_bad_request_is_refused_and_the_others_go_on(arguments, words):
    e = engine(2, 2)
    key = e.submit(*requests()[2])
    e.step()
    with pytest.raises(RequestError, match=words):
        e.submit(*arguments)
    assert e.result(key).tokens == solo()[2][0]


def test_numbers_that_a_caller_has_chosen_are_passed_over():
    e = engine(2, 2)
    first = e.submit([1])
    assert isinstance(first, int)
    keys = [first, e.submit([1], request_id=first + 2), e.submit([1]), e.submit([1])]
    assert keys == [first, first + 2, first + 3, first + 4]
    for key in keys:
        e.stream(key).close()
        e.abort(key)
    while e.busy:
        e.step()


def test_an_id_in_use_is_refused():
    e = engine(2, 2)
    key = e.submit(*requests()[0], request_id="twice")
    with pytest.raises(RequestError, match="'twice' is in use"):
        e.submit([1], request_id="twice")
    assert e.result(key).tokens == solo()[0][0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"mesh": (2, 2), "slots": 6}, "slots is 6; expected a positive multiple of pipe × expert = 4"),
        ({"mesh": (1, 1), "slots": 0}, "slots is 0"),
        ({"mesh": (5, 1)}, "5 pipe ranks for 4 layers; expected at most one rank a layer"),
        ({"mesh": (1, 3), "slots": 3}, "expert is 3; expected a divisor of the model's 8 routed experts"),
        ({"mesh": (2, 1), "stages": ((0, 2), (3, 4))}, "layer 2 in front of rank 1 is on no rank"),
        ({"mesh": (2, 1), "stages": "0-4,3"}, "mixes layer ranges and layer counts"),
        ({"mesh": (1, 1), "max_len": 1000}, "max_len is 1000; expected 2 … 64"),
    ],
)
def test_an_impossible_engine_is_refused(arguments, words):
    with pytest.raises(ConfigError, match=words):
        Engine(lm(), **arguments | {"mesh": make_mesh(*arguments["mesh"])})
