"""`scheduler=`, `profile=` and `temperatures=`: what is read, what is refused and when, and what the numbers say then."""

import json
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from dspark_jax import LM, ConfigError, Engine, SamplingParams, cli, load
from dspark_jax.decode.calibration_file import Calibration, head_digest
from dspark_jax.decode.profile_table import ProfileTable, measured
from dspark_jax.decode.schedule import EarlyStop, FixedLength, Schedule, StaleRate, StaleSize, StepCost, Threshold
from dspark_jax.decode.schedule_source import fingerprint_of, schedule_source
from dspark_jax.eplb import Placement
from dspark_jax.parallel.mesh import make_mesh
from dspark_jax.testing import LookupTarget
from helpers.lookup_lm import GAMMA, lookup_lm, noisy


@pytest.fixture
def table(tiny_model) -> ProfileTable:
    """Step times of the tiny model on one device."""
    here = fingerprint_of(tiny_model.config, tiny_model.draft, jnp.float32, make_mesh())
    return measured({4: 1.0, 12: 1.5, 32: 2.0}, {1: 0.1, 8: 0.2}, here)


@pytest.fixture
def calibration(tiny_model) -> Calibration:
    return Calibration((0.5, 1.5, 3.0), "tests", 300, (0.1,) * 3, (0.1,) * 3, model=head_digest(tiny_model.params()))


@pytest.fixture
def files(table: ProfileTable, calibration: Calibration, tmp_path) -> dict:
    table.write(tmp_path / "times.json")
    calibration.write(tmp_path / "temperatures.json")
    return {"profile": tmp_path / "times.json", "temperatures": tmp_path / "temperatures.json"}


@pytest.mark.parametrize(
    ("name", "scheduler"),
    [("fixed", FixedLength()), ("fixed:0", FixedLength(0)), ("fixed:2", FixedLength(2)), ("threshold:0.6", Threshold(0.6))],
)
def test_names_that_need_no_file(name, scheduler):
    source = schedule_source(name)
    assert source is not None and source.schedule(4, GAMMA) == Schedule(scheduler) and source.buckets is None


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("early-stop", EarlyStop), ("stale-size", StaleSize), ("stale-size:1", lambda cost: StaleSize(cost, 1)),
        ("stale-rate", StaleRate), ("stale-rate:3", lambda cost: StaleRate(cost, 3)),
    ],
)  # fmt: skip
def test_names_with_their_files(files, table, name, make):
    source = schedule_source(name, **files)
    assert source is not None and source.buckets == (4, 12, 32)
    assert source.schedule(2, 3) == Schedule(make(table.cost(2, 8)), (0.5, 1.5, 3.0))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"scheduler": "best"}, "scheduler is 'best'; expected fixed:LENGTH"),
        ({"scheduler": "fixed:few"}, "scheduler is 'fixed:few'; expected fixed:LENGTH"),
        ({"scheduler": "fixed:-1"}, "length is -1"),
        ({"scheduler": "threshold"}, "expected threshold:CONFIDENCE"),
        ({"scheduler": "threshold:nan"}, "threshold is nan"),
        ({"scheduler": "early-stop:3"}, "early-stop has no setting"),
        ({"scheduler": "stale-size:0", "profile": "none.json"}, "(?s)lag is 0.*none.json: cannot be read"),
        ({"scheduler": "stale-size"}, "stale-size weighs tokens against step times; give a file of them"),
        ({"scheduler": FixedLength(2)}, "expected a Schedule"),
        ({"scheduler": Schedule(FixedLength(2)), "temperatures": "t.json"}, "temperatures is given beside a Schedule"),
        ({"profile": "t.json"}, "profile is given without a scheduler"),
        ({"unsigned": True}, "unsigned is given without a scheduler"),
    ],
)
def test_what_is_wrong_in_itself_is_named(arguments, words):
    with pytest.raises(ConfigError, match=words):
        schedule_source(arguments.pop("scheduler", None), **arguments)


def cut(path) -> None:
    path.write_text(path.read_text()[:-30])


def spoil(key: str, **changes):
    """Overwrites a file with one of another model."""

    def apply(files: dict, values: dict) -> None:
        value = values[key]
        if key == "profile":
            value = replace(value, fingerprint=replace(value.fingerprint, **changes))
        else:
            value = replace(value, **changes)
        value.write(files[key])

    return apply


