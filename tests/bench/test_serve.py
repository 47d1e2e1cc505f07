"""Serving under load: what arrives when, what is counted, and that the load changes no token."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest

from dspark_jax import RequestError, SamplingParams, cli
from dspark_jax.bench.serve import Load, Percentiles, Served, ServeReport, serve_load
from dspark_jax.parallel.mesh_config import MeshConfig
from dspark_jax.serve.engine import Tick
from helpers.mesh_model import MAX_LEN, engine, lm

PROMPTS = ["speak", "friend", "and", "enter the door"]


def test_arrivals_are_a_seeded_poisson_process():
    load = Load(rate=4.0, requests=20_000, seed=3)
    at = load.arrivals()
    gaps = np.diff(at)
    assert at[0] == 0 and (gaps >= 0).all()
    # Exponential gaps: mean and deviation are both 1/rate, and a gap tells nothing of the next one.
    assert abs(gaps.mean() - 0.25) < 0.01 and abs(gaps.std() - 0.25) < 0.01
    assert abs(np.corrcoef(gaps[1:], gaps[:-1])[0, 1]) < 0.03
    np.testing.assert_array_equal(at, load.arrivals())
    assert not np.array_equal(at, Load(4.0, 20_000, seed=4).arrivals())
    np.testing.assert_array_equal(Load(None, 3).arrivals(), [0, 0, 0])


def test_prompts_are_taken_equally_often_in_shuffled_order():
    order = Load(requests=10, seed=1).order(4)
    assert sorted(order[:4]) == sorted(order[4:8]) == [0, 1, 2, 3]
    assert list(order) != sorted(order) and list(order) == list(Load(requests=10, seed=1).order(4))
    assert len(Load(requests=2).order(4)) == 2


def test_figures_of_a_report():
    ticks = (Tick((0, 1), (3, 0)), Tick((1, 0), (2, 3)), Tick((0, 1), (0, 2)), Tick((1, 0), (1, 0)))
    served = (Served(0.0, 0.5, 2.5, 5, 2), Served(1.0, 2.0, 4.0, 3, 2), Served(3.0, 5.0, 5.0, 1, 0))
    report = ServeReport(served, ticks, 5.0, 7.0)
    assert report.tokens == 9 and report.tokens_per_second == 9 / 5
    assert report.tokens_per_round == (4 + 2) / 4
    assert report.busy == (0.75, 0.5)
    assert report.time_to_first_token == Percentiles(1.0, pytest.approx(1.98))  # 0.5, 1, 2
    assert report.time_per_output_token == Percentiles(0.75, pytest.approx(0.995))  # 0.5 and 1; one token has none
    found = report.as_dict()
    assert found["time_to_first_token"]["p50"] == 1.0 and found["ticks"] == 4 and found["compile_seconds"] == 7.0
    assert found["verified_drafts"] == found["wasted_drafts"] == 0 and found["buckets"] == {}
    ticks = tuple(tick._replace(bucket=(8, n)) for tick, n in zip(ticks, (4, 8, 4, 4), strict=True))
    checked = tuple(replace(r, verified=v, accepted=a) for r, v, a in zip(served, (6, 4, 0), (3, 1, 0), strict=True))
    found = ServeReport(checked, ticks, 5.0, 7.0).as_dict()
    assert found["verified_drafts"] == 10 and found["wasted_drafts"] == 6 and found["buckets"] == {4: 3, 8: 1}
    single = ServeReport(served[2:], ticks, 5.0, 7.0).as_dict()
    assert single["time_per_output_token"] is None and single["tokens_per_round"] is None


@pytest.mark.parametrize("rate", [None, 150.0])
@pytest.mark.long
def test_a_load_gets_the_answers_that_each_request_gets_alone(rate):
    e = engine(2, 2)
    load, params = Load(rate, requests=9, seed=2), SamplingParams(temperature=0.8, seed=2**32 - 3, max_tokens=12)
    report = serve_load(e, PROMPTS, params, load, ignore_eos=True)
    expected = []
    for i, which in enumerate(load.order(len(PROMPTS))):
        one = SamplingParams(temperature=0.8, seed=(2**32 - 3 + i) % 2**32, max_tokens=12)
        expected += lm().generate([PROMPTS[which]], one, ignore_eos=True)
    assert [(r.tokens, r.rounds) for r in report.served] == [(len(c.tokens), c.rounds) for c in expected]
    np.testing.assert_array_equal([r.arrival for r in report.served], load.arrivals())
    assert all(r.arrival <= r.first < r.last <= report.seconds for r in report.served)
    assert len(report.busy) == 2 and all(0.3 < share <= 1 for share in report.busy)
    # Every tick is there, and each of them counted once: a rank works on the rows of every prompt and of every round.
    rows = sum(sum(tick.rows) for tick in report.ticks)
    prompts = sum(len(c.prompt_tokens) for c in expected)
    assert rows >= 2 * (prompts + sum(c.rounds for c in expected))
    assert not e.busy and not e.timeline


def test_the_warm_up_is_not_in_the_figures():
    e = engine(2, 2)
    report = serve_load(e, [[1]], SamplingParams(max_tokens=1), Load(requests=1), ignore_eos=True)
    # One request of one token and one chunk: of all the ticks each rank works in one.
    assert [sum(tick.rows[rank] > 0 for tick in report.ticks) for rank in (0, 1)] == [1, 1]


@pytest.mark.parametrize(
    ("prompts", "load", "words"),
    [
        (PROMPTS, Load(rate=0.0, requests=0, seed=-1), ["rate = 0.0", "requests = 0", "seed = -1"]),
        (PROMPTS, Load(rate=float("nan")), ["rate = nan; expected a finite number"]),
        (["a", "a" * MAX_LEN], Load(), [f"prompts[1] has {MAX_LEN + 1} tokens"]),
    ],
)
def test_impossible_loads_are_refused_before_anything_runs(prompts, load, words):
    e = engine(2, 2)
    e.timeline.clear()
    with pytest.raises(RequestError) as error:
        serve_load(e, prompts, SamplingParams(), load)
    assert all(word in str(error.value) for word in words)
    assert not e.busy and not e.timeline


def test_requests_that_the_engine_has_are_no_part_of_the_load():
    e = engine(2, 2)
    key = e.submit([1], SamplingParams(max_tokens=30), ignore_eos=True)
    report = serve_load(e, [[2]], SamplingParams(max_tokens=1), Load(requests=1), ignore_eos=True)
    assert report.tokens == 1 and len(report.ticks) <= 4
    assert len(e.result(key).tokens) == 30


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path):
    """Runs `dspark-jax bench serve …` on the shared engine: exit code, stdout, stderr."""
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": p, "kind": p[0]}) + "\n" for p in PROMPTS))

    def go(*arguments: str, file=file):
        monkeypatch.setattr(MeshConfig, "check_devices", lambda *_: None)  # the tests have eight
        monkeypatch.setattr("dspark_jax.serve.engine.Engine", lambda model, mesh, **_: engine(*mesh.devices.shape))
        monkeypatch.setattr(sys, "argv", ["dspark-jax", "bench", "serve", "--prompts", str(file), *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        printed = capsys.readouterr()
        return stop.value.code or 0, printed.out, printed.err

    return go


def test_command_prints_one_json_object_and_draws_the_timeline(run, tmp_path):
    plot = tmp_path / "timeline.png"
    options = ("--mesh", "2x2", "--requests", "5", "--rate", "500", "--max-tokens", "6", "--ignore-eos")
    code, out, err = run(*options, "--json", "--plot", str(plot))
    assert code == 0 and err == ""
    found = json.loads(out)
    assert found["mesh"] == "2x2" and found["slots"] == 4 and found["rate"] == 500 and found["gamma"] == 2
    assert found["tokens"] == 30 and found["requests"] == 5 and len(found["busy"]) == 2
    assert found["tokens_per_second"] > 0 and found["tokens_per_round"] >= 1
    assert found["time_to_first_token"].keys() == found["time_per_output_token"].keys() == {"p50", "p99"}
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_command_prints_a_table(run):
    code, out, err = run("--mesh", "2x2", "--requests", "3", "--max-tokens", "4", "--ignore-eos", "--kind", "s")
    assert code == 0 and err == ""
    assert "nano on mesh 2x2, 4 slots" in out and "3 in " in out and "12 tokens" in out
    for part in ("tokens/s", "time to first token", "p99", "tokens per round", "rank 0 busy", "rank 1 busy", "ticks"):
        assert part in out


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (["--rate", "-1", "--requests", "0"], ["rate = -1.0; expected", "requests = 0; expected"]),
        (["--temperature=-1"], ["temperature = -1.0"]),
        (["--plot", "/no/such/folder/t.xyz"], ["ends in '.xyz'; expected one of", "is not there; make it"]),
        (["--kind", "none"], ["holds no prompt of kind 'none'"]),
        (["--mesh", "two"], ["mesh 'two': expected pipe ranks x expert ranks"]),
        (["--mesh", "2x1", "--emulate-devices", "3"], ["--emulate-devices is 3, and mesh 2x1 takes 2"]),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(run, arguments, messages):
    code, out, err = run(*arguments)
    assert code == 2 and out == "" and "Traceback" not in err
    assert all(message in err for message in messages), err


def test_a_plot_without_matplotlib_is_refused_before_anything_runs(run, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, _, err = run("--plot", str(tmp_path / "t.png"))
    assert code == 2 and "--plot needs matplotlib; install it with: pip install 'dspark-jax[notebooks]'" in err
