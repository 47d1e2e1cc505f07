"""`bench load`: competitors in one program, acceptance out of a recording, and what is counted and compared."""

import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import ConfigError, cli
from dspark_jax.bench import load, load_run
from dspark_jax.bench.contest import PAST, WEIGHING, Contest
from dspark_jax.bench.load import Settings
from dspark_jax.bench.load_models import Empty, Model, Texts
from dspark_jax.bench.load_report import comparison, competitor, table, verdict
from dspark_jax.bench.load_run import Run
from dspark_jax.bench.synthetic import SyntheticDrafter, SyntheticRing, _Counted, expected_tokens, shapes_of
from dspark_jax.decode.calibrate import Rounds
from dspark_jax.decode.protocols import Proposal
from dspark_jax.decode.round import init_requests
from dspark_jax.decode.sampling import SamplingParams, SamplingState
from dspark_jax.decode.schedule import (
    EarlyStop,
    FixedLength,
    Schedule,
    StaleRate,
    StaleSize,
    StepCost,
    Threshold,
    bucket_sizes,
)
from dspark_jax.decode.verify import speculative_sample
from dspark_jax.parallel.mesh import make_mesh
from dspark_jax.parallel.ring import RingConfig
from dspark_jax.parallel.stage import PipelineSpec
from dspark_jax.serve.model import ReadModel
from helpers import scheduled_model as tiny

SLOTS, GAMMA = 4, 3


def recording(count: int = 400) -> Rounds:
    rng = np.random.default_rng(5)
    logits = rng.normal(1, 1.5, (count, GAMMA))
    survives = rng.random(logits.shape) < 1 / (1 + np.exp(-logits))
    return Rounds(logits, np.cumprod(survives, axis=1).sum(axis=1))


@pytest.mark.long
def test_every_competitor_chooses_what_its_scheduler_chooses_alone():
    seconds = [0.8, 1.0, 1.25, 1.5]  # of 0 … 3 drafts of each; linear between them
    plain = 0.45  # seconds of a step without drafting: low enough to rest now and then
    cost = StepCost(tuple(np.interp(range(17), [4, 8, 12, 16], seconds).tolist()), plain=(plain,))
    contest = Contest.of(SLOTS, GAMMA, (1, 3), 0.6, (0.5, 1.5, 3.0))
    assert contest.buckets == bucket_sizes(SLOTS, GAMMA, [4, 8])
    assert contest.names == ("fixed:1", "fixed:3", "threshold:0.6", "early-stop", "stale-size", "stale-rate")
    alone = [FixedLength(1), FixedLength(3), Threshold(0.6), EarlyStop(cost), StaleSize(cost), StaleRate(cost)]
    named = dict(zip(contest.names, alone, strict=True)) | {f"fixed:{n}": FixedLength(n) for n in (0, 2)}
    step, seen = jax.jit(contest.step), set()
    for name, scheduler in named.items():
        own = Schedule(scheduler, (0.5, 1.5, 3.0))
        ours, theirs = jnp.asarray(contest.orders(name, [*seconds, plain], SLOTS), jnp.float32), own.init(SLOTS, GAMMA)
        rng = np.random.default_rng(1)
        for _ in range(12):
            requests = dataclasses.replace(
                init_requests(SLOTS, GAMMA, 5, 1),
                confidence=jnp.asarray(rng.normal(1, 1.5, (SLOTS, GAMMA)), jnp.float32),
                num_drafts=jnp.asarray(rng.integers(1, GAMMA + 1, SLOTS), jnp.int32),
                active=jnp.asarray(rng.random(SLOTS) < 0.8),
                emitted=jnp.full(SLOTS, 9),
            )
            committed = jnp.ones(SLOTS, jnp.int32)
            got, ours = step(requests, committed, ours)
            want, theirs = own.step(requests, committed, theirs)
            np.testing.assert_array_equal(got.num_drafts, want.num_drafts)
            seen.add((name, *np.asarray(got.num_drafts).tolist()))
        said = contest.orders(name, [*seconds, plain], SLOTS)[:, PAST:].astype(np.float32)
        np.testing.assert_array_equal(ours[:, PAST:], said)
    sizes = {name: {sum(lengths) for other, *lengths in seen if other == name} for name in contest.names}
    assert all(len(sizes[name]) > 3 for name in WEIGHING)


