"""`Engine` on dense targets with drafters of their own files: the golden texts, round by round, on every mesh."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark_jax import LM, CheckpointError, ConfigError, SamplingParams, load
from dspark_jax.checkpoint.drafter import open_drafter
from dspark_jax.checkpoint.reader import open_checkpoint
from dspark_jax.config_dense import DenseConfig
from dspark_jax.config_drafter import StandaloneConfig
from dspark_jax.parallel.mesh import make_mesh
from dspark_jax.parallel.planner import given_stages, plan_stages
from dspark_jax.serve.engine import Engine
from helpers.dense import letters
from helpers.standalone import DATA, DEEPSPEC, SPECULATORS, TARGET, open_pair

TOKENS, MAX_LEN = 40, 64
VANILLA, MASKS = "deepspec_tiny/vanilla", "speculators_tiny/masks"


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    """The golden target with a tokenizer, which its maker did not need."""
    folder = shutil.copytree(TARGET, tmp_path_factory.mktemp("dense") / "target")
    letters().save(str(folder / "tokenizer.json"))
    return folder


def drafter(name: str) -> Path:
    return open_pair(name)[0]


def engine(target: Path | LM, mesh: str, **options: Any) -> Engine:
    """One slot for every device; chunks are as wide as a vanilla drafter's block, which saves a branch for every rank."""
    pipe, expert = map(int, mesh.split("x"))
    slots = max(2, pipe * expert)
    stages = {1: None, 2: "4,2", 3: "2,2,2"}[pipe]
    options = {"chunk": 6, "slots": slots + slots % (pipe * expert), "stages": stages, "max_len": MAX_LEN} | options
    return Engine(target, mesh=make_mesh(pipe, expert), **options)


def golden_answers(e: Engine, name: str) -> list:
    """Answers to the golden prompts, each twice and all at once, so that slots are taken by a second request."""
    texts = open_pair(name)[2]
    prompts = [texts[f"text{i % 2}/prompt"].tolist() for i in range(4)]
    answers = e.generate(prompts, SamplingParams(max_tokens=TOKENS), ignore_eos=True)
    assert [list(a.tokens) for a in answers] == [texts[f"text{i % 2}/greedy"].tolist() for i in range(4)]
    return answers


def check_rounds(answers: list, name: str) -> None:
    """Every round accepts what the drafter's maker saw, so every draft is its drafter's."""
    folder, goldens, _ = open_pair(name)
    for i, answer in enumerate(answers):
        known = goldens[f"text{i % 2}/{folder.name.removeprefix('drafter-')}/accepted"].tolist()
        found = [len(run) for run in "".join("dt"[not d] for d in answer.drafted[1:]).split("t")[:-1]]  # whole rounds
        assert len(found) > 5 and len(known) - 2 <= len(found)  # the last one is cut where there are tokens enough
        assert all(a == b for a, b in zip(found, known, strict=False))


LONG = [
    *((name, "2x1") for name in (*DEEPSPEC, *SPECULATORS) if name not in (VANILLA, MASKS)),
    *((VANILLA, mesh) for mesh in ("1x1", "1x2", "2x1", "2x2", "3x1")),
]


@pytest.mark.parametrize(("name", "mesh"), [(MASKS, "2x2"), *(pytest.param(*case, marks=pytest.mark.long) for case in LONG)])
def test_every_round_is_the_references(target, name, mesh):
    folder, goldens, _ = open_pair(name)
    block = goldens[f"text0/{folder.name.removeprefix('drafter-')}/tokens"].shape[1]
    e = engine(target, mesh, drafter=folder, chunk=block + 1)
    check_rounds(golden_answers(e, name), name)


@pytest.mark.long
def test_changing_lengths_keep_the_text(target):
    """A scheduler with packed rows, two stages: taps of both ranks, and the tied head on the last."""
    e = engine(target, "2x1", drafter=drafter(VANILLA), scheduler="threshold:0.5", buckets=(3,))
    answers = golden_answers(e, VANILLA)
    lengths = [n for a in answers for n in a.verify_lengths]
    assert len(set(lengths)) > 2 and sum(sum(a.drafted) for a in answers) > 20
    assert {b for tick in e.timeline for b in tick.bucket or ()} == set(e.ring.buckets) and len(e.ring.buckets) == 2


@pytest.mark.long
def test_sampled_texts_and_log_probabilities_are_the_batch_interfaces(target):
    params = [SamplingParams(0.9, 0, 0.95, seed, TOKENS, logprobs=2) for seed in range(4)]
    prompts = [[3, 1, 4, 1, 5], [9, 2], [6] * 11, [5, 3, 5]]
    wanted = load(target, drafter=drafter(VANILLA), max_len=MAX_LEN).generate(prompts, params)
    found = engine(target, "2x2", drafter=drafter(VANILLA), max_logprobs=2).generate(prompts, params)
    for one, other in zip(found, wanted, strict=True):
        assert one.tokens == other.tokens and one.drafted == other.drafted and one.logprobs and other.logprobs
        assert np.allclose([p.logprob for p in one.logprobs], [p.logprob for p in other.logprobs], atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("pard", [False, True])
def test_a_model_that_drafts_by_itself(target, tmp_path, pard):
    """The target as its own drafter, so token by token all drafts are accepted; as PARD it is one that knows little."""
    folder = shutil.copytree(target, tmp_path / "drafter")
    if pard:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"pard_token": 95}))
    answers = golden_answers(engine(target, "2x1", drafter=folder, draft_tokens=3, chunk=4), VANILLA)
    rounds = {a.rounds for a in answers}
    assert rounds == {10} if not pard else 10 < min(rounds) <= max(rounds) < TOKENS


