"""What the stages take of a device's memory, in closed form and exactly as `stage.Pipeline` and `ring.Ring` lay it out.

The program is the same on all ranks, so every device holds the leaves of all of them: a leaf that its rank lacks is
there as zeros. What differs from rank to rank is how much of it is used.
"""

from dataclasses import asdict, dataclass
from typing import Any

from dspark_jax.config_dense import DenseConfig, ModelConfig
from dspark_jax.config_drafter import AnyDraftConfig
from dspark_jax.parallel import dense_leaves, leaves
from dspark_jax.parallel.leaves import Leaf, Ranges
from dspark_jax.parallel.stage_cost import Workload


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one device; the compiled program's temporaries are not counted.

    Attributes:
      parameters: the same on every device, zeros in place of other ranks' leaves included.
      own: the part of them that each rank uses.
      cache: of one request slot, on every rank.
      request: of one request slot besides, on every rank: tokens, limits and the drafts' bf16 logits, which the last
        rank reads.
      item: sent to the next rank in a tick.
      slots: request slots of a device: those of one microbatch for every rank.
    """

    parameters: int
    own: tuple[int, ...]
    cache: int
    request: int
    item: int
    slots: int

    @property
    def padding(self) -> tuple[int, ...]:
        """Bytes of `parameters` that a rank never reads."""
        return tuple(self.parameters - own for own in self.own)

    @property
    def total(self) -> int:
        """Parameters, state of all slots, and the item."""
        return self.parameters + self.slots * (self.cache + self.request) + self.item

    def as_dict(self) -> dict[str, Any]:
        """Fields and sums, for JSON."""
        return {**asdict(self), "own": list(self.own), "padding": list(self.padding), "total": self.total}


def stage_memory(c: ModelConfig, draft: AnyDraftConfig | None, ranges: Ranges, load: Workload) -> StageMemory:
    """Memory of the stages `ranges` for a ring whose requests may reach `load.context` positions."""
    pipe, expert, size = len(ranges), load.expert, load.item_size
    parts: Any = dense_leaves if isinstance(c, DenseConfig) else leaves
    held: list[set[Leaf]] = [parts.rank_leaves(c, draft, ranges, expert, rank, load.num_slots) for rank in range(pipe)]
    own = tuple(sum(leaf.bytes(size, expert) for leaf in part) for part in held)
    state = set[Leaf]().union(*(parts.rank_cache(c, draft, ranges, rank, load.context) for rank in range(pipe)))
    gamma = draft.block_size if draft else 0
    slots = load.local_slots(gamma)
    return StageMemory(
        parameters=sum(leaf.bytes(size, expert) for leaf in set[Leaf]().union(*held)),
        own=own,
        cache=sum(leaf.bytes(size, 1) for leaf in state),
        request=_request_bytes(c, gamma, load.stops),
        item=slots * _item_bytes(c, draft, load),
        slots=pipe * slots,
    )


def _request_bytes(c: ModelConfig, gamma: int, stops: int) -> int:
    """`decode.state.Requests` and the generation number: ten words, one flag; drafts, confidences and their logits."""
    return 10 * 4 + 1 + 4 * stops + gamma * (4 + 4 + 2 * c.vocab_size)


def _item_bytes(c: ModelConfig, draft: AnyDraftConfig | None, load: Workload) -> int:
    """`decode.item.Item` of one slot: flags travel as words."""
    width = max(load.chunk, (draft.block_size if draft else 0) + 1)
    words = 14 + width + load.stops  # fields of the record, and how many drafts to verify
    context = width * c.hidden_size * 4 if draft and draft.target_layer_ids else 0
    return words * 4 + context + width * c.hc_mult * c.hidden_size * load.item_size
