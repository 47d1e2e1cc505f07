"""Run by `dspark-jax launch`, in every process: serves the tiny model, and writes as JSON what the process saw.

    two_processes.py FOLDER PIPE EXPERT

FOLDER holds the model's leaves in weights.npz and takes the JSON files.
"""

import json
import sys
import time
from pathlib import Path

import jax
import jax.monitoring
import numpy as np

from dspark_jax.api import LM
from dspark_jax.checkpoint.layout import skeleton
from dspark_jax.decode.sampling import SamplingParams
from dspark_jax.errors import RequestError
from dspark_jax.parallel.distributed import initialize
from dspark_jax.parallel.mesh import make_mesh
from dspark_jax.serve.engine import Engine
from helpers.mesh_model import CONFIG, DRAFT, GAMMA, MAX_LEN, Letters
from helpers.mesh_requests import requests

TOP = 4  # alternatives


def serve(engine: Engine, found: dict) -> None:
    prompts, params = zip(*requests(), strict=True)
    found["answers"] = [[list(c.tokens), c.finish_reason] for c in engine.generate(prompts, params)]
    (said,) = engine.generate([requests()[3][0]], SamplingParams(max_tokens=8, logprobs=TOP))
    found["logprobs"] = [said.prompt_tokens, said.tokens, [one.top for one in said.logprobs or ()]]
    found["busy"] = engine.busy
    aborted = engine.submit([1, 2, 3], SamplingParams(max_tokens=40))
    stream = engine.stream(engine.submit(*requests()[1]))
    streamed = list(next(stream).tokens)
    try:
        engine.submit([])
    except RequestError as error:
        found["refused"] = str(error)
    engine.abort(aborted)
    found["aborted"] = engine.result(aborted).finish_reason
    time.sleep(1)  # the other process waits
    found["streamed"] = streamed + [t for output in stream for t in output.tokens]
    found["again"] = list(engine.result(engine.submit(*requests()[3])).tokens)


def model(folder: Path) -> LM:
    graph, shapes = skeleton(CONFIG, DRAFT, dtype="float32", axis="expert")
    with np.load(folder / "weights.npz") as weights:
        params = jax.tree.unflatten(jax.tree.structure(shapes), [weights[name] for name in weights.files])
    return LM(CONFIG, DRAFT, graph, params, Letters(), max_len=MAX_LEN)


def main(folder: Path, pipe: int, expert: int) -> None:
    initialize()
    index, compiled = jax.process_index(), []
    found: dict = {"processes": jax.process_count(), "local": jax.local_device_count()}
    sizes = {"slots": 4, "chunk": GAMMA + 1, "max_len": MAX_LEN, "max_logprobs": TOP}
    with Engine(model(folder), mesh=make_mesh(pipe, expert), **sizes) as engine:
        engine.warmup()
        jax.monitoring.register_event_duration_secs_listener(
            lambda event, duration_secs, **_: compiled.append(event) if "backend_compile" in event else None
        )
        if index == 0:
            serve(engine, found)
        else:
            for call in (engine.submit, engine.stream, engine.abort, engine.result):
                try:
                    call([1])  # type: ignore[operator]
                except RequestError as error:
                    found.setdefault("here", []).append(str(error))
            engine.follow()
    if index == 0:
        # The engine serves on if the others follow again, and an end without `close` stops them too.
        prompt, params = requests()[5]
        found["later"] = list(engine.generate([prompt], params)[0].tokens)
    else:
        engine.follow()
    found["compiled"] = compiled
    (folder / f"process{index}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:4]))