@pytest.mark.long
def test_schedulers_that_weigh_step_times_measure_them(target):
    e = engine(target, "1x2", drafter=drafter(VANILLA), scheduler="stale-rate", profile="measure", rounds_per_call=1)
    golden_answers(e, VANILLA)
    assert e.step_times is not None and set(e.step_times.verify) == set(e.ring.buckets)


@pytest.mark.long
def test_plain_decoding_of_an_lm(target):
    golden_answers(engine(load(target), "2x2"), VANILLA)


PLANNED = [(None, "3x1"), ("deepspec_tiny/gated", "2x2"), ("speculators_tiny/rnn", "3x1"), ("draft model", "2x2")]
REST = [(name, mesh) for name in (*DEEPSPEC, *SPECULATORS) for mesh in ("1x1", "2x2", "3x1") if (name, mesh) not in PLANNED]


@pytest.mark.parametrize(("name", "mesh"), [*PLANNED, *(pytest.param(*case, marks=pytest.mark.long) for case in REST)])
def test_the_planned_memory_is_that_of_the_arrays(target, name, mesh):
    files = target if name == "draft model" else name and drafter(name)
    e = engine(target, mesh, drafter=files)
    memory, ranks = e.plan.memory, e.ring.spec.expert
    held = sum(x.addressable_shards[0].data.nbytes for x in e._params.values())
    assert memory.parameters == held
    caches = sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in e.ring.caches.shapes.values())
    assert memory.slots * memory.cache == caches and memory.item == e.ring.item_bytes
    assert e.slots == memory.slots * ranks


def test_the_planner_gives_the_rank_with_the_drafter_fewer_layers():
    folder = drafter("deepspec_tiny/vanilla")
    target = open_checkpoint(TARGET, dtype="float32")
    draft, small = open_drafter(target, folder, dtype="float32").draft, target.config
    assert isinstance(draft, StandaloneConfig) and isinstance(small, DenseConfig)
    sizes: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "vocab_size": 4096}
    config = dataclasses.replace(small, **sizes)
    layers = dataclasses.replace(draft.layers, **(sizes | {"num_hidden_layers": 4}))
    large = dataclasses.replace(draft, layers=layers, num_target_layers=24, draft_vocab_size=4096)
    plain, drafting = (plan_stages(config, d, 2, rows=32, context=256) for d in (None, large))
    assert drafting.ranges[1][0] > plain.ranges[1][0] >= 12
    assert plain.costs[1].drafter == 0 < drafting.costs[1].drafter and drafting.costs[0].head == 0 < drafting.costs[1].head
    given = given_stages(small, draft, "4,2", 2, rows=12, context=64)
    assert given.draft_stages == 2 and given.positions == (4, 4)
    with pytest.raises(ConfigError, match="num_slots is 8; a dense model has no experts"):
        plan_stages(small, draft, 2, rows=12, context=64, num_slots=8)


REFUSED = [
    ({"draft_tokens": 3}, ConfigError, "draft_tokens is 3, without a drafter"),
    ({"drafter": DATA / "none"}, CheckpointError, "none"),
    ({"drafter": DATA / "deepspec_tiny/drafter-vanilla", "draft_tokens": 3}, ConfigError, "this drafter's block has 5"),
    ({"placement": {}}, ConfigError, "has no experts to place"),
    ({"count_experts": (0, 1)}, ConfigError, "has no experts to place"),
    ({"scheduler": "threshold:0.5"}, ConfigError, "there is no drafter"),
    ({"stages": "3,4"}, ConfigError, "the layer counts .* sum to 7; the model has 6 layers"),
    ({"weights": "quantised"}, CheckpointError, "a dense model has none: use 'dequantised'"),
]


@pytest.mark.parametrize(("options", "error", "message"), REFUSED)
def test_refusals(target, options, error, message):
    with pytest.raises(error, match=message):
        engine(target, "1x1", **options)


def test_experts_and_second_drafters_are_refused_later_too(target):
    e = engine(target, "1x1")
    with pytest.raises(ConfigError, match="set_placement: the model is a dense model, which has no experts"):
        e.set_placement(None)
    with pytest.raises(ConfigError, match=r"has its drafter or none: drafter is .*; give it to `load`"):
        engine(load(target), "1x1", drafter=drafter(VANILLA))
    with pytest.raises(ConfigError, match="drafters with files of their own are for dense targets"):
        Engine("nano", drafter=drafter(VANILLA))
