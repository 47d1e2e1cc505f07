"""Records what the drafter believed and what became of it, round by round, and calibrates on that."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from dspark_jax.api import LM, Prompt
from dspark_jax.cli_engine import Generator
from dspark_jax.decode.batch import BatchDecoder, Request, prefill_items
from dspark_jax.decode.calibrate import Quality, Rounds, ece_floor, fit, quality
from dspark_jax.decode.calibration_file import Calibration, head_digest
from dspark_jax.decode.sampling import SamplingParams
from dspark_jax.decode.state import RUNNING, decode_item
from dspark_jax.errors import RequestError, raise_all
from dspark_jax.parallel.mesh import EXPERT
from dspark_jax.serve.engine import Engine
from dspark_jax.serve.ticks import read_output

LEAST_ROUNDS = 200  # for each half; ten bins of twenty


@dataclass(frozen=True)
class Recording:
    """Rounds of several prompts whose whole blocks were verified; the few cut short by a full context are left out.

    Attributes:
      rounds: confidence logits and accepted drafts.
      prompt: for each round the index of its prompt.
    """

    rounds: Rounds
    prompt: Int[np.ndarray, "N"]


def record(
    lm: Generator,
    prompts: Sequence[Prompt],
    params: SamplingParams | None = None,
    *,
    samples: int = 1,
    batch: int = 16,
    ignore_eos: bool = False,
) -> Recording:
    """Decodes every prompt `samples` times as `generate` does, `batch` requests side by side.

    The seed rises by 1 from request to request: all prompts with the first sample, then all with the next. On several
    pipeline ranks `lm` is a `cli_engine.EngineRunner`, whose slots decide how many run side by side.

    Raises RequestError as `generate` does, for a model without a drafter, and where no round was recorded; ConfigError for a
    drafter without confidences.
    """
    if lm.draft_config is None:
        raise RequestError("the model has no drafter, so there is no confidence to record; choose one with mtp.* stages")
    bad = [f"{name} is {n}; expected at least 1" for name, n in (("samples", samples), ("batch", batch)) if n < 1]
    raise_all(RequestError, "recording", bad)
    _digest(lm)  # a drafter without confidences is found out before the decoding
    params = params or SamplingParams(temperature=1.0)
    each = [replace(params, seed=(params.seed + i) % 2**32) for i in range(len(prompts) * samples)]
    reader = lm._reader if isinstance(lm, LM) else lm.engine(True)._reader
    requests = reader.read([*prompts] * samples, each, ignore_eos)
    rows = _decoded(lm, requests, batch) if isinstance(lm, LM) else _served(lm.engine(True), requests, ignore_eos)
    found = list(rows)
    if not found:
        raise RequestError("no round was recorded: every request ended in its prompt's tick; raise max_tokens")
    logits, accepted, prompt = (np.concatenate(x) for x in zip(*found, strict=True))
    return Recording(Rounds(logits.astype(np.float64), accepted), prompt % len(prompts))


def _decoded(lm: LM, requests: Sequence[Request], batch: int) -> Iterator[tuple[np.ndarray, ...]]:
    """(logits, accepted, request) of every round of the batch interface."""
    # One decoder for all parts. Its prompt chunks are as wide as a block, so that one program does both: a second one would
    # take longer to compile than a small sample to decode.
    expert = lm.mesh.shape[EXPERT]
    slots = -(-min(batch, len(requests)) // expert) * expert
    need = min(max(len(r.prompt) + r.params.max_tokens for r in requests) + lm.gamma + 1, lm.max_len)
    decoder = BatchDecoder(
        lm._graph, lm._params, lm.mesh, slots, need, chunk=lm.gamma + 1, rounds_per_call=1, verify=lm.verify
    )
    decoder.compile(lm._params, [])
    # The state is donated to the tick, so its confidences are copied out beside the next item.
    look = jax.jit(lambda r: (decode_item(r, lm.gamma), jnp.copy(r.confidence)), out_shardings=decoder._rows)
    for i in range(0, len(requests), batch):
        yield from _run(lm, decoder, look, requests[i : i + batch], i)


def _run(
    lm: LM, decoder: BatchDecoder, look: Any, requests: Sequence[Request], first: int
) -> Iterator[tuple[np.ndarray, ...]]:
    """(logits, accepted, request) of one round after the other."""
    tick = decoder._compiled["prefill"]
    state: Any = decoder._start(lm._params, requests)
    emission: Any = None
    for item in prefill_items([r.prompt for r in requests], decoder.slots, decoder.chunk):
        state, emission = tick(lm._params, state, decoder._place(item))
    running = (np.asarray(emission.count) > 0) & (np.asarray(emission.reason) == RUNNING)
    while running.any():
        item, said = look(state.requests)
        state, emission = tick(lm._params, state, item)
        said, out = jax.device_get((said, emission))
        whole = running & (out.verified == lm.gamma)
        yield said[whole], out.accepted[whole], first + np.flatnonzero(whole)
        running &= out.reason == RUNNING


def _served(engine: Engine, requests: Sequence[Request], ignore_eos: bool) -> Iterator[tuple[np.ndarray, ...]]:
    """(logits, accepted, request) of every call of an engine of one round a call."""
    engine.warmup()
    pipe, expert, copied = engine.ring.pipe, engine.ring.spec.expert, jax.jit(jnp.copy)
    index = {engine.submit(r.prompt, r.params, ignore_eos=ignore_eos): i for i, r in enumerate(requests)}
    said: Any = None
    while engine.busy:
        # The step dispatches a call, to which the state is donated, and absorbs the one before it, which verified the
        # drafts whose confidences were copied then.
        unread, before, said = list(engine._pending), said, copied(engine._state.requests.confidence)
        owner = {generation: index[run.key] for generation, run in engine._scheduler._by_generation.items()}
        engine.step()
        for output in unread:
            out, generation, _ = read_output(output)
            lanes = np.asarray(before)[-1].reshape(expert, pipe, engine.ring.local_slots, engine.gamma)
            for t in range(pipe):
                # In its tick t the last rank has microbatch t - (pipe - 1); slots are split over the expert ranks.
                logits = lanes[:, (t + 1) % pipe].reshape(-1, engine.gamma)
                whole = (out.count[t] > 0) & (out.verified[t] == engine.gamma)
                if whole.any():
                    request = np.array([owner[n] for n in generation[t][whole].tolist()])
                    yield logits[whole], out.accepted[t][whole], request
    for key in index:
        engine.result(key)  # the engine forgets it


@dataclass(frozen=True)
class Calibrated:
    """Temperatures fitted on the prompts of even index, judged on the others."""

    calibration: Calibration
    before: Quality
    after: Quality
    rounds: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the file's keys, the rounds that judged, and the reliability diagrams."""
        diagrams = {"before": self.before.diagrams, "after": self.after.diagrams}
        found = {name: value for name, value in vars(self.calibration).items() if name != "model"}
        found |= {"rounds": self.rounds, "reliability": {k: [vars(d) for d in v] for k, v in diagrams.items()}}
        return found


