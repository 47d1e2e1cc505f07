"""Scale and pipeline of `bench.mesh`: records of rounds (`mesh_rounds`) on one mesh.

A round is one of every microbatch, P ticks on P pipe ranks. Busy shares: the part of a tick in which a rank's own work runs.
They are predicted by the planner's costs, read from a profile where GPUs have one (NCCL's kernels left out, because they wait),
and, with one expert rank, set against each rank's stage timed alone on one device.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from dspark_jax.bench.mesh_common import Shape, case, rounded
from dspark_jax.bench.mesh_rounds import Rounds, Timed
from dspark_jax.bench.stage_programs import Setting, Stage, measure

Say = Callable[[str], None]


def rounds(
    shape: Shape, mesh: Mesh, requests: Sequence[int], parts: Sequence[str], rate: float | None, say: Say
) -> Iterator[dict[str, Any]]:
    """Records of "scale" and "pipeline", where `parts` names them; the pipeline's of meshes of several pipe ranks.

    Args:
      rate: bytes/s that a device reads; None knows no floor.
    """
    here = Rounds(shape, mesh, requests)
    if why := here.fits():
        say(f"not measured: {why}; quantised weights (--weights), fewer --layers or more devices take less")
        return
    found: dict[int, Timed] = {}
    for n in here.compile(say):
        if (one := here.time(n, say)) is None:
            continue
        found[n] = one
        if "scale" in parts:
            yield scale_record(here, one, rate)
    here.free()
    if "pipeline" in parts and here.pipe > 1 and found:
        most = found[max(found)]
        alone = stages_alone(here, most.requests, say) if here.expert == 1 else None
        yield pipeline_record(here, most, found.get(1), alone)


def scale_record(here: Rounds, one: Timed, rate: float | None) -> dict[str, Any]:
    """Latency and rate of a round, with its split into bytes, launches and collectives."""
    shape, gamma = here.shape, here.shape.draft.block_size
    reading = None if rate is None else here.floor_us(one.requests, rate)
    floor = None if reading is None else reading + one.collectives_us
    ceiling = None if rate is None else f"{rate / 1e12:.2f} TB/s, and the collectives"
    profile = one.profile
    return case(
        "scale",
        f"{shape.title}, {one.requests} requests, round",
        here.mesh,
        one.round_us,
        floor,
        ceiling,
        requests=one.requests,
        rows=one.requests * (gamma + 1),
        devices=here.mesh.size,
        layers=shape.config.num_hidden_layers,
        ranges=[list(r) for r in here.plan.ranges],
        tokens_per_second=round(1e6 * one.tokens / one.round_us, 2),
        tokens_per_round=round(one.tokens / one.requests, 3),
        acceptance=shape.acceptance,
        reading_us=reading and round(reading, 2),
        collectives_us=round(one.collectives_us, 2),
        launches=profile and rounded([p.launches * here.pipe for p in profile], 1),
        working_us=profile and rounded([p.working_us * here.pipe for p in profile], 1),
        nccl_us=profile and rounded([p.collectives_us * here.pipe for p in profile], 1),
        bytes=one.bytes,
        efficiency=None,
    )


def pipeline_record(here: Rounds, full: Timed, single: Timed | None, alone: list[float] | None) -> dict[str, Any]:
    """Busy shares with every microbatch at work, and the round of one request alone."""
    tick = full.round_us / here.pipe
    plan = here.predicted(full.requests)
    return case(
        "pipeline",
        f"{here.shape.title}, {full.requests} requests, round",
        here.mesh,
        full.round_us,
        requests=full.requests,
        tick_us=round(tick, 2),
        ranges=[list(r) for r in here.plan.ranges],
        busy_predicted=rounded([cost.total / plan.tick_seconds for cost in plan.costs]),
        predicted_tick_us=round(1e6 * plan.tick_seconds, 2),
        busy_profiled=full.profile and busy(full, here.pipe),
        busy_alone=alone and rounded([us / tick for us in alone]),
        alone_us=alone and rounded(alone, 2),
        one_request_us=single and round(single.round_us, 2),
        acceptance=here.shape.acceptance,
    )


def busy(full: Timed, pipe: int) -> list[float]:
    """Share of every pipe rank, the mean of its devices."""
    assert full.profile is not None
    working = np.array([p.working_us for p in full.profile]).reshape(pipe, -1).mean(axis=1)
    return rounded((working / (full.round_us / pipe)).tolist())


def stages_alone(here: Rounds, requests: int, say: Say) -> list[float] | None:
    """Microseconds of every rank's tick by itself on the first device; None if one cannot be run."""
    shape = here.shape
    context = max(shape.context, 2 * (shape.draft.block_size + 1))
    setting = Setting(shape.config, shape.draft, here.slots(requests), context, shape.dtype)
    found = []
    for rank in range(here.pipe):
        program = Stage(setting, here.plan.ranges, rank)
        try:
            say(f"rank {rank} alone: compiled in {program.compile():.1f} s")
            found.append(1e6 * float(np.median(measure(program)[0])))
        except RuntimeError as error:  # JAX's are
            say(f"rank {rank} alone: cannot be run: {str(error).partition(chr(10))[0][:300]}")
            return None
    return found


def efficiencies(records: Sequence[dict[str, Any]]) -> None:
    """Writes into every scale record its requests' rounds a second over those of one device: with as many requests in all
    (`strong`) and as many a device (`weak`), each over the number of devices; null where one device was not measured.
    """
    one = {(r["layers"], r["requests"]): r["requests"] / r["time_us"] for r in records if r["devices"] == 1}
    for r in records:
        found = {}
        for name, requests in (("strong", r["requests"]), ("weak", r["requests"] / r["devices"])):
            base = one.get((r["layers"], requests))
            found[name] = None if base is None else round(r["requests"] / r["time_us"] / base / r["devices"], 3)
        r["efficiency"] = found
