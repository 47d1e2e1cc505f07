"""`bench mesh`: a run on emulated devices, what its checks say of what is wrong, and the arithmetic of its records.
Times of a CPU say nothing here."""

import json
import sys
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from dspark_jax.bench import mesh as bench
from dspark_jax.bench import mesh_smoke
from dspark_jax.bench.device_profile import each
from dspark_jax.bench.mesh import Settings, main
from dspark_jax.bench.mesh_common import device_name, random_leaves, shape_of
from dspark_jax.bench.mesh_dispatch import Layer
from dspark_jax.bench.mesh_equality import replicas, verdict
from dspark_jax.bench.mesh_pipeline import efficiencies
from dspark_jax.bench.mesh_placement import drawn, slots_of, stretched
from dspark_jax.bench.mesh_rounds import Rounds, collectives_us, reading
from dspark_jax.bench.round import floor_us
from dspark_jax.bench.round_programs import Subject
from dspark_jax.eplb import Placement, assign
from dspark_jax.evaluate import Difference
from dspark_jax.models import dispatch
from dspark_jax.near_tie import Margins
from dspark_jax.parallel.mesh import EXPERT, make_mesh
from dspark_jax.parallel.mesh_config import MeshConfig
from dspark_jax.parallel.planner import given_stages
from helpers.mesh_model import CONFIG, DRAFT
from helpers.runner import scaled_error

TINY = shape_of("nano", 5, "fp4", None, 16, 0.7, None, cpu=True)


def test_smoke_dispatch_and_placement_on_emulated_devices(monkeypatch, tmp_path, capsys):
    """The command as it runs on GPUs; smoke in a process of its own."""
    from dspark_jax.bench import mesh_placement

    load = np.random.default_rng(0).zipf(1.5, (3, 16)).clip(max=50)
    monkeypatch.setattr(mesh_placement, "recorded", lambda *_: (load, "made up"))
    out = tmp_path / "mesh.json"
    options = ["--tiny", "--parts", "smoke,dispatch,placement", "--meshes", "2x1,1x2", "--dispatch-rows", "2", "--json"]
    assert main([*options, "--out", str(out)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert json.loads(out.read_text()) == found
    assert [(r["bench"], r["mesh"]) for r in found] == [
        ("mesh smoke", "2x1"), ("mesh smoke", "1x2"), ("mesh dispatch", "1x2"), *[("mesh placement", "1x2")] * 2,
    ]  # fmt: skip
    assert all(r["time_us"] > 0 and r["device"] == "2 x cpu" for r in found)
    exchange, placements = found[2], found[3:]
    assert set(exchange["peers"]) == {"all-to-all"} and exchange["difference"]["all-to-all"] < 1e-5
    assert {(r["load"], r["slots"], r["rows"], r["mean_rows"]) for r in placements} == {("made up", 18, 2, 8)}
    assert all(set(r["slowest_rank_rows"]) == {"EPLB", "without EPLB"} for r in placements)


@pytest.mark.long
def test_everything_on_four_emulated_devices(tmp_path, capsys):
    out = tmp_path / "mesh.json"
    assert main(["--tiny", "--meshes", "1x1,2x1,2x2", "--out", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    by = {part: [r for r in found if r["bench"] == f"mesh {part}"] for part in bench.PARTS}
    assert [len(by[part]) for part in bench.PARTS] == [3, 3 + 3 + 4, 2, 4, 2 + 3 + 3, 2]
    assert all(r["different"] == r["excused"] for r in by["equality"] if "float32" in r["case"])
    assert all(r["acceptance"].startswith("synthetic") and 1 < r["tokens_per_round"] <= 6 for r in by["scale"])
    assert [r["collectives_us"] > 0 for r in by["scale"]] == [False] * 2 + [True] * 6
    strong = [r["efficiency"]["strong"] for r in by["scale"]]
    assert strong[:2] == [1, 1] and all(0 < x < 1.5 for x in strong if x is not None) and strong[2] is not None
    assert all(max(r["busy_predicted"]) == 1 and r["one_request_us"] > 0 for r in by["pipeline"])
    assert by["pipeline"][0]["busy_alone"] and by["pipeline"][1]["busy_alone"] is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["--parts", "smoke,speed", "--rows", "0", "--tokens", "0", "--statistics", "nowhere", "--variants", "float16"],
            ["--parts has 'speed'; expected some of smoke, equality", "--rows is '0'", "--tokens is 0", "no folder 'nowhere'",
             "--variants has 'float16'"],
        ),
        (["--meshes", "4x4,1x2"], ["there are 8 devices", "mesh 4x4 needs 16 devices"]),
        (["--meshes", "2by2"], ["mesh '2by2'"]),
        (["--layers", "99", "--dtype", "int4", "--acceptance", "2", "--context", "0", "--parts", "scale"],
         ["--layers is 99; expected 5 … 43", "--dtype is 'int4'", "--acceptance is 2.0", "--context is 0"]),
        (["--out", "nowhere/mesh.json", "--meshes", "1x2"], ["there is no folder 'nowhere'"]),
    ],
)  # fmt: skip
def test_bad_options_are_refused_together(options, words, monkeypatch, capsys):
    monkeypatch.setattr(mesh_smoke, "devices", lambda: (8, "cpu"))
    assert main(options) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in words), said