def calibrate(lm: Generator, recording: Recording, dataset: str) -> Calibrated:
    """Fits temperatures on half of the prompts and measures both halves' worth on the other.

    Raises RequestError where a half has too few rounds to say anything.
    """
    held = recording.prompt % 2 == 1
    sizes = int((~held).sum()), int(held.sum())
    if min(sizes) < LEAST_ROUNDS:
        raise RequestError(
            f"calibration: {sizes[0]} rounds to fit on (prompts 0, 2, …) and {sizes[1]} to judge by (prompts 1, 3, …);"
            f" expected at least {LEAST_ROUNDS} each: give more prompts, or more tokens a prompt"
        )
    fitted, judged = recording.rounds.part(~held), recording.rounds.part(held)
    temperatures = fit(fitted)
    before, after = quality(judged), quality(judged, temperatures)
    calibration = Calibration(
        temperatures=temperatures,
        dataset=dataset,
        num_samples=len(fitted),
        ece_before=before.ece,
        ece_after=after.ece,
        auc_before=before.auc,
        auc=after.auc,
        ece_floor=ece_floor(judged, temperatures),
        model=_digest(lm),
    )
    return Calibrated(calibration, before, after, len(judged))


def _digest(lm: Generator) -> str:
    return head_digest(lm._params if isinstance(lm, LM) else _last_rank(lm.engine(True)))


def _last_rank(engine: Engine) -> dict[str, jax.Array]:
    """Parameters of the confidence head, whose rank is the last."""
    return {key: leaf[-1] for key, leaf in engine._params.items() if "confidence" in key}
