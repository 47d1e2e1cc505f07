"""What a target is worth: bits per byte of held-out text, and how much its greedy texts repeat themselves."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dspark_jax.models.attention import Select
from dspark_jax.models.deepseek_v4 import DeepseekV4
from dspark_jax.train.background import Background
from dspark_jax.train.rollout import PromptSource, Rollout, distinct_ngrams
from dspark_jax.train.target import evaluate_target, trainable

KINDS = ("code", "prose")
SELECTS: tuple[Select, ...] = ("indexer", "random", "all")


def bits_per_byte(run, states, tokens: np.ndarray, num_bytes: int, bos: int, length: int, batch: int = 16) -> float:
    """Held-out bits per byte of a whole stream, cut into sequences of `length` that each begin with no context.

    `run` is from `evaluate_target`, `states` its (params, fixed). Every token is scored but the first of the stream and
    the separators `bos`, which stand for no bytes.
    """
    span = length * batch
    tokens = tokens.astype(np.int32)
    padded = np.zeros(-(-(len(tokens) - 1) // span) * span, np.int32)
    labels = np.full_like(padded, -1)
    padded[: len(tokens) - 1] = tokens[:-1]
    labels[: len(tokens) - 1] = np.where(tokens[1:] == bos, -1, tokens[1:])
    cuts = [(padded[i : i + span], labels[i : i + span]) for i in range(0, len(padded), span)]
    # Dispatch everything first: reading each sum at once would leave the device waiting.
    sums = [run(*states, *(part.reshape(batch, length) for part in cut)) for cut in cuts]
    return float(np.sum(jax.device_get(sums), dtype=np.float64)) / np.log(2) / num_bytes


class Judge:
    """Measures a target on the corpus's held-out text; one set of programs serves all versions of the target."""

    def __init__(self, target: DeepseekV4, corpus: Path, rollout: Rollout, length: int, shortest: int, batch: int = 16):
        self.rollout, self.length, self.batch = rollout, length, batch
        self.bos = target.config.bos_token_id
        self.valid = {kind: np.load(corpus / f"valid_{kind}.npy") for kind in KINDS}
        self.bytes = {kind: (corpus / f"valid_{kind}.txt").stat().st_size for kind in KINDS}
        self.prompts = {
            kind: PromptSource(valid, shortest, rollout.prompt, self.bos, 0).draw(rollout.slots, 0)
            for kind, valid in self.valid.items()
        }
        graph, *states = nnx.split(target, trainable, ...)
        shape = jax.ShapeDtypeStruct((batch, length), jnp.int32)
        self.programs = {s: Background(evaluate_target(graph, s), *states, shape, shape) for s in SELECTS}

    def __call__(self, target: DeepseekV4) -> dict[str, Any]:
        """`bits_per_byte` by kind and choice of entries; `distinct_4` by kind, of 50 greedy texts of 128 tokens."""
        _, *states = nnx.split(target, trainable, ...)
        zeros = np.zeros(self.rollout.slots)
        result: dict[str, Any] = {"bits_per_byte": {}, "distinct_4": {}}
        for kind in KINDS:
            result["distinct_4"][kind] = round(
                distinct_ngrams(self.rollout(tuple(states), self.prompts[kind], zeros, zeros)), 4
            )
            sizes = (self.valid[kind], self.bytes[kind], self.bos, self.length, self.batch)
            result["bits_per_byte"][kind] = {
                select: round(bits_per_byte(program, states, *sizes), 4) for select, program in self.programs.items()
            }
        print(json.dumps(result), flush=True)
        return result