class Drafts:
    """Uniform drafts over a vocabulary of 512."""

    block_size, choices = GAMMA, ()
    init_cache = write_context = None

    def propose(self, anchor, position, active, sampling, cache, draft_noise) -> Proposal:
        tokens = jax.random.randint(jax.random.key(0), (*anchor.shape, GAMMA), 0, 512)
        return Proposal(tokens, jnp.zeros((*tokens.shape, 512), jnp.bfloat16), jnp.zeros(tokens.shape))


@pytest.mark.long
def test_recorded_rounds_decide_confidence_and_acceptance():
    count, rounds = 1000, recording()
    sampling = SamplingState.from_params([SamplingParams(temperature=1.0, seed=i) for i in range(count)])
    position = jnp.arange(count, dtype=jnp.int32) % 50
    drafter = SyntheticDrafter(Drafts(), rounds)
    propose = jax.jit(lambda at, s, number: drafter.propose(at, at, at >= 0, s, _Counted(None, number, at)))
    proposal = propose(position, sampling, position)
    # The round's number chooses, wherever the request has got to.
    np.testing.assert_array_equal(propose(position + 9, sampling, position).confidence, proposal.confidence)
    assert (np.asarray(propose(position, sampling, position + 9).confidence) != proposal.confidence).any(axis=1).mean() > 0.9
    said = {row.tobytes(): i for i, row in enumerate(rounds.logits.astype(np.float32))}
    chosen = np.array([said[row.tobytes()] for row in np.asarray(proposal.confidence)])
    counts = np.bincount(chosen, minlength=len(rounds))
    assert abs(((counts - 2.5) ** 2 / 2.5).sum() - 399) < 5 * np.sqrt(2 * 399)  # chi-squared of an even draw
    p = jnp.asarray(np.random.default_rng(0).normal(0, 1, (count, GAMMA + 1, 512)), jnp.float32)
    full, sample = jnp.full(count, GAMMA), jax.jit(speculative_sample)
    verdict = sample(p, proposal.logits, proposal.tokens, full, sampling, position)
    # A draft that should be rejected passes with the target's probability of it, here 1/512 in the mean.
    wrong = np.asarray(verdict.accepted) != rounds.accepted[chosen]
    assert wrong.mean() < 0.01 and (np.asarray(verdict.accepted) >= rounds.accepted[chosen]).all()
    short = sample(p, proposal.logits, proposal.tokens, full - 2, sampling, position)
    np.testing.assert_array_equal(np.asarray(short.accepted)[~wrong], np.minimum(rounds.accepted[chosen], 1)[~wrong])


def test_expected_tokens_of_a_recording():
    rounds = Rounds(np.zeros((4, GAMMA)), np.array([0, 1, 3, 3]))
    assert [expected_tokens(rounds, n) for n in range(4)] == [1, 1.75, 2.25, 2.75]


def test_rounds_of_another_block_size_are_refused():
    spec = PipelineSpec(tiny.CONFIG, tiny.DRAFT, ((0, 2),), 1)
    with pytest.raises(ConfigError, match="recorded rounds have 2 drafts, and the model drafts 3"):
        SyntheticRing(spec, tiny.weights(), make_mesh(), RingConfig(2, 32), Rounds(np.zeros((4, 2)), np.zeros(4, int)))


