"""`bench round` on a model of two layers: its records, its floor against the shapes of a model, and the profile's parser.
Times of a CPU say nothing here."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import ConfigError
from dspark_jax.bench import round as bench
from dspark_jax.bench.device_profile import DeviceProfile, Kernel, summary
from dspark_jax.bench.round import Settings
from dspark_jax.bench.round_programs import Measured, Program, Subject
from dspark_jax.bench.stage_programs import make_weights
from dspark_jax.bench.synthetic import shapes_of
from dspark_jax.parallel.stage_cost import CostModel
from dspark_jax.presets import v4_flash
from helpers.micro import MICRO, MICRO_DRAFT

CONFIG = replace(MICRO, compress_ratios=(0, 0), num_hash_layers=0, max_position_embeddings=256)


@pytest.mark.long
@pytest.mark.parametrize("count", [False, True])
def test_a_round_and_a_step_are_timed_on_a_cpu(count, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench, "model_configs", lambda name: (CONFIG, MICRO_DRAFT))
    out = tmp_path / "round.json"
    found, missing = bench.run(Settings("micro", (2,), context=8, count_experts=count), out)
    assert missing == 0 and json.loads(out.read_text()) == found
    cases = [f"micro, float32, context 8, batch 2, {what}" for what in ("round", "plain step")]
    assert [r["case"] for r in found] == cases and {r["bench"] for r in found} == {"round"}
    round_, plain = found
    # A CPU has no timeline of kernels and no read rate: nothing stands in for them.
    for r in found:
        assert r["time_us"] > 0 and r["memory"]["peak"] is None
        assert {r[name] for name in ("floor_us", "ceiling", "fraction", "busy_us", "launches", "kernels")} == {None}
    assert "on a CPU there are times only" in capsys.readouterr().err
    # Rows choose 2 of 4 experts each; the drafter has a stage.
    assert [r["visited_experts"] and len(r["visited_experts"]) for r in found] == ([3, 2] if count else [None, None])
    assert all(2 <= x <= 4 for r in found for x in r["visited_experts"] or ())
    assert plain["tokens_per_round"] == 1 < round_["tokens_per_round"] < 3
    sizes = {draft: shapes_of(CONFIG, draft, "float32") for draft in (MICRO_DRAFT, None)}
    expected = [sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(s)) for s in sizes.values()]
    assert [r["memory"]["weights"] for r in found] == expected


def flash(layers: int) -> Subject:
    """Window layers alone, whose caches are easily counted."""
    config, draft = bench.first_layers(*v4_flash(), layers)
    config = replace(config, compress_ratios=(0,) * layers)
    return Subject("flash", config, draft, "bfloat16", 4096, None, 4)


def weight_bytes(what: Subject, visited: dict[str, float]) -> dict[str, float]:
    """Bytes that one pass reads of each part: of experts the visited share, of tables (by row) nothing."""
    found = dict.fromkeys(("target", "draft", "head", "w2"), 0.0)
    for path, x in jax.tree_util.tree_leaves_with_path(shapes_of(what.config, what.draft, what.dtype)):
        name, size = jax.tree_util.keystr(path), x.size * x.dtype.itemsize
        side = "target" if "['target']" in name else "draft"
        if any(table in name for table in ("embed", "markov_w1", "tid2eid")):
            continue
        if "['experts']" in name:
            size *= visited[side] / what.config.n_routed_experts
        part = "w2" if "markov_w2" in name else "head" if side == "target" and "['layers']" not in name else side
        found[part] += size
    return found


def test_the_floor_is_what_must_be_read():
    what = flash(4)
    c, gamma, rate, spread = what.config, what.draft.block_size, 4e12, CostModel().block_spread
    window = c.sliding_window * c.head_dim * 2
    context = 3 * c.hidden_size * c.head_dim * 2  # a second product with the draft stages' wkv: keys of the context's rows

    def visited(rows: float) -> float:
        return c.n_routed_experts * (1 - (1 - c.num_experts_per_tok / c.n_routed_experts) ** rows)

    def tables(rows: int) -> int:
        return rows * c.num_hash_layers * c.num_experts_per_tok * 4

    def step(n: int, experts: float) -> float:
        part = weight_bytes(what, {"target": experts, "draft": 0})
        return 1e6 * (part["target"] + tables(n) + part["head"] + 4 * n * window) / rate

    def round_(n: int, target: float, draft: float) -> float:
        part = weight_bytes(what, {"target": target, "draft": draft})
        steps = gamma * (part["w2"] + n * what.draft.markov_rank * 4)  # and each request's row of the first matrix
        weights = part["target"] + tables(n * (gamma + 1)) + part["draft"] + 2 * part["head"] + steps + context
        return 1e6 * (weights + 7 * n * window) / rate

    for n in (1, 64):
        assert bench.floor_us(what, n, False, rate) == pytest.approx(step(n, visited(n)), rel=1e-9)
        expected = round_(n, visited(n * (gamma + 1)), visited(n * (1 + spread * (gamma - 1))))
        assert bench.floor_us(what, n, True, rate) == pytest.approx(expected, rel=1e-9)
        assert bench.floor_us(what, n, False, rate, [20] * 4) == pytest.approx(step(n, 20), rel=1e-9)
        counted = bench.floor_us(what, n, True, rate, [10, 30, 20, 20, 9, 7, 5])
        assert counted == pytest.approx(round_(n, 20, 7), rel=1e-9)


def test_a_gpu_adds_floor_profile_and_peak(monkeypatch):
    what, rate = flash(2), 4e12
    gpu = SimpleNamespace(device_kind="a GPU", memory_stats=lambda: {"peak_bytes_in_use": 7, "bytes_in_use": 5})
    monkeypatch.setattr(bench.jax, "devices", lambda: [gpu])
    timer: Any = SimpleNamespace(params={"w": np.zeros(3, np.float32)}, temporaries=4)
    profile = DeviceProfile(900.126, 41.0, tuple(Kernel(f"k{i}", 1.0, 2.0) for i in range(12)))
    floor = bench.floor_us(what, 8, False, rate, [20, 30])
    others = {(8, False): {"transformers": 7.0}, (8, True): {"another": 8.0}}
    found = bench._record(what, Program(8, False, timer, None), Measured(4 * floor, profile, 1.0, 3, [20, 30]), rate, others)
    assert (found["fraction"], found["ceiling"], found["floor_us"]) == (0.25, "4.00 TB/s", round(floor, 2))
    assert (found["device"], found["busy_us"], found["launches"]) == ("a GPU", 900.13, 41.0)
    assert found["peers"] == {"transformers": 7.0}
    assert found["kernels"] == [[f"k{i}", 1.0, 2.0] for i in range(10)] and found["visited_experts"] == [20, 30]
    assert found["memory"] == {"weights": 12, "state": 3, "temporaries": 4, "peak": 7}
    bench.show(found)


def test_bad_sizes_are_refused_together():
    with pytest.raises(ConfigError) as error:
        bench.subject(Settings("nano", (1,), layers=7, context=0, dtype="int4"))
    assert all(fault in str(error.value) for fault in ("--layers is 7; expected 1 … 6", "--dtype is 'int4'", "--context is 0"))
    most = 1024 - 19 * 6 - 8  # rounds of one request on a CPU, one more, and two positions
    with pytest.raises(ConfigError, match=f"--context is {most + 1}; expected at most {most}: the model has 1024"):
        bench.subject(Settings("nano", (1,), context=most + 1))
    assert bench.subject(Settings("nano", (1,), context=most)).capacity == 1024
    kept = [bench.subject(Settings("nano", (1,), 3, weights=w)).config for w in ("quantised-all", "quantised")]
    assert [(c.expert_weights, c.linear_weights) for c in kept] == [("fp4", "fp8"), ("fp4", "dense")]


def test_weights_of_codes_are_codes_of_finite_numbers():
    shapes = {
        "experts.w1 4x8x2 uint8": jax.ShapeDtypeStruct((4, 8, 2), jnp.uint8),
        "experts.w1_scale 4x8x1 uint8": jax.ShapeDtypeStruct((4, 8, 1), jnp.uint8),
        "experts.w2 4x128x128 float8_e4m3fn": jax.ShapeDtypeStruct((4, 128, 128), jnp.float8_e4m3fn),
    }
    made = make_weights(shapes, 4)
    assert {key: (x.shape, x.dtype) for key, x in made.items()} == {key: (x.shape, x.dtype) for key, x in shapes.items()}
    codes, scales, fp8 = (np.asarray(x, np.float32) for x in made.values())
    assert set(scales.ravel()) <= {118, 119, 120} and len(set(codes.ravel())) > 8 and codes.max() > 120
    assert abs(fp8.std() - 1) < 0.1


def event(name: str, start: float, duration: float) -> SimpleNamespace:
    return SimpleNamespace(name=name, start_ns=start, duration_ns=duration)


def test_the_profile_counts_launches_and_covered_time():
    first = [event("fusion_12", 0, 3000), event("fusion_3", 2000, 2000), event("gemm_64x64", 10_000, 1000)]
    second = [event("Memcpy D2D", 10_500, 1500), event("gemm_128x64", 12_000, 4000)]
    line = lambda name, events: SimpleNamespace(name=name, events=events)  # noqa: E731
    gpu = [line("Stream #13(Compute)", first), line("Stream #14(MemcpyD2D)", second), line("XLA Ops", first)]
    host = SimpleNamespace(name="/host:CPU", lines=[line("Stream", first)])
    found = summary([host, SimpleNamespace(name="/device:GPU:0", lines=gpu)], 2)
    assert found is not None and found.launches == 2.5
    assert found.busy_us == (4 + 6) / 2  # 0 to 4 and 10 to 16 us, over two ticks
    assert found.kernels == (Kernel("fusion", 2.5, 1.0), Kernel("gemm_#x#", 2.5, 1.0), Kernel("Memcpy D#D", 0.75, 0.5))
    assert summary([host], 2) is None
