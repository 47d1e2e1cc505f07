"""Device time of a schedule by itself: what it adds to a round, without the round.

    python -m dspark_jax.bench.schedule_step --requests 16,64,256 --gamma 5

runs every scheduler's step, with the choice of the bucket, many times in one loop on the device, in turns with the same loop
without a schedule, and prints the medians' difference as one JSON object: microseconds a round by scheduler and number of
requests. Compare them with the seconds of a round (`dspark-jax profile`, `dspark-jax bench load`).
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from dspark_jax.decode.round import init_requests
from dspark_jax.decode.schedule import (
    EarlyStop,
    FixedLength,
    Schedule,
    StaleRate,
    StaleSize,
    StepCost,
    Threshold,
    bucket_index,
    bucket_sizes,
    packed_rows,
)
from dspark_jax.decode.state import Requests
from dspark_jax.errors import ConfigError, raise_all


def schedules(requests: int, gamma: int) -> dict[str, Schedule]:
    """One of each kind, over stairs of step times with a slope, as a device has them."""
    rows = requests * (gamma + 1)
    sizes = bucket_sizes(requests, gamma)
    cost = StepCost(tuple(1 + next(i for i, size in enumerate(sizes) if n <= size) / 4 + n / rows for n in range(rows + 1)))
    kinds = {"fixed": FixedLength(2), "threshold": Threshold(0.5), "early-stop": EarlyStop(cost), "stale-size": StaleSize(cost)}
    kinds |= {"stale-rate": StaleRate(cost)}
    return {name: Schedule(kind, (1.1,) * gamma) for name, kind in kinds.items()}


def loop(schedule: Schedule | None, requests: int, gamma: int, steps: int) -> Callable[[], Any]:
    """A compiled loop of `steps` rounds' decisions over requests that all draft; call it to run it once."""
    buckets = bucket_sizes(requests, gamma)
    begin = init_requests(requests, gamma, 1, 1)
    begin = replace(begin, active=jnp.ones_like(begin.active), emitted=begin.emitted + 10)
    committed = jnp.ones_like(begin.length)
    noise = jax.random.normal(jax.random.key(0), (steps, requests, gamma))

    @jax.jit
    def run(first: Requests, noise: jax.Array):
        def step(carry: tuple[Requests, Any, jax.Array], logits: jax.Array):
            now, stale, total = carry
            now = replace(now, confidence=logits, num_drafts=jnp.full_like(now.num_drafts, gamma))
            if schedule is None:
                return (now, stale, total + now.num_drafts.sum()), None
            now, stale = schedule.step(now, committed, stale)
            return (now, stale, total + bucket_index(packed_rows(now.active, now.num_drafts), buckets)), None

        stale = None if schedule is None else schedule.init(requests, gamma)
        return jax.lax.scan(step, (first, stale, jnp.zeros((), jnp.int32)), noise)[0][2]

    jax.block_until_ready(run(begin, noise))
    return lambda: jax.block_until_ready(run(begin, noise))


def measure(requests: int, gamma: int, steps: int, repeats: int) -> dict[str, float]:
    """Microseconds that a schedule adds to a round, by its name; medians of interleaved runs."""
    loops = {"none": loop(None, requests, gamma, steps)}
    loops |= {name: loop(one, requests, gamma, steps) for name, one in schedules(requests, gamma).items()}
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(repeats):
        for name, run in loops.items():
            begin = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - begin)
    each = {name: statistics.median(values) / steps * 1e6 for name, values in seconds.items()}
    return {name: each[name] - each["none"] for name in loops if name != "none"}


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; see the module's text. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m dspark_jax.bench.schedule_step", description=__doc__)
    parser.add_argument("--requests", default="16,64,256", help="requests of an expert rank, separated by commas")
    parser.add_argument("--gamma", type=int, default=5, help="drafts of a block")
    parser.add_argument("--steps", type=int, default=512, help="rounds of a run")
    parser.add_argument("--repeats", type=int, default=7, help="runs of each")
    args = parser.parse_args(argv)
    try:
        sizes = [int(n) for n in args.requests.split(",")]
    except ValueError:
        sizes = [0]
    least = {"requests": min(sizes), "gamma": args.gamma, "steps": args.steps, "repeats": args.repeats}
    faults = [f"--{name} is {vars(args)[name]}; expected at least 1" for name, value in least.items() if value < 1]
    try:
        raise_all(ConfigError, "arguments", faults)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    found = {str(n): measure(n, args.gamma, args.steps, args.repeats) for n in sizes}
    facts = {"device": jax.devices()[0].device_kind, "gamma": args.gamma, "steps": args.steps, "repeats": args.repeats}
    print(json.dumps(facts | {"microseconds": found}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