def test_a_single_device_is_refused_and_so_is_one_of_several_processes(monkeypatch, capsys):
    monkeypatch.setattr(mesh_smoke, "devices", lambda: (1, "cpu"))
    assert main([]) == 2
    assert "there is 1 device, and bench mesh wants at least two" in capsys.readouterr().err
    monkeypatch.setenv("DSPARK_COORDINATOR", "127.0.0.1:1")
    assert main([]) == 2 and "it starts others itself (--processes)" in capsys.readouterr().err


def test_a_hang_is_reported_with_its_remedy_and_wrong_values_by_mesh(monkeypatch, capsys):
    script = "print('smoke 1x2 ok 0.5 s\\nsmoke 2x1 3 of 8 values are wrong', flush=True); import time; time.sleep(60)"
    monkeypatch.setattr(mesh_smoke, "command", lambda meshes: [sys.executable, "-c", script])
    found = mesh_smoke.check(["1x2", "2x1", "2x2", "1x4"], 0.5)
    assert found["1x2"] == 0.5 and found["2x1"] == "3 of 8 values are wrong" and found["1x4"] == "not reached"
    assert "hangs: no end after 2 s" in str(found["2x2"]) and "NCCL_NVLS_ENABLE=0" in str(found["2x2"])
    monkeypatch.setattr(mesh_smoke, "command", lambda meshes: [sys.executable, "-c", "raise SystemExit('no GPU')"])
    assert mesh_smoke.check(["1x2"], 9)["1x2"] == "ended with exit code 1: no GPU"
    # Such a mesh is left out of what follows, and the command fails.
    monkeypatch.setattr(mesh_smoke, "devices", lambda: (8, "cpu"))
    assert main(["--parts", "smoke,dispatch", "--meshes", "1x2", "--tiny"]) == 1
    said = capsys.readouterr()
    assert "smoke, mesh 1x2: ended with exit code 1: no GPU" in said.err and "mesh dispatch" not in said.out


def test_the_smoke_finds_values_that_are_mixed_up(monkeypatch):
    real = jax.lax.ppermute
    monkeypatch.setattr(jax.lax, "ppermute", lambda x, axis, perm: real(x, axis, [(b, a) for a, b in perm[:-1]]))
    with pytest.raises(RuntimeError, match="values are wrong"):
        mesh_smoke.smoke(2, 2)


