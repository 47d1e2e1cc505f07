"""The stage benchmark on a model of two window layers: every rank of every cut is there, the fit finds known rates, and what
fails is left out of the report. Seconds of a CPU say nothing here."""

import json
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from dspark_jax.bench import stage_times
from dspark_jax.bench.stage_fit import Measured, fit
from dspark_jax.bench.stage_programs import Experts, Setting, Stage, make_weights, scaled
from dspark_jax.parallel.stage_cost import CostModel
from dspark_jax.presets import v4_flash, v4_pro
from helpers.micro import MICRO, MICRO_DRAFT

CONFIG = replace(MICRO, compress_ratios=(0, 0), num_hash_layers=0)
SETTING = Setting(CONFIG, MICRO_DRAFT, 2, 16, "float32")
# Far enough from a maximum of two times for each of them to show.
BASE = replace(CostModel(), overlap=4.0)
TRUTH = replace(
    BASE,
    read_bandwidth=3e12,
    matmul_rate=4e14,
    overlap=2.0,
    layer_launches=2 * BASE.layer_launches,
    head_launches=2 * BASE.head_launches,
    step_launches=2 * BASE.step_launches,
)
FLASH = Setting(*scaled(*v4_flash(), 14), 16, 4096)


@pytest.mark.long
def test_stages_are_run_and_every_rank_is_reported(tmp_path):
    out = tmp_path / "times.json"
    found = stage_times.run(SETTING, [2], out=out, fitting=False)
    assert json.loads(out.read_text()) == json.loads(json.dumps(found))
    assert {"command", "date", "device", "jax", "costs"} <= set(found) and "fitted" not in found
    plan = SETTING.plan(2, CostModel())
    for rank, line in enumerate(found["stages"]):
        assert (line["rank"], line["layers"], line["rows"]) == (rank, list(plan.ranges[rank]), 6)
        assert line["seconds"] == np.median(line["groups"]) > 0 and len(line["groups"]) == 10 and line["finite"]
    check_cuts(found, [2])


def check_cuts(found, pipes):
    """What the summary of every cut says against the lines of its ranks."""
    assert [(line["pipe"], line["rank"]) for line in found["stages"]] == [(p, rank) for p in pipes for rank in range(p)]
    assert [cut["pipe"] for cut in found["cuts"]] == pipes
    for cut in found["cuts"]:
        lines = [line for line in found["stages"] if line["pipe"] == cut["pipe"]]
        seconds = np.array([line["seconds"] for line in lines])
        assert cut["complete"] and cut["ranges"] == [line["layers"] for line in lines]
        assert cut["balance"] == pytest.approx(seconds.mean() / seconds.max())
        for one in (cut["fitted"], cut["given"]):
            predicted = np.array(one["seconds"])
            assert one["error"] == pytest.approx(predicted / seconds - 1)
            assert one["error_scaled"] == pytest.approx(predicted / seconds * seconds.sum() / predicted.sum() - 1)
        assert cut["fitted"]["seconds"] == pytest.approx([line["predicted"] for line in lines], rel=1e-12)


@pytest.mark.long
def test_costs_fitted_to_pieces_predict_stages(monkeypatch):
    """On a device that is exactly as another cost model says; nothing is compiled."""
    pieces = {}

    def compile_all(found, report):
        pieces.update((piece.program, piece) for piece in found)
        return list(found)

    monkeypatch.setattr(stage_times, "compile_all", compile_all)
    monkeypatch.setattr(stage_times, "measure", lambda program: ([pieces[program].cost(TRUTH)] * 3, True))
    found = stage_times.run(FLASH, [2, 4], [64])
    check_cuts(found, [2, 4])
    assert max(map(abs, found["fit_errors"].values())) < 0.01 and len(found["pieces"]) == 10
    for cut in found["cuts"]:
        assert cut["ranges"] == [list(r) for r in FLASH.plan(cut["pipe"], CostModel(**found["fitted"])).ranges]
        assert max(map(abs, cut["fitted"]["error"])) < 0.01 < 0.1 < max(map(abs, cut["given"]["error"]))


@pytest.mark.long
def test_what_cannot_be_run_is_left_out(monkeypatch, capsys):
    """One rank runs out of memory: the others are still timed."""
    compiled = Stage.compile

    def compile_first(self: Stage) -> float:
        if self.rank == 1:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: planted")
        return compiled(self)

    monkeypatch.setattr(Stage, "compile", compile_first)
    found = stage_times.run(SETTING, [2], fitting=False)
    assert [line["rank"] for line in found["stages"]] == [0] and not found["pieces"] and "fitted" not in found
    assert not found["cuts"][0]["complete"] and "cannot be compiled: RESOURCE_EXHAUSTED: planted" in capsys.readouterr().out


