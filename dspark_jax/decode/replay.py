"""What a schedule would choose at other loads, from recorded rounds and without a model."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.decode.calibrate import Rounds
from dspark_jax.decode.schedule import Block, Schedule, survival
from dspark_jax.errors import ConfigError


class Replay(NamedTuple):
    """Means over many rounds of `requests` requests side by side.

    Attributes:
      requests: how many.
      drafts: verified drafts of a request and round.
      tokens: committed tokens of a request and round: of its verified drafts those that survived, and one more.
    """

    requests: int
    drafts: float
    tokens: float


def replay(
    schedule: Schedule, rounds: Rounds, requests: Sequence[int], *, batches: int = 200, seed: int = 0
) -> list[Replay]:
    """The lengths that `schedule` chooses for batches of recorded rounds, `batches` of them for each number of requests.

    The rounds of a batch are drawn independently, and so are the older ones that a scheduler looks at: that a
    text is hard for several rounds in a row is lost.

    Raises ConfigError for a number of requests or batches below 1, and where the schedule does not fit the block size.
    """
    if bad := [n for n in (*requests, batches) if n < 1]:
        raise ConfigError(f"replay: requests and batches hold {bad[0]}; expected at least 1")
    gamma, history = rounds.gamma, schedule.scheduler.history

    @jax.jit
    def lengths(logits: jax.Array) -> jax.Array:
        """[batches, R, 1 + history, gamma] to [batches, R]."""

        def one(logits: jax.Array) -> jax.Array:
            count = logits.shape[0]
            confidence = jax.vmap(schedule.confidence, in_axes=1, out_axes=1)(logits)
            stale = jax.vmap(survival, in_axes=1, out_axes=1)(confidence[:, 1:]) if history else confidence[:, 1:]
            everything = jnp.full(count, gamma), jnp.ones(count, bool)
            return schedule.scheduler.lengths(Block(confidence[:, 0], *everything, stale))

        return jax.vmap(one)(logits)

    rng, found = np.random.default_rng(seed), []
    for count in requests:
        drawn = rng.integers(0, len(rounds), (batches, count, 1 + history))
        chosen = np.asarray(lengths(jnp.asarray(rounds.logits[drawn], jnp.float32)))
        tokens = 1 + np.minimum(rounds.accepted[drawn[:, :, 0]], chosen)
        found.append(Replay(count, float(chosen.mean()), float(tokens.mean())))
    return found
