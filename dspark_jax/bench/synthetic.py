"""Acceptance out of a recording, in a program that does all of its work: for models whose weights are random.

Target, drafter, output head, verification and sampling run as they are. Behind the drafter, a round's confidences are those
of a recorded round, drawn at random by the request's seed and the number of its round, and the stored law of every draft is
changed at the drafted token: to probability 0 where the recorded draft survived, so that verification must accept it,
and to 1 where it did not, so that it is accepted with the target's probability of that token, about 1 in the vocabulary.
Rounds are drawn independently of each other: what a text keeps for several rounds, its difficulty, is lost. However long the
verified blocks are, a request meets the same recorded rounds in the same order, so that schedulers are compared on equal luck.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Int

from dspark_jax.bench.stage_programs import Shapes, make_weights, makers, stored
from dspark_jax.checkpoint.layout import skeleton
from dspark_jax.config import DraftConfig, TargetConfig
from dspark_jax.decode import noise
from dspark_jax.decode.calibrate import Rounds
from dspark_jax.decode.noise import DraftNoise, draft_gumbel
from dspark_jax.decode.protocols import Proposal
from dspark_jax.decode.rows import Rows
from dspark_jax.errors import ConfigError
from dspark_jax.parallel.mesh import EXPERT
from dspark_jax.parallel.ring import Ring, RingConfig
from dspark_jax.parallel.stage import PipelineSpec, PipeStage

_ROUND = 101  # purpose of the random numbers that choose a recorded round
_SURE = 1e6  # above every logit


class _Counted(NamedTuple):
    """A drafter's cache with, by slot, the number of the request's round and the position at which its rows began."""

    inner: Any
    number: Int[Array, "R"]
    start: Int[Array, "R"]


class SyntheticDrafter:
    """A drafter whose confidences and acceptance are recorded ones. Only for temperatures above 0, without top-k and top-p."""

    def __init__(self, inner: Any, rounds: Rounds):
        self.inner, self.rounds = inner, rounds
        self.block_size = inner.block_size

    @property
    def choices(self) -> Any:
        return self.inner.choices

    @choices.setter
    def choices(self, value: Any) -> None:
        self.inner.choices = value

    def init_cache(self, slots: int, max_len: int) -> _Counted:
        zero = jnp.zeros((slots,), jnp.int32)
        return _Counted(self.inner.init_cache(slots, max_len), zero, zero)

    def write_context(self, context, rows: Rows, keep, cache: _Counted) -> _Counted:
        """Counts the tick, from 0 on where a request's rows do not stand behind those before: a new one has the slot."""
        number = jnp.where(rows.start > cache.start, cache.number + 1, 0)
        busy = rows.count > 0
        inner = self.inner.write_context(context, rows, keep, cache.inner)
        return _Counted(inner, jnp.where(busy, number, cache.number), jnp.where(busy, rows.start, cache.start))

    def propose(
        self, anchor, position, active, sampling, cache: _Counted, draft_noise: DraftNoise = draft_gumbel
    ) -> Proposal:
        drawn = self.inner.propose(anchor, position, active, sampling, cache.inner, draft_noise)
        number = noise.uniform(sampling.seed, cache.number, _ROUND) * len(self.rounds)
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


@dataclass
class _Leaves:
    """See `stage_programs.Weighted`."""

    params: Shapes
    experts: int


def ring_makers(ring: Ring) -> list[Callable[[], Any]]:
    """What compiles all that `random_params` needs, each call one shape."""
    return makers([_Leaves(ring.pipeline.params.shapes, ring.spec.config.n_routed_experts)])


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
