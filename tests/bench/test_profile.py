"""Step times: what is measured, what becomes of it, and the engine that measures for itself."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from dspark_jax import ConfigError, Engine, cli
from dspark_jax.cli_schedule import schedule_of
from dspark_jax.decode.profile_table import Fingerprint, read_profile
from dspark_jax.decode.protocols import Proposal
from dspark_jax.decode.sampling import SamplingParams, SamplingState
from dspark_jax.decode.schedule import Schedule, StaleSize, bucket_sizes
from dspark_jax.decode.schedule_source import MEASURE, schedule_source
from dspark_jax.eplb import Placement
from dspark_jax.parallel import profile
from dspark_jax.parallel.mesh import EXPERT, make_mesh
from dspark_jax.parallel.profile import Cell, StepTimes, grid, measure_steps, request_counts
from dspark_jax.parallel.ring_timer import drafts_of
from helpers import scheduled_model as tiny

GAMMA = 3
CELLS = (Cell(1, 4, 4, (0.03,), (0.02,)), Cell(2, 4, 4, (0.03,), (0.02,)), Cell(2, 8, 8, (0.05,), (0.04,)))


def test_numbers_of_requests():
    assert [request_counts(n) for n in (1, 2, 6, 8)] == [(1,), (1, 2), (1, 2, 4, 6), (1, 2, 4, 8)]


@pytest.mark.parametrize("slots", [1, 3, 8, 12])
@pytest.mark.parametrize("wanted", [None, (1,), (5, 8, 40)])
def test_cells_fill_every_bucket_and_meet_every_number_of_requests(slots, wanted):
    buckets = bucket_sizes(slots, GAMMA, wanted)
    cells = grid(slots, GAMMA, buckets)
    assert {bucket for _, _, bucket in cells} == set(buckets)
    assert {requests for requests, _, _ in cells} == set(request_counts(slots))
    for requests, rows, bucket in cells:
        assert requests <= rows <= requests * (GAMMA + 1)
        assert bucket == min(b for b in buckets if b >= rows)
        lengths = drafts_of(rows - requests, requests, slots)
        assert lengths.sum() == rows - requests and lengths.max() <= GAMMA and not lengths[requests:].any()


def test_a_plain_step_is_verifys_share_without_the_drafts_rows():
    cells = (
        Cell(1, 4, 4, (9.0,) * 3, (1.0, 2.0, 1.0), (0.5, 1.0, 0.7)),  # half, in the middle
        Cell(2, 4, 4, (9.0,) * 3, (3.0,) * 3, (2.7,) * 3), Cell(2, 8, 8, (9.0,) * 3, (4.0,) * 3),
    )  # fmt: skip
    times = StepTimes(cells)
    assert times.verify[4] == 2.0 and times.plain == pytest.approx({1: 1.0, 2: 1.8})  # medians of 1, 3; then .5, .9
    table = times.table(Fingerprint("m", "1x1", "", "cpu"))
    assert table.plain is not None and table.plain.points == (1, 2) and times.as_dict()["plain"]["requests"] == [1, 2]
    assert StepTimes(CELLS).table(Fingerprint("m", "1x1", "", "cpu")).plain is None


def test_draft_and_target_are_told_apart():
    draft, verify = {1: 0.5, 2: 0.7}, {2: 1.0, 4: 1.5}
    cells = [
        Cell(r, n, b, (draft[r] + verify[b], 9.0, draft[r] + verify[b]), (verify[b], verify[b], 8.0))
        for r, n, b in ((1, 2, 2), (1, 4, 4), (2, 4, 4))
    ]
    times = StepTimes(tuple(cells))
    assert times.draft == pytest.approx(draft) and times.verify == pytest.approx(verify) and times.residual < 1e-9
    table = times.table(Fingerprint("m", "1x1", "", "cpu"))
    assert table.verify.points == (2, 4) and table.verify.rule == "stairs" and table.max_rows == 4
    assert table.draft.seconds == pytest.approx((0.5, 0.7)) and table.draft.at(3) == pytest.approx(0.7)
    off = StepTimes((*cells[:2], replace(cells[2], seconds=(3.2,) * 3)))  # drafting for two: 1.7 of 3.2
    assert off.draft[2] == pytest.approx(1.7) and off.residual == pytest.approx(0.0)
    slower = StepTimes((*cells, Cell(2, 3, 2, (2.7,) * 3, (1.0,) * 3)))  # 0.7 in one bucket, 1.7 in the other
    assert slower.draft[2] == pytest.approx(1.2) and slower.residual == pytest.approx(0.5 / 2.2)
    faster = StepTimes((Cell(1, 2, 2, (0.9,), (1.0,)),))  # noise below what drafting costs
    assert faster.draft == {1: 0.0}


class Ones:
    block_size = GAMMA
    init_cache = write_context = None

    def propose(self, anchor, position, active, sampling, cache, draft_noise) -> Proposal:
        ones = jnp.ones((*anchor.shape, GAMMA))
        return Proposal(ones.astype(jnp.int32), jnp.ones((*ones.shape, 5), jnp.bfloat16), ones)


def test_the_drafter_is_passed_over_where_no_running_request_wants_it():
    drafter, mesh = profile._Switched(Ones(), 5), make_mesh(1, 2)

    def drafted(seeds: list[int], active: list[bool]) -> np.ndarray:
        def run(seed, active):
            sampling = SamplingState.from_params([SamplingParams()] * 2).replace(seed=seed)
            return drafter.propose(jnp.zeros(2, jnp.int32), jnp.zeros(2, jnp.int32), active, sampling, None).tokens

        split = PartitionSpec(EXPERT)
        mapped = jax.shard_map(run, mesh=mesh, in_specs=(split, split), out_specs=split, check_vma=False)
        return np.asarray(jax.jit(mapped)(jnp.array(seeds, jnp.uint32), jnp.array(active)))

    assert (drafted([0, 0, 0, 0], [True] * 4) == 0).all()
    assert (drafted([1, 1, 1, 1], [True] * 4) == 1).all()
    assert (drafted([0, 0, 1, 0], [True] * 4) == 1).all()  # one rank's request decides for all
    assert (drafted([0, 0, 1, 0], [True, True, False, True]) == 0).all()


def own_engine(mesh: tuple[int, int]) -> Engine:
    """Two requests a microbatch and expert rank."""
    return Engine(
        tiny.lm(), mesh=make_mesh(*mesh), slots=2 * mesh[0] * mesh[1], chunk=GAMMA + 1, max_len=tiny.MAX_LEN,
        scheduler="stale-size", profile=MEASURE, buckets=[4],
    )  # fmt: skip


WANTED = [(1, 4, 4), (2, 4, 4), (2, 8, 8)]  # requests, rows, bucket


@pytest.mark.long
def test_every_cell_is_measured_with_and_without_the_drafter():
    said = []
    times = own_engine((1, 1)).measure_steps(2, said.append)
    assert [(c.requests, c.rows, c.bucket) for c in times.cells] == WANTED
    assert [len(c.plain) for c in times.cells] == [2, 2, 0] and min(times.plain.values()) > 0
    assert all(len(c.seconds) == len(c.without_draft) == 2 and min(c.seconds + c.without_draft) > 0 for c in times.cells)
    assert said[0] == "compiling the program that is measured" and said[-1] == "measuring, repeat 2 of 2, step 3 of 3"


def test_what_was_measured_becomes_the_schedule(monkeypatch):
    e = own_engine((1, 2))
    monkeypatch.setattr("dspark_jax.serve.engine.measure_steps", lambda ring, params, **_: StepTimes(CELLS))
    e._adopt_step_times(print)
    table = StepTimes(CELLS).table(e.fingerprint)
    assert e.ring.buckets == (4, 8) and e.ring.sizes.schedule == Schedule(StaleSize(table.cost(2, 8)))
    assert table.cost(2, 8).rows[3:6] == (0.02, 0.02, 0.04) and e.step_times == StepTimes(CELLS)
    with pytest.raises(ConfigError, match="placement is ''; here it is"):  # the times belong to this placement
        layers, experts = tiny.CONFIG.num_hidden_layers + tiny.DRAFT.num_stages, tiny.CONFIG.n_routed_experts
        e.set_placement(Placement.auto(layers, experts, experts, 2))


@pytest.mark.long
@pytest.mark.parametrize("mesh", [(1, 1), (2, 2)])
def test_an_engine_measures_for_itself_and_then_uses_it(mesh):
    e = own_engine(mesh)
    e.warmup()
    times = e.step_times
    assert times is not None and [(c.requests, c.rows, c.bucket) for c in times.cells] == WANTED
    table = times.table(e.fingerprint)
    assert e.ring.buckets == (4, 8) and e.ring.sizes.schedule == Schedule(StaleSize(table.cost(2, 8)))
    prompts = [prompt for prompt, _ in tiny.requests(6)]
    params = SamplingParams(max_tokens=6)
    want = [c.tokens for c in tiny.lm().generate(prompts, params, speculate=False, ignore_eos=True)]
    assert [c.tokens for c in e.generate(prompts, params, ignore_eos=True)] == want


@pytest.mark.long
def test_steps_with_other_rows_than_ordered_are_no_figures(monkeypatch):
    e = own_engine((1, 1))  # the same program as above: compiled before
    monkeypatch.setattr(profile, "drafts_of", lambda total, requests, slots: drafts_of(total - 1, requests, slots))
    with pytest.raises(RuntimeError, match=r"should have had 4 rows in bucket 4; it had \[3.\] in \[4\]"):
        measure_steps(e.ring, e._params, repeats=1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"repeats": 0}, "repeats is 0"), ({"max_len": 16}, "max_len is 16; expected at least 22 positions")],
)
def test_impossible_measurements_are_refused(changes, words):
    ring = tiny.engine(1, 1).ring
    with pytest.raises(ConfigError, match=words):
        if "max_len" in changes:
            ring = type(ring)(ring.spec, ring.pipeline.whole, ring.mesh, replace(ring.sizes, **changes))
            changes = {}
        measure_steps(ring, {}, **changes)


@pytest.mark.parametrize(
    ("scheduler", "measurable", "words"),
    [
        ("stale-size", False, "'measure', which only an Engine of one process does"),
        ("threshold:0.5", True, "scheduler threshold does not use step times"),
        (None, True, "profile is given without a scheduler"),
    ],
)
def test_where_measuring_is_refused(scheduler, measurable, words):
    with pytest.raises(ConfigError, match=words):
        schedule_source(scheduler, MEASURE, measurable=measurable)


def test_an_unmeasured_source_is_refused_where_nothing_measures():
    source = schedule_source("early-stop", MEASURE, measurable=True)
    assert source is not None and source.measure and source.buckets is None
    with pytest.raises(ConfigError, match="only an Engine of one process"):
        schedule_source(source)


def command(monkeypatch, capsys, *arguments: str):
    monkeypatch.setattr(sys, "argv", ["dspark-jax", "profile", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return stop.value.code or 0, capsys.readouterr()


@pytest.fixture
def measured(monkeypatch):
    """The command with an engine that is not run; what it was asked for."""
    asked = {}

    class Stub:
        slots, fingerprint, draft_config = 2, Fingerprint("m" * 64, "1x1", "", "cpu"), None

        def __init__(self, model, **options):
            asked.update(options, model=model)

        def measure_steps(self, repeats, progress):
            asked["repeats"] = repeats
            return StepTimes(CELLS)

    monkeypatch.setattr("dspark_jax.serve.engine.Engine", Stub)
    return asked


def test_command_writes_a_table_that_can_be_read(measured, monkeypatch, capsys, tmp_path):
    out, plot = tmp_path / "times.json", tmp_path / "times.png"
    options = ("--slots", "2", "--buckets", "8,4", "--repeats", "3", "--out", str(out), "--plot", str(plot))
    code, printed = command(monkeypatch, capsys, *options, "--json")
    assert code == 0 and printed.err == "" and plot.read_bytes().startswith(b"\x89PNG")
    assert measured["buckets"] == [4, 8] and measured["repeats"] == 3 and measured["profile"] == MEASURE
    found = json.loads(printed.out)
    assert found["verify"] == {"rows": [4, 8], "seconds": [0.02, 0.04]} and found["mesh"] == "1x1"
    assert found["draft"]["requests"] == [1, 2] and len(found["cells"]) == 3 and found["residual"] < 1e-9
    table = read_profile(out)
    assert table == StepTimes(CELLS).table(Fingerprint("m" * 64, "1x1", "", "cpu"))
    code, printed = command(monkeypatch, capsys, "--read", str(out))
    assert code == 0 and "30.000 ms" in printed.out and "50.000 ms" in printed.out and "drafting" in printed.out


def test_command_reads_foreign_forms(monkeypatch, capsys, tmp_path):
    path = tmp_path / "rates.json"
    path.write_text(json.dumps({"sample_batch_tokens": [1, 8], "sample_steps_per_sec": [9, 5], "max_batch_tokens": 64}))
    code, printed = command(monkeypatch, capsys, "--read", str(path), "--json", "--plot", str(tmp_path / "p.png"))
    assert code == 0 and json.loads(printed.out)["verify"] == {
        "rows": [1, 8], "seconds": pytest.approx([1 / 9, 1 / 5]), "between": "floor"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--buckets", "4,none"], "--buckets is '4,none'"),
        (["--out", "/no/such/f.json"], "there is no folder '/no/such'"),
        (["--read", "none.json", "--slots", "2", "--out", "x"], "2 faults"),
        (["--read", "none.json"], "none.json: cannot be read"),
        (["--plot", "x.xyz"], "ends in '.xyz'"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(measured, arguments, words, monkeypatch, capsys):
    code, printed = command(monkeypatch, capsys, *arguments)
    assert code == 2 and printed.out == "" and words in printed.err and "Traceback" not in printed.err


def test_the_option_of_bench_serve_takes_the_word_for_a_file_only_where_it_can():
    source = schedule_of("stale-size", Path("measure"), None, False, measurable=True)
    assert source is not None and source.measure
    with pytest.raises(ConfigError, match="/measure: cannot be read"):
        schedule_of("stale-size", Path("./measure").absolute(), None, False, measurable=True)
    with pytest.raises(ConfigError, match="only an Engine of one process"):
        schedule_of("stale-size", Path("measure"), None, False)
