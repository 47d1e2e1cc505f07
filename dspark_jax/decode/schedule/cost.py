"""The seconds of a step as a table on the device: a jagged curve, looked up by number of rows."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dspark_jax.errors import ConfigError, raise_all


@dataclass(frozen=True)
class StepCost:
    """T(R, B) = requests[R] + rows[B]: seconds of a step over B rows, which begin at R requests' anchors.

    Attributes:
      rows: seconds by number of rows, from 0 on; the curve may rise and fall as it likes.
      requests: seconds by number of requests, from 0 on; the last one counts for more requests too.
      plain: of a step without drafting that has the anchors alone, likewise; None: not known, and schedulers never rest.

    A step of more rows than the table has takes for ever: no scheduler that minds the cost plans one. Under an expert
    axis all numbers are those of one rank.

    Raises:
      ConfigError: a table is empty or holds a value that is no finite time; a step of one row or more takes no time.
    """

    rows: tuple[float, ...]
    requests: tuple[float, ...] = (0.0,)
    plain: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        raise_all(ConfigError, "step cost", list(self._faults()))

    def _faults(self):
        for name in ("rows", "requests", "plain"):
            values = getattr(self, name)
            if values is None:
                continue
            if not values:
                yield f"{name} is empty; expected seconds by number of {'rows' if name == 'rows' else 'requests'}, from 0 on"
            bad = [i for i, x in enumerate(values) if not (math.isfinite(x) and x >= 0)]
            if bad:
                yield f"{name}[{bad[0]}] = {values[bad[0]]!r}; expected finite seconds >= 0 ({len(bad)} such values)"
        zero = [i for i, x in enumerate(self.rows) if i and x + min(self.requests, default=0) <= 0]
        if zero:
            yield f"rows[{zero[0]}] gives a step of no time; expected seconds above 0"
        if any(x == 0 for x in (self.plain or ())[1:]):
            yield "plain has a step of no time; expected seconds above 0"

    @classmethod
    def of_rates(cls, steps_per_second: Sequence[float]) -> "StepCost":
        """From SPS(1), SPS(2), …: steps a second by number of rows (paper, section 5).

        Raises:
          ConfigError: a rate is no finite number above 0.
        """
        bad = [i for i, rate in enumerate(steps_per_second, 1) if not (math.isfinite(rate) and rate > 0)]
        raise_all(ConfigError, "steps per second", [f"SPS({i}); expected a finite rate above 0" for i in bad])
        return cls((0.0, *(1 / rate for rate in steps_per_second)))

    def seconds(self, requests: Int[Array, ""], rows: Int[Array, "n"]) -> Float[Array, "n"]:
        """T(requests, rows) for each number of rows; infinite behind the table's end."""
        by_rows, by_requests = np.asarray(self.rows, np.float32), np.asarray(self.requests, np.float32)
        last = len(self.rows) - 1
        own = jnp.asarray(by_rows)[jnp.minimum(rows, last)]
        draft = jnp.asarray(by_requests)[jnp.minimum(requests, len(self.requests) - 1)]
        return jnp.where(rows > last, jnp.inf, own + draft)

    def plain_seconds(self, requests: Int[Array, ""]) -> Float[Array, ""] | None:
        """Of a step without drafting over the anchors alone; None where that is not known."""
        if self.plain is None:
            return None
        return jnp.asarray(np.asarray(self.plain, np.float32))[jnp.minimum(requests, len(self.plain) - 1)]


def expected_rate(cost: StepCost, requests: Int[Array, ""], tokens: Float[Array, "n"]) -> Float[Array, "n"]:
    """Theta of 0, 1, … admitted drafts, in tokens a second: `tokens[k]` expected of a step with k drafts, by its time."""
    return tokens / cost.seconds(requests, requests + jnp.arange(tokens.size))
