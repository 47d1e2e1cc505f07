"""How far a model with other weights, such as a quantised one, chooses the tokens that a reference chooses."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int

from dspark_jax.api import LM
from dspark_jax.decode.sampling import SamplingParams
from dspark_jax.evaluate import Acceptance
from dspark_jax.models.numerics import compiler_options
from dspark_jax.parallel.mesh import param_specs


@dataclass(frozen=True)
class Agreement:
    """Greedy decoding of the same prompts by both models.

    Attributes:
      prompts: how many.
      tokens: of the reference's texts.
      same: of these tokens, those that the other model chooses behind the same text (top-1 agreement is same / tokens).
      same_texts: prompts whose whole text is the same, each model going on from its own tokens.
      tau, other_tau: tokens a round with the models' own drafters; None without one.
    """

    prompts: int
    tokens: int
    same: int
    same_texts: int
    tau: float | None
    other_tau: float | None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**vars(self), "top1": self.same / self.tokens}


def agreement(
    reference: LM, other: LM, prompts: Sequence[str], *, max_tokens: int = 64, batch: int = 8
) -> Agreement:
    """Decodes every prompt with both, and asks `other` for its choice behind each of the reference's tokens.

    Raises RequestError for prompts that are empty or too long.
    """
    params = SamplingParams(max_tokens=max_tokens)
    runs = [
        [out for i in range(0, len(prompts), batch) for out in lm.generate(prompts[i : i + batch], params)]
        for lm in (reference, other)
    ]
    texts = [(list(out.prompt_tokens), list(out.tokens)) for out in runs[0]]
    size = max(len(prompt) + len(tokens) for prompt, tokens in texts)
    choose = chooser(other)
    same = 0
    for i in range(0, len(texts), batch):
        part = texts[i : i + batch]
        ids = np.zeros((batch, size), np.int32)
        for row, (prompt, tokens) in enumerate(part):
            ids[row, : len(prompt) + len(tokens)] = prompt + tokens
        chosen = np.asarray(choose(ids))
        for row, (prompt, tokens) in enumerate(part):
            same += int((chosen[row, len(prompt) - 1 :][: len(tokens)] == np.array(tokens)).sum())
    drafts = reference.gamma > 0, other.gamma > 0
    taus = [Acceptance.of(run).tau if has else None for run, has in zip(runs, drafts, strict=True)]
    return Agreement(
        prompts=len(prompts),
        tokens=sum(len(tokens) for _, tokens in texts),
        same=same,
        same_texts=sum(a.tokens == b.tokens for a, b in zip(*runs, strict=True)),
        tau=taus[0],
        other_tau=taus[1],
    )


def chooser(lm: LM) -> Any:
    """ids [R, T] -> the likeliest token behind every position [R, T]; a row's padding does not influence what is before it."""
    graph, params = lm._graph, lm._params  # this module is a part of the same package

    def run(params: nnx.State, ids: Int[Array, "R T"]) -> Int[Array, "R T"]:
        target = nnx.merge(graph, params).target
        hidden = target.sequence(ids).hidden
        # Row by row: the logits of all are large.
        return jax.lax.map(lambda row: jnp.argmax(target.logits(row), axis=-1), hidden)

    none = PartitionSpec()
    mapped = jax.shard_map(run, mesh=lm.mesh, in_specs=(param_specs(params), none), out_specs=none, check_vma=False)
    compiled = jax.jit(mapped, compiler_options=compiler_options(lm.config))
    return lambda ids: compiled(params, ids)