def emulated(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """`jax.lax.ragged_all_to_all`, which XLA's CPU backend does not have, after its documentation."""
    rank = jax.lax.axis_index(axis_name)
    sent, *tables = (jax.lax.all_gather(v, axis_name) for v in (operand, input_offsets, send_sizes, output_offsets))
    at = jnp.arange(len(output))
    for source in range(len(sent)):
        begin, size, to = (table[source, rank] for table in tables)
        here = (at >= to) & (at < to + jnp.minimum(size, recv_sizes[source]))
        output = jnp.where(here[:, None], sent[source][jnp.clip(at - to + begin, 0, len(operand) - 1)], output)
    return output


def test_every_exchange_gives_the_sums_of_one_device(monkeypatch):
    """Rows with padding (id -1), with all experts on one rank, and with several on a rank."""
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", emulated)
    ranks, experts, rows, width = 4, 8, 5, 6
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ranks * rows, width)).astype(np.float32)
    ids = rng.random((ranks * rows, experts)).argsort(axis=1)[:, :3].astype(np.int32)
    ids[3], ids[7], x[7] = (0, 1, 0), -1, np.nan
    weights = rng.random(ids.shape).astype(np.float32)
    scale = rng.normal(size=(experts, width)).astype(np.float32)
    expected = np.zeros_like(x)
    for i, row in enumerate(ids):
        expected[i] = sum((w * scale[e] * x[i] for e, w in zip(row, weights[i], strict=True) if e >= 0), np.zeros(width))

    def local(scale, x, ids, weights):
        own = (ids >= 0) & (ids < len(scale))
        sums = jnp.einsum("nk,nkd->nd", jnp.where(own, weights, 0), scale[jnp.clip(ids, 0, len(scale) - 1)])
        return jnp.where(own.any(axis=1)[:, None], sums * x, 0)

    def call(way, scale, x, ids, weights):
        return way(x, ids, weights, lambda *rows: local(scale, *rows), experts // ranks, EXPERT)

    split = PartitionSpec(EXPERT)
    for name, way in dispatch.EXCHANGES.items():
        run = jax.shard_map(
            lambda *v, way=way: call(way, *v), mesh=make_mesh(1, ranks), in_specs=(split,) * 4, out_specs=split, check_vma=False
        )
        assert scaled_error(jax.jit(run)(scale, x, ids, weights), expected) < 1e-6, name


def test_the_timed_layer_computes_experts():
    """Not zeros: its sums are those of the same weights on one rank."""
    mesh, k = make_mesh(1, 2), TINY.config.num_experts_per_tok
    ids = np.random.default_rng(0).random((4, TINY.config.n_routed_experts)).argsort(axis=1)[:, :k]
    layer = Layer(TINY, mesh)
    out = np.asarray(layer.program("all-gather", 1)(layer.weights, *layer.rows(ids)))
    other = Layer(TINY, make_mesh(1, 1))
    other.weights = {key: jnp.asarray(np.asarray(x)) for key, x in layer.weights.items()}
    alone = np.asarray(other.program("all-gather", 1)(other.weights, *other.rows(ids)))
    assert np.abs(out).max() > 1e-4 and scaled_error(out, alone) < 1e-5


def test_a_mesh_makes_each_part_by_itself_and_replicas_alike():
    mesh = make_mesh(2, 2)
    shapes = {"a": jax.ShapeDtypeStruct((2, 4, 8, 6), jnp.float32), "b": jax.ShapeDtypeStruct((2, 8, 6), jnp.float32)}
    found = random_leaves(shapes, {"a": PartitionSpec("pipe", "expert"), "b": PartitionSpec("pipe")}, mesh, 4)
    assert {key: x.shape for key, x in found.items()} == {key: x.shape for key, x in shapes.items()}
    parts = [np.asarray(s.data).ravel()[:9] for s in found["a"].addressable_shards]
    assert len({p.tobytes() for p in parts}) == 4
    by_rank = {s.index[0].start: [] for s in found["b"].addressable_shards}
    for s in found["b"].addressable_shards:
        by_rank[s.index[0].start].append(np.asarray(s.data).tobytes())
    assert all(len(set(same)) == 1 and len(same) == 2 for same in by_rank.values())
    assert device_name(mesh) == "4 x cpu" and device_name(make_mesh()) == "cpu"


def test_requests_are_the_same_on_every_mesh():
    settings = Settings(("scale",), (MeshConfig(1, 1), MeshConfig(2, 2)), rows=(1, 8, 256))
    assert settings.requests(5, 1) == [1, 4, 44] and settings.requests(5, 4) == [1, 4, 44, 176]


def test_efficiencies_are_against_one_device():
    def one(devices: int, requests: int, us: float, layers: int = 3) -> dict[str, Any]:
        return {"devices": devices, "requests": requests, "time_us": us, "layers": layers}

    found = [one(1, 8, 100.0), one(2, 8, 80.0), one(2, 16, 110.0), one(4, 16, 50.0), one(2, 8, 10.0, layers=9)]
    efficiencies(found)
    assert [tuple(r["efficiency"].values()) for r in found] == [
        (1.0, 1.0), (0.625, None), (None, 0.909), (None, None), (None, None),
    ]  # fmt: skip


def test_only_unexplained_differences_in_float32_fail():
    tie, clear = Margins(1e-7, 1.0, 1.0), Margins(0.3, 0.2, 0.1)
    parted = [Difference(0, 5, tie), Difference(2, 7, clear)]
    found, faults = verdict("float32", "float32", parted, 500)
    assert (found["different"], found["excused"]) == (2, 1)
    assert len(faults) == 1 and "prompt 2 differs from one device from token 8 on, no near-tie" in faults[0]
    assert verdict("bfloat16", "bfloat16", parted, 500)[1] == [] and verdict("float32", "float32", parted[:1], 500)[1] == []
    assert "2 near-ties in 500 tokens" in verdict("float32", "float32", parted[:1] * 2, 500)[1][0]


def test_replicas_differ_by_layer_and_hold_every_expert():
    model: Any = SimpleNamespace(config=CONFIG, draft_config=DRAFT)
    placed = replicas(model, 4)
    assert placed.num_slots == 12 and placed.replica_count.max() == 2
    assert len({row.tobytes() for row in placed.slot_to_expert}) == placed.num_layers


def test_rows_are_drawn_by_the_load_and_replicas_share_them():
    load = np.array([100, 1, 1, 1, 50, 1, 1, 1])
    wide = stretched(load[None], 16)
    assert wide.shape == (1, 16) and wide.max() == 100 and abs(wide.mean() / load.mean() - 1) < 0.2
    ids = drawn(load, 4000, 2)
    assert all(len(set(row)) == 2 for row in ids[:50])
    share = np.bincount(ids.ravel(), minlength=8) / len(ids)
    assert share[0] > 0.95 and 0.75 < share[4] < 1 and share[[1, 2, 3, 5, 6, 7]].max() < 0.1
    placed = Placement(assign(load[None], 10, 2), 8, 2)
    slots = slots_of(ids, placed)
    assert (placed.slot_to_expert[0][slots] == ids).all()
    plain, spread = (np.bincount((x // half).ravel(), minlength=2) for x, half in ((ids, 4), (slots, 5)))
    assert spread.max() / spread.mean() < plain.max() / plain.mean() and spread.max() / spread.mean() < 1.05


def test_the_floor_of_a_round_and_its_collectives():
    """Bytes of the slowest rank for every tick, and exchanges that are really there; nothing is compiled of the model."""
    one, two = (Rounds(TINY, make_mesh(*mesh), (1, 8)) for mesh in ((1, 1), (2, 2)))
    what = Subject("nano", TINY.config, TINY.draft, TINY.dtype, TINY.context, None, 1)
    assert one.floor_us(8, 1e12) == pytest.approx(floor_us(what, 8, True, 1e12))  # as `bench round` has it
    sizes: dict[str, Any] = {"rows": 24, "context": 16, "expert": 2, "chunk": 1, "dtype": "float32", "costs": reading(1e12)}
    ticks = given_stages(TINY.config, TINY.draft, two.plan.ranges, 2, **sizes)
    assert two.floor_us(8, 1e12) == pytest.approx(2e6 * max(cost.total for cost in ticks.costs))
    assert one.fits() == ""
    assert (two.slots(1), two.slots(8), two.rows(8)) == (2, 4, 24)
    assert collectives_us(one.timers[1].ring) == 0 < collectives_us(two.timers[1].ring)
    two.mesh = SimpleNamespace(devices=np.array([SimpleNamespace(memory_stats=lambda: {"bytes_limit": 1000})]))  # type: ignore[assignment]
    assert "GB a device, and JAX has 0.0 GB of it" in two.fits()


def test_each_device_has_its_own_profile_and_waiting_is_no_work():
    def plane(number: int, *events: tuple[str, float, float]) -> SimpleNamespace:
        found = [SimpleNamespace(name=name, start_ns=start, duration_ns=duration) for name, start, duration in events]
        return SimpleNamespace(name=f"/device:GPU:{number}", lines=[SimpleNamespace(name="Stream #1", events=found)])

    second = plane(10, ("gemm", 0, 2000), ("ncclDevKernel_AllGather", 2000, 6000))
    found = each([second, plane(2, ("gemm", 0, 4000)), SimpleNamespace(name="/host:CPU", lines=[])], 2)
    assert found is not None
    assert [(p.busy_us, p.working_us, p.collectives_us, p.launches) for p in found] == [(2, 2, 0, 0.5), (4, 1, 3, 1)]
    assert each([SimpleNamespace(name="/host:CPU", lines=[])], 2) is None
