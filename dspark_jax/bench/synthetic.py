"""Acceptance out of a recording, in a program that does all of its work: for models whose weights are random.

Target, drafter, output head, verification and sampling run as they are. Behind the drafter, a round's confidences are those
of a recorded round, drawn at random by the request's seed and the anchor's position, and the stored law of every draft is
changed at the drafted token: to probability 0 where the recorded draft survived, so that verification must accept it,
and to 1 where it did not, so that it is accepted with the target's probability of that token, about 1 in the vocabulary.
Rounds are drawn independently of each other: what a text keeps for several rounds, its difficulty, is lost.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from dspark_jax.bench.stage_programs import make_weights, stored
from dspark_jax.checkpoint.layout import skeleton
from dspark_jax.config import DraftConfig, TargetConfig
from dspark_jax.decode import noise
from dspark_jax.decode.calibrate import Rounds
from dspark_jax.decode.noise import DraftNoise, draft_gumbel
from dspark_jax.decode.protocols import Proposal
from dspark_jax.errors import ConfigError
from dspark_jax.parallel.mesh import EXPERT
from dspark_jax.parallel.ring import Ring, RingConfig
from dspark_jax.parallel.stage import PipelineSpec, PipeStage

_ROUND = 101  # purpose of the random numbers that choose a recorded round
_SURE = 1e6  # above every logit


class SyntheticDrafter:
    """A drafter whose confidences and acceptance are recorded ones. Only for temperatures above 0, without top-k and top-p."""

    def __init__(self, inner: Any, rounds: Rounds):
        self.inner, self.rounds = inner, rounds
        self.block_size, self.init_cache, self.write_context = inner.block_size, inner.init_cache, inner.write_context

    @property
    def choices(self) -> Any:
        return self.inner.choices

    def propose(self, anchor, position, active, sampling, cache, draft_noise: DraftNoise = draft_gumbel) -> Proposal:
        drawn = self.inner.propose(anchor, position, active, sampling, cache, draft_noise)
        number = noise.uniform(sampling.seed, position, _ROUND) * len(self.rounds)
        number = jnp.minimum(number.astype(jnp.int32), len(self.rounds) - 1)
        survives = jnp.arange(self.block_size) < jnp.asarray(self.rounds.accepted, jnp.int32)[number, None]
        said = jnp.where(survives, -jnp.inf, _SURE).astype(drawn.logits.dtype)
        drafted = jnp.arange(drawn.logits.shape[-1]) == drawn.tokens[..., None]
        logits = jnp.where(drafted, said[..., None], drawn.logits)
        return Proposal(drawn.tokens, logits, jnp.asarray(self.rounds.logits, jnp.float32)[number])


class SyntheticRing(Ring):
    """A ring with acceptance out of a recording.

    Raises ConfigError as `Ring` does, and for rounds of another block size.
    """

    def __init__(self, spec: PipelineSpec, params: Any, mesh: Mesh, sizes: RingConfig, rounds: Rounds):
        if rounds.gamma != spec.gamma:
            raise ConfigError(
                f"the recorded rounds have {rounds.gamma} drafts, and the model drafts {spec.gamma}: record with a drafter of"
                " its block size"
            )
        self.rounds = rounds
        super().__init__(spec, params, mesh, sizes)

    def _drafter(self, stage: PipeStage) -> Any:
        drafter = stage.drafter
        return drafter and SyntheticDrafter(drafter, self.rounds)


def shapes_of(config: TargetConfig, draft: DraftConfig | None, dtype: str) -> Any:
    """Shapes of a whole model's parameters, with the types of a loaded checkpoint."""
    return stored(skeleton(config, draft, dtype=jnp.dtype(dtype), axis=EXPERT)[1], dtype)


def random_params(ring: Ring) -> dict[str, jax.Array]:
    """A ring's parameters with random weights, made on the device (one device)."""
    shapes, found = ring.pipeline.params.shapes, {}
    weights = make_weights(shapes, ring.spec.config.n_routed_experts)
    for key in shapes:  # one by one: the leading axis of the ranks is a copy
        weight = weights.pop(key)
        found[key] = jax.device_put(weight[None], NamedSharding(ring.mesh, ring.pipeline.specs[key]))
        jax.block_until_ready(found[key])
        weight.delete()
    return found


def expected_tokens(rounds: Rounds, length: int) -> float:
    """Tokens of a round that verifies the first `length` drafts, in the mean of the recording."""
    return 1 + float(np.minimum(rounds.accepted, length).mean())