def test_figures_and_comparison():
    runs = [Run(2.0, 10, 40, 100, 80, 60), Run(1.0, 10, 40, 90, 80, 50), Run(4.0, 10, 40, 80, 80, 40)]
    one = competitor(runs, 4)
    assert one["tokens_per_second"] == 50 and one["tokens_per_second_per_user"] == 12.5 and one["seconds_per_tick"] == 0.2
    assert one["tokens_per_round"] == 270 / 120 and one["verified_per_round"] == 2 and one["accepted_per_round"] == 1.25
    rates = {"plain": 40, "fixed:1": 80, "fixed:3": 50, "stale-size": 88}
    found = comparison({name: {"tokens_per_second": rate} for name, rate in rates.items()}, 3)
    assert found["best_fixed"] == "fixed:1" and set(found) == {"best_fixed", "stale-size"}
    assert found["stale-size"] == pytest.approx({"of_best_fixed": 1.1, "of_whole_blocks": 1.76, "of_plain": 2.2})
    other = {"stale-size": {"of_best_fixed": 0.9, "of_whole_blocks": 1.0, "of_plain": 0.5}}
    points = [{"requests": 4, "comparison": found}, {"requests": 128, "comparison": other}, {"requests": 256, "failed": "x"}]
    one = verdict(points)["stale-size"]
    assert one.pop("plain_requests") == [4]
    assert one == pytest.approx({"least_of_best_fixed": 0.9, "most_of_whole_blocks": 1.76, "least_of_plain": 2.2})
    assert verdict([{"requests": 1, "failed": "x"}]) == {}


@pytest.mark.parametrize(("measured", "said"), [([1], "(at 1 request)"), ([1, 4, 128], "(at 1, 4 requests)")])
def test_the_verdict_names_what_was_measured(measured, said):
    rates = {"plain": 40, "fixed:3": 50, "stale-size": 88}
    each = {name: {"tokens_per_second": rate} for name, rate in rates.items()}
    points = [{"requests": n, "competitors": each, "comparison": comparison(each, 3)} for n in measured]
    shown = table({"points": points, "synthetic": False, "verdict": verdict(points)})
    assert shown.endswith(f"at least 220.0% of plain decoding {said}")


def test_progress_says_that_rates_are_medians(capsys):
    run = Run(2.0, 10, 40, 100, 80, 60)
    point = SimpleNamespace(
        requests=1, names=("plain", "fixed:3"), seconds=[0.1], contest=SimpleNamespace(buckets=(4,)),
        drafting=SimpleNamespace(ring=SimpleNamespace(gamma=3)), allocate=lambda: None, free=lambda: None,
        measure_steps=lambda *_: None, interleaved=lambda *_: iter([[run, run]] * 2),
    )  # fmt: skip
    load.measure(point, settings(1, rounds=10), load.Log(None, {}))  # type: ignore[arg-type]
    first, second = [line for line in capsys.readouterr().err.splitlines() if "repeat" in line]
    assert "1 request, repeat 1 of 2: plain 50.0, fixed:3 50.0 tokens/s" in first
    assert "1 request, repeat 2 of 2: median so far, plain 50.0" in second


@pytest.fixture
def short(monkeypatch):
    """Few rounds, and room for them."""
    for name, value in {"MOST_ROUNDS": 4, "LEAST_ROUNDS": 3}.items():
        monkeypatch.setattr(load_run, name, value)
    monkeypatch.setattr(load, "STEP_ROUNDS", 4)
    return dataclasses.replace(tiny.CONFIG, max_position_embeddings=64)


def test_reports_of_one_setting_are_drawn_as_one(tmp_path, monkeypatch, capsys):
    def report(n: int, rate: float, **more) -> dict:
        rates = {"plain": 40, "fixed:3": 50, "stale-size": rate}
        each = {name: {"tokens_per_second": r} for name, r in rates.items()}
        point = {"requests": n, "competitors": each, "comparison": comparison(each, 3)}
        facts = {"command": f"load {n}", "date": f"2026-01-0{n}", "seconds": 1.5, "gamma": 3, "seed": 0, "synthetic": True}
        return facts | {"points": [point], "verdict": verdict([point])} | more

    parts = [report(4, 60), report(2, 44), report(4, 60, seed=1), {"model": "x"}]
    files = [str(tmp_path / f"{i}.json") for i in range(len(parts))]
    for file, part in zip(files, parts, strict=True):
        Path(file).write_text(json.dumps(part))
    out = tmp_path / "whole.json"
    code, printed = command(monkeypatch, capsys, "--draw", *files[:2], "--out", str(out))
    found = json.loads(out.read_text())
    assert code == 0 and printed.out.strip() == table(found).strip()
    assert [point["requests"] for point in found["points"]] == [2, 4] and found["command"] == "load 4; load 2"
    assert found["date"] == "2026-01-04" and found["seconds"] == 3
    one = found["verdict"]["stale-size"]
    assert one["plain_requests"] == [2, 4]
    assert (one["least_of_best_fixed"], one["least_of_plain"]) == pytest.approx((0.88, 1.1))
    code, printed = command(monkeypatch, capsys, "--draw", files[0], files[2], "--json")
    assert code == 2 and "seed is 0 in the first report and 1 in report 2" in printed.err
    assert "4 requests were measured in two reports" in printed.err
    code, printed = command(monkeypatch, capsys, "--draw", files[0], files[3])
    assert code == 2 and "report 2 has no points" in printed.err


