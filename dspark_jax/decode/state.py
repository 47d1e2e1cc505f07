"""What decoding remembers between ticks, and the work item that a tick consumes."""

from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, BFloat16, Bool, Float32, Int

from dspark_jax.decode.logprobs import Logprobs
from dspark_jax.decode.rows import Rows, padded_rows
from dspark_jax.decode.sampling import SamplingState

RUNNING, STOP, LENGTH, CONTEXT = 0, 1, 2, 3
FINISH_REASONS = {STOP: "stop", LENGTH: "length", CONTEXT: "context"}


@struct.dataclass
class Requests:
    """One row a request slot.

    `length` tokens have been processed; the `anchor` stands at that position, committed but not processed. `drafts`
    follow it, drawn from the softmax of `draft_logits` (bf16, processed); the first `num_drafts` of them will be
    verified.
    """

    length: Int[Array, "R"]
    anchor: Int[Array, "R"]
    drafts: Int[Array, "R gamma"]
    draft_logits: BFloat16[Array, "R gamma V"]
    confidence: Float32[Array, "R gamma"]
    num_drafts: Int[Array, "R"]
    active: Bool[Array, "R"]
    emitted: Int[Array, "R"]
    max_tokens: Int[Array, "R"]
    stop: Int[Array, "R S"]
    sampling: SamplingState


@struct.dataclass
class DecodeState:
    """Everything that stays on a device between ticks. Every leaf has the slots first.

    `stale` is the history of a schedule (`decode.schedule.Schedule.init`), None without one.
    """

    requests: Requests
    target_cache: Any
    draft_cache: Any
    stale: Float32[Array, "R history gamma"] | None = None


@struct.dataclass
class WorkItem:
    """The tokens of one tick: a chunk of a prompt, or an anchor and its drafts, for every slot that takes part.

    Of slot r the first `count[r]` tokens are real and begin at position `start[r]`; the last `verify[r]` of them are
    drafts. A slot with `final[r]` draws a token behind its last committed row; one without only fills its state.
    """

    token: Int[Array, "R width"]
    start: Int[Array, "R"]
    count: Int[Array, "R"]
    verify: Int[Array, "R"]
    final: Bool[Array, "R"]

    def rows(self) -> Rows:
        """The item's tokens as rows in the padded form."""
        return padded_rows(self.token, self.start, self.count)


@struct.dataclass
class Emission:
    """What a tick committed: `count` tokens a slot, of which all but the last are accepted drafts.

    `accepted` of `verified` drafts survived (before stops and limits cut the block); `reason` is a finish reason or
    RUNNING. `logprobs` is None in a program without them. `rested` is 1 where nothing was drafted behind this tick for a
    request that goes on; None in a program whose schedule never rests.
    """

    token: Int[Array, "R gamma+1"]
    count: Int[Array, "R"]
    accepted: Int[Array, "R"]
    verified: Int[Array, "R"]
    reason: Int[Array, "R"]
    logprobs: Logprobs | None = None
    rested: Int[Array, "R"] | None = None


def decode_item(requests: Requests, gamma: int) -> WorkItem:
    """The next tick of every active slot: its anchor and its drafts (gamma 0: the anchor alone)."""
    verify = requests.num_drafts if gamma else jnp.zeros_like(requests.num_drafts)
    verify = jnp.where(requests.active, verify, 0)
    return WorkItem(
        token=jnp.concatenate([requests.anchor[:, None], requests.drafts[:, :gamma]], axis=1),
        start=requests.length,
        count=jnp.where(requests.active, verify + 1, 0),
        verify=verify,
        final=requests.active,
    )