WRONG = [
    (lambda files, _: cut(files["profile"]), "times.json: is not JSON"),
    (lambda files, _: cut(files["temperatures"]), "temperatures.json: is not JSON"),
    (lambda files, _: files["profile"].unlink(), "times.json: cannot be read"),
    (spoil("profile", model="f" * 64), "times.json: model is 'ffff"),
    (spoil("profile", mesh="1x2"), "mesh is '1x2'; here it is '1x1'"),
    (spoil("profile", device="abacus"), "device is 'abacus'"),
    (spoil("profile", placement="f" * 64), "placement is"),
    (spoil("temperatures", model="f" * 64), "temperatures.json: model is ffff"),
    (spoil("temperatures", model=None), "nothing says which model they belong to"),
    (spoil("temperatures", temperatures=(1.0, 1.0)), "there are 2; expected 3"),
]


@pytest.mark.parametrize(("spoil", "words"), WRONG)
@pytest.mark.parametrize("make", [load, Engine])
def test_wrong_stale_and_cut_off_files_are_refused_before_any_device_work(
    tiny_folder, files, table, calibration, make, spoil, words, monkeypatch
):
    spoil(files, {"profile": table, "temperatures": calibration})
    forbid(monkeypatch)
    with pytest.raises(ConfigError, match=words):
        make(tiny_folder, scheduler="stale-size", **files)


def test_both_files_are_told_of_at_once(tiny_folder, files, table, calibration, monkeypatch):
    for key, changes in (("profile", {"mesh": "2x2"}), ("temperatures", {"model": "f" * 64})):
        spoil(key, **changes)(files, {"profile": table, "temperatures": calibration})
    forbid(monkeypatch)
    with pytest.raises(ConfigError, match=r"(?s)2 faults.*mesh is '2x2'.*model is ffff"):
        Engine(tiny_folder, scheduler="stale-size", **files)


def forbid(monkeypatch) -> None:
    """No parameter may be placed, and no array made."""

    def refuse(*_, **__):
        raise AssertionError("device work")

    for name in ("device_put", "make_array_from_callback", "make_array_from_single_device_arrays"):
        monkeypatch.setattr(jax, name, refuse)
    monkeypatch.setattr("dspark_jax.serve.engine.Ring", refuse)


def test_foreign_tables_are_accepted_only_when_told_so(tiny_folder, tmp_path):
    path = tmp_path / "rates.json"
    path.write_text(json.dumps({"sample_batch_tokens": [1, 8], "sample_steps_per_sec": [9, 5], "max_batch_tokens": 64}))
    with pytest.raises(ConfigError, match="has no fingerprint"):
        load(tiny_folder, scheduler="early-stop", profile=path)
    assert isinstance(load(tiny_folder, scheduler="early-stop", profile=path, unsigned=True), LM)


def test_files_that_fit_are_taken_and_their_rows_are_the_buckets(tiny_folder, files, table):
    e = Engine(tiny_folder, scheduler="early-stop", slots=4, **files)
    assert e.ring.buckets == (4, 12, 16)
    assert e.ring.sizes.schedule == Schedule(EarlyStop(table.cost(4, 16)), (0.5, 1.5, 3.0))


def test_requests_behind_the_end_of_the_table_are_refused(tiny_folder, files):
    with pytest.raises(ConfigError, match="ends at 32 rows, and 40 requests on an expert rank have 40 anchors"):
        Engine(tiny_folder, scheduler="early-stop", slots=40, **files)


def test_step_times_do_not_survive_a_new_placement(tiny_folder, tiny_model, tmp_path):
    config, draft, mesh = tiny_model.config, tiny_model.draft, make_mesh(1, 2)
    here = fingerprint_of(config, draft, jnp.float32, mesh)
    measured({32: 2.0}, {1: 0.1}, here).write(tmp_path / "times.json")
    e = Engine(tiny_folder, mesh=mesh, scheduler="early-stop", profile=tmp_path / "times.json")
    layers, experts = config.num_hidden_layers + draft.num_stages, config.n_routed_experts
    with pytest.raises(ConfigError, match="placement is ''; here it is"):
        e.set_placement(Placement.auto(layers, experts, experts, 2))
    assert e.placement is None


def test_a_scheduler_needs_a_drafter(tiny_folder):
    with pytest.raises(ConfigError, match="there is no drafter"):
        Engine(tiny_folder, scheduler="fixed:1", speculate=False)
    with pytest.raises(ConfigError, match="there is no drafter"):
        lookup_lm(LookupTarget.random(16), None, scheduler="fixed:1")


@pytest.fixture(scope="module")
def hasty() -> LM:
    """A chain of letters; with confidence 1/2 for every draft, two requests verify three drafts in all."""
    target = LookupTarget.random(16, seed=4)
    cost = StepCost((0, 1, *(1 + 0.1 * n for n in range(1, 5)), *[9.0] * 6))
    return lookup_lm(target, noisy(target), chunk=4, scheduler=Schedule(EarlyStop(cost)))