def test_a_request_meets_the_recorded_rounds_in_order_and_a_new_one_from_the_first():
    drafter = SyntheticDrafter(SimpleNamespace(block_size=GAMMA, write_context=lambda *_: None), recording())
    cache, seen = _Counted(None, jnp.zeros(2, jnp.int32), jnp.zeros(2, jnp.int32)), []
    # Slot 0 begins at 10, goes on at its own pace and waits once; slot 1 gets a new request behind two rounds.
    for start, count in [((10, 10), (1, 1)), ((11, 11), (1, 4)), ((15, 13), (4, 4)), ((16, 10), (0, 1)), ((16, 11), (4, 1))]:
        rows: Any = SimpleNamespace(start=jnp.array(start), count=jnp.array(count))
        cache = drafter.write_context(None, rows, None, cache)
        seen.append(cache.number.tolist())
    first = seen[0][0]  # of a slot that never had a request: whatever it held
    assert [a - first for a, _ in seen] == [0, 1, 2, 2, 3] and [b for _, b in seen][3:] == [0, 1]


def settings(*concurrency: int, rounds: int, lengths=(2, 3)) -> Settings:
    return Settings(concurrency, lengths, 0.5, None, 2, rounds, 0)


def check(found: dict, requests: int, pipe: int = 1, lengths=(2, 3)) -> None:
    (point,) = [p for p in found["points"] if p["requests"] == requests]
    each = point["competitors"]
    assert list(each) == ["plain", *(f"fixed:{n}" for n in lengths), "threshold:0.5", *WEIGHING]
    assert each["plain"]["tokens_per_round"] == 1 and each["plain"]["verified_per_round"] == 0
    assert all(each[f"fixed:{n}"]["verified_per_round"] == n for n in lengths)
    assert each["threshold:0.5"]["verified_per_round"] < 3
    for one in each.values():
        assert len(one["runs"]) == 2 and one["tokens_per_second_per_user"] == one["tokens_per_second"] / requests
        for run in one["runs"]:
            assert run["rounds"] == requests * run["ticks"] / pipe and run["seconds"] > 0
            assert run["tokens"] == run["rounds"] + run["accepted"] and run["accepted"] <= run["verified"]
    assert len(point["buckets"]) == len(lengths) + 1 and point["plain_step_seconds"] > 0
    assert len(point["step_seconds"]) == 4 and min(point["step_seconds"]) > 0


@pytest.mark.long
def test_a_load_of_a_real_model(short, tmp_path, monkeypatch, capsys):
    model = Model(
        "tiny", short, tiny.DRAFT, tiny.weights(), jnp.dtype("float32"), Texts(((1, 2, 3, 4, 5, 1, 2), (3,)), 1.0, 0), None, 4
    )
    out = tmp_path / "load.json"
    found = load.run(model, make_mesh(), settings(2, rounds=10, lengths=(3,)), out)
    check(found, 2, lengths=(3,))
    stored = json.loads(out.read_text())
    assert stored == json.loads(json.dumps(found)) and stored["acceptance"] == "real"
    progress = capsys.readouterr().err
    assert "2 requests, plain: compiled in" in progress and "repeat 2 of 2" in progress
    (point,) = found["points"]
    # Five rounds each, in two batches of three: every competitor decodes the same prompts with the same seeds.
    assert point["competitors"]["plain"]["runs"][0]["ticks"] == 6 and point["buckets"] == (2, 8)
    code, printed = command(monkeypatch, capsys, "--draw", str(out), "--plots", str(tmp_path))
    assert code == 0 and printed.out.strip() == table(found).strip()
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in ("pareto.png", "budget.png"))


