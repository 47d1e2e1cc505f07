"""Speed of whole answers, speculative and plain decoding side by side (`dspark-jax bench decode`).

What a user of `LM.generate` waits for: prefill, rounds and the host's work between them. Compilation is not in the times.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from dspark_jax.api import LM
from dspark_jax.bench.records import record
from dspark_jax.decode.sampling import SamplingParams
from dspark_jax.errors import RequestError
from dspark_jax.requests import Prompt
from dspark_jax.results import Completion


def decode_speed(
    lm: LM,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    batch: int,
    *,
    name: str,
    repeats: int = 5,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """One record of `bench.records` for `prompts` in groups of `batch` (what fills no group is left out): `time_us` a token
    with the drafter, the peer "plain" without it. `name` is of the pair of models, and begins the case.

    The two take turns, and the medians over `repeats` are kept. `speedup` is the median of the ratios within a turn, `tau`
    tokens a round. Answers end where they end, so the two do the same work at temperature 0 only.

    Raises RequestError for a model without a drafter, or for fewer than `batch` prompts.
    """
    if lm.draft_config is None:
        raise RequestError("bench decode needs a model with a drafter; give --drafter")
    if len(prompts) < batch:
        raise RequestError(f"batch is {batch}, and there are {len(prompts)} prompts; give as many, or a smaller batch")
    each_own = [replace(params, seed=(params.seed + i) % 2**32) for i in range(batch)]
    groups = [prompts[i : i + batch] for i in range(0, len(prompts) - batch + 1, batch)]
    for group in groups:  # groups of other lengths may need other programs
        lm.compile(group, each_own, speculate=[True, False])

    def run(speculate: bool) -> tuple[float, list[Completion]]:
        parts = [lm.generate(group, each_own, speculate=speculate) for group in groups]
        return sum(max(r.seconds for r in part) for part in parts), [r for part in parts for r in part]

    times: dict[bool, list[float]] = {True: [], False: []}
    ratios, rounds, committed = [], 0, 0
    for turn in range(repeats):
        each = {}
        for speculate in (True, False) if turn % 2 == 0 else (False, True):
            seconds, results = run(speculate)
            each[speculate] = 1e6 * seconds / sum(len(r.tokens) for r in results)
            times[speculate].append(each[speculate])
            if speculate:
                rounds, committed = sum(r.rounds for r in results), sum(len(r.tokens) - 1 for r in results)
        ratios.append(each[False] / each[True])
        report(f"batch {batch}, turn {turn + 1}: {1e6 / each[True]:.0f} tokens/s, plain {1e6 / each[False]:.0f}")
    device = lm.mesh.devices.flat[0].device_kind
    count, limit = len(groups) * batch, params.max_tokens
    case = f"{name} batch={batch} temperature={params.temperature:g} prompts={count} max_tokens={limit}"
    found = record("decode", case, device, median(times[True]), None, None)
    found["peers"] = {"plain": round(median(times[False]), 2)}
    return found | {"speedup": round(median(ratios), 3), "tau": round(committed / rounds, 3) if rounds else None}
