"""What a drafter inherits from its target. Expert placement goes to the embedded DSpark drafter and to no other."""

from dataclasses import dataclass, fields
from typing import Any

import jax
from jax.sharding import Mesh

from dspark_jax.config_drafter import DrafterKind
from dspark_jax.eplb.placement import Placement


@dataclass(frozen=True)
class TargetSettings:
    """What a target is run with.

    Attributes:
      mesh: the devices of both models.
      dtype: of activations and weights.
      max_len: most positions of a request.
      placement: where the target's experts are, draft stages included; None without balancing.
    """

    mesh: Mesh
    dtype: jax.typing.DTypeLike
    max_len: int
    placement: Placement | None = None


def inherited(kind: DrafterKind, target: TargetSettings) -> dict[str, Any]:
    """The settings that a drafter of `kind` takes from its target, by name; values are the target's own objects.

    Every kind gets the same but for `placement`: the embedded DSpark stages are layers L … L+S-1 of the placement,
    while the experts of any other drafter are numbered by themselves, and the target's placement would scramble them.
    """
    settings = {f.name: getattr(target, f.name) for f in fields(target)}
    if kind is not DrafterKind.EMBEDDED_DSPARK:
        del settings["placement"]
    return settings