class Spread(Model):
    """Weights that are there already: `random_params` makes them on one device only."""

    def place(self, ring):
        return ring.pipeline.place(self.params, ring.mesh)


@pytest.mark.long
@pytest.mark.parametrize("mesh", [(1, 1), (2, 2)])
def test_a_load_with_synthetic_acceptance(mesh, short):
    config, draft = dataclasses.replace(short, vocab_size=996), tiny.DRAFT
    shapes, rounds = shapes_of(config, draft, "float32"), recording()
    if mesh != (1, 1):
        rng = np.random.default_rng(0)
        shapes = jax.tree.map(lambda x: rng.normal(0, 0.1, x.shape).astype(x.dtype), shapes)
    kind = Model if mesh == (1, 1) else Spread
    model = kind("shapes", config, draft, shapes, jnp.dtype("float32"), Empty(10), rounds, 1)
    requests = mesh[0] * mesh[1] * 2
    found = load.run(model, make_mesh(*mesh), settings(requests, rounds=600))
    check(found, requests, mesh[0])
    assert found["acceptance"].startswith("synthetic") and "synthetic acceptance" in table(found)
    each = found["points"][0]["competitors"]
    for name, tokens in found["recorded_tokens_per_round"].items():
        assert each[name]["tokens_per_round"] == pytest.approx(tokens, abs=0.12)  # 5 deviations of 1200 rounds


def command(monkeypatch, capsys, *arguments: str):
    monkeypatch.setattr(sys, "argv", ["dspark-jax", "bench", "load", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return stop.value.code or 0, capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["--prompts is missing"]),
        (["--shape", "v4-flash"], ["--shape has random weights", "give recorded rounds"]),
        (["--prompts", "P", "--recorded", "r.npz", "--out", "/no/such/f.json"], ["2 faults", "is for --shape", "/no/such"]),
        (["--shape", "v4-flash", "--recorded", "none.npz"], ["none.npz: cannot be read"]),
        (["--shape", "v4-flash", "--recorded", "none.npz", "--layers", "3"], ["--layers is 3", "expected 5 … 43"]),
        (["--shape", "v4-flash", "--recorded", "none.npz", "--drafter", "d"], ["--drafter and --draft-tokens are for --model"]),
        (["--prompts", "P", "--concurrency", "1,x"], ["--concurrency is '1,x'"]),
        (["--prompts", "P", "--lengths", "9", "--repeats", "0", "--threshold", "2"], ["3 faults", "--lengths has 9"]),
        (["--prompts", "P", "--temperature", "-1"], ["--temperature is -1.0"]),
        (["--draw", "none.json"], ["none.json: cannot be read"]),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(arguments, words, monkeypatch, capsys, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "A"}\n')
    monkeypatch.setattr("dspark_jax.bench.load_models.read_model", lambda *_, **__: fake_nano())
    monkeypatch.setattr(load, "run", lambda *_: pytest.fail("it ran"))
    code, printed = command(monkeypatch, capsys, *(str(prompts) if a == "P" else a for a in arguments))
    assert code == 2 and printed.out == "" and "Traceback" not in printed.err
    assert all(word in printed.err for word in words), printed.err


def fake_nano():
    config = dataclasses.replace(tiny.CONFIG, max_position_embeddings=512)
    draft = dataclasses.replace(tiny.DRAFT, block_size=5)
    params = {"target": {"embed": {"weight": SimpleNamespace(dtype=np.float32)}}}
    return ReadModel(config, draft, params, tiny.lm().tokenizer, None)


def test_one_number_means_powers_of_two_up_to_it():
    model = SimpleNamespace(draft=SimpleNamespace(block_size=5), rounds=None)

    def concurrency(text: str, parts: int = 1) -> tuple[int, ...]:
        args = load._parser("x").parse_args(["--concurrency", text])
        return load._settings(args, model, parts).concurrency

    assert concurrency("20") == (1, 2, 4, 8, 16) and concurrency("16", 4) == (4, 8, 16)
    assert concurrency("64,") == (64,) and concurrency("3,12") == (3, 12) and concurrency("1") == (1,)