@pytest.mark.long
def test_requests_draft_in_every_run():
    """Idle requests would draft without rows, and a kernel for visited experts alone would have nothing to do."""
    stage = Stage(SETTING, ((0, 1), (1, 2)), 1)
    stage.compile()
    once = stage.start(make_weights(stage.params, 4))
    confidences = [np.asarray(once()[1]) for _ in range(3)]
    drafted = [(c != 0).all(axis=1) for c in confidences]
    assert all(d[:2].all() and not d[2:].any() for d in drafted)  # slots of the first microbatch


def test_scaled_models_keep_the_shapes_and_the_mix():
    config, draft = FLASH.config, FLASH.draft
    whole, stages = v4_flash()
    assert config.compress_ratios == (0, *(4, 128) * 6, 4)
    assert config.num_hash_layers == draft.num_stages == 1 and draft.target_layer_ids == (11, 12, 13)
    same = {"num_hidden_layers", "compress_ratios", "num_hash_layers"}
    assert {k: v for k, v in vars(config).items() if k not in same} == {k: v for k, v in vars(whole).items() if k not in same}
    assert scaled(whole, stages, 43) == (whole, stages)
    pro = scaled(*v4_pro(), 30)[0]
    assert pro.compress_ratios == (128, *(4, 128) * 14, 4) and pro.num_hash_layers == 1


def test_pieces_have_every_kind_of_layer():
    found = stage_times.pieces(FLASH, [64])
    assert [(piece.name, piece.facts["rows"]) for piece in found] == [
        ("sparse layer, head, drafter of 1", 96),
        ("sparse layer, head, drafter of 2", 96),
        ("hashed window layer", 96),
        ("sparse layer", 96),
        ("heavy layer", 96),
        ("experts", 96),
        ("sparse layer, head, drafter of 1", 384),
        ("sparse layer", 384),
        ("heavy layer", 384),
        ("experts", 384),
    ]
    model = CostModel()
    cost = {(piece.name, piece.facts["rows"]): piece.cost(model) for piece in found}
    assert cost["experts", 384] == model.experts(FLASH.config, replace(FLASH, requests=64).load)
    assert 0 < cost["sparse layer", 96] - cost["experts", 96] < 0.3 * cost["experts", 96]
    assert isinstance(found[-1].program, Experts) and found[-1].program.params["w2"].shape == (256, 2048, 4096)
    two, one = cost["sparse layer, head, drafter of 2", 96], cost["sparse layer, head, drafter of 1", 96]
    spread = replace(model, block_spread=1.0)
    assert found[1].cost(spread) - found[0].cost(spread) > cost["experts", 96] * 0.8 > two - one > cost["experts", 96] * 0.3


def test_fit_finds_the_rates_that_made_the_seconds():
    ranges = ((0, 4), (4, 8), (8, 12), (12, 14))
    settings = [replace(FLASH, requests=n) for n in (4, 16, 512)]
    costs = [partial(s.seconds, ranges, rank) for s in settings for rank in (0, 1, 3)]
    costs += [partial(lambda load, model: model.experts(FLASH.config, load), s.load) for s in settings]
    found = fit([Measured(cost, cost(TRUTH)) for cost in costs], BASE)
    for name in ("read_bandwidth", "matmul_rate", "overlap"):
        assert getattr(found, name) == pytest.approx(getattr(TRUTH, name), rel=0.05)
    assert found.launch == BASE.launch and found.head_launches / found.step_launches == pytest.approx(
        BASE.head_launches / BASE.step_launches
    )
    for seconds in ([], [0.0]):
        with pytest.raises(ValueError, match="expected at least one, all positive"):
            fit([Measured(lambda model: 1.0, s) for s in seconds], CostModel())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pipes", "2,x"], "--pipes is '2,x'; expected positive integers"),
        (["--requests", "0"], "--requests is '0'; expected positive integers"),
        (["--layers", "44"], "--layers is 44; expected 5 … 43"),
        (["--context", "8"], "--context is 8; expected at least 12, two blocks"),
        (["--pipes", "15"], "15 pipe ranks for 14 layers"),
        (["--dtype", "int4"], "dtype is 'int4'; expected float32"),
        (["--model", "v5"], "v5"),
    ],
)
def test_bad_input_is_exit_code_2(arguments, message, capsys):
    assert stage_times.main(arguments) == 2
    assert message in capsys.readouterr().err