@pytest.mark.long
def test_the_batch_interface_gives_the_same_text_and_counts_what_it_verified(hasty: LM):
    params, rounds = SamplingParams(max_tokens=30), []
    plain = hasty.generate(["abc", "k"], params, speculate=False)
    found = hasty.generate(["abc", "k"], params, on_round=rounds.append)
    assert [c.tokens for c in found] == [c.tokens for c in plain]
    assert {n for c in plain for n in c.verify_lengths} == {0}
    for i, c in enumerate(found):
        mine = [o for o in rounds if o.index == i and o.round]
        assert c.verify_lengths == tuple(o.verified for o in mine) and len(c.verify_lengths) == c.rounds
        assert c.wasted == sum(o.wasted for o in mine) == sum(c.verify_lengths) - sum(c.drafted)
        # A position is put to the test where it was verified and all before it were accepted.
        tested = [sum(o.verified > j and o.accepted >= j for o in mine) for j in range(GAMMA)]
        assert list(c.verified_by_position) == tested
        assert c.accepted_by_position == tuple(sum(o.accepted > j for o in mine) for j in range(GAMMA))
    lengths = {n for c in found for n in c.verify_lengths}
    assert len(lengths) > 1 and max(lengths) < GAMMA and sum(c.wasted for c in found) > 0


def command(monkeypatch, capsys, *arguments: str) -> dict:
    monkeypatch.setattr(sys, "argv", ["dspark-jax", *arguments, "--json"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert not stop.value.code
    return json.loads(capsys.readouterr().out)


def test_evaluate_reports_waste(hasty: LM, tmp_path, monkeypatch, capsys):
    given = {}
    monkeypatch.setattr("dspark_jax.api.load", lambda *_, **options: given.update(options) or hasty)
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "abc"}\n{"prompt": "k"}\n')
    found = command(
        monkeypatch, capsys, "evaluate", "--prompts", str(path), "--max-tokens", "30", "--scheduler", "fixed:2"
    )
    assert given["scheduler"] == schedule_source("fixed:2") and found["scheduler"] == "fixed:2"
    (result,) = found["results"]
    done = hasty.generate(["abc", "k"], SamplingParams(max_tokens=30))
    assert result["with_head"]["verified_drafts"] == sum(sum(c.verify_lengths) for c in done)
    assert result["with_head"]["wasted_drafts"] == sum(c.wasted for c in done)
    assert result["identical"] == 2


@pytest.mark.long
@pytest.mark.parametrize("mesh", [(), ("--mesh", "2x4")], ids=("one", "2x4"))
def test_generate_reports_lengths_and_waste(mesh, tiny_folder, monkeypatch, capsys):
    found = command(
        monkeypatch, capsys, "generate", "--model", str(tiny_folder), "--prompt", "ABC", "--max-tokens", "12", "--compare",
        "--scheduler", "fixed:1", *mesh,
    )  # fmt: skip
    assert set(found["verify_lengths"]) == {1} and len(found["verify_lengths"]) == found["rounds"]
    assert found["wasted_drafts"] == found["rounds"] - sum(found["drafted"]) and found["identical"] is True


BAD_COMMANDS = [
    (("generate", "--prompt", "A", "--scheduler", "best"), "scheduler is 'best'"),
    (("generate", "--prompt", "A", "--scheduler", "fixed:1", "--no-draft"), "--no-draft leaves nothing to schedule"),
    (("generate", "--prompt", "A", "--scheduler", "early-stop", "--profile", "none.json"), "none.json: cannot be read"),
    (("generate", "--prompt", "A", "--mesh", "2x1", "--emulate-devices", "2", "--unsigned"), "given without a scheduler"),
    (("evaluate", "--prompts", "PROMPTS", "--temperatures", "none.json"), "temperatures is given without a scheduler"),
    (("bench", "serve", "--prompts", "PROMPTS", "--scheduler", "stale-size"), "give a file of them"),
]


@pytest.mark.parametrize(("arguments", "words"), BAD_COMMANDS)
def test_a_wrong_option_is_one_message_and_exit_code_2(arguments, words, tmp_path, monkeypatch, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "A"}\n')
    arguments = [str(prompts) if a == "PROMPTS" else a for a in arguments]
    monkeypatch.setattr(sys, "argv", ["dspark-jax", *arguments])
    forbid(monkeypatch)
    with pytest.raises(SystemExit) as stop:
        cli.main()
    printed = capsys.readouterr()
    assert stop.value.code == 2 and printed.out == "" and words in printed.err and "Traceback" not in printed.err
