"""What the decoding round asks of a target and of a drafter. Models implement it; `dspark_jax.testing` has look-up
tables.
"""

from typing import Any, Protocol

from flax import struct
from jaxtyping import Array, BFloat16, Bool, Float, Float32, Int

from dspark_jax.decode.noise import DraftNoise, draft_gumbel
from dspark_jax.decode.rows import Rows
from dspark_jax.decode.sampling import SamplingState

Cache = Any


@struct.dataclass
class Proposal:
    """A block of drafted tokens with the distribution they were drawn from.

    Attributes:
      tokens: draft tokens; draft `j` stands at absolute position `anchor + 1 + j`.
      logits: processed logits (temperature, top-k, top-p applied), rounded to bf16 before the token was drawn, so that
        their softmax is exactly the proposal distribution.
      confidence: logits of P(draft j survives | the drafts before it survived); 0 where the drafter has no such head.
    """

    tokens: Int[Array, "R gamma"]
    logits: BFloat16[Array, "R gamma V"]
    confidence: Float32[Array, "R gamma"]


class Head(Protocol):
    """The end of a target: what a round needs of it behind the layers."""

    @property
    def vocab_size(self) -> int:
        """Channels of `logits`."""
        ...

    def logits(self, hidden: Float[Array, "... d"]) -> Float32[Array, "... V"]:
        """Raw fp32 logits of the next token."""
        ...


class Target(Head, Protocol):
    """A target model with position-addressed state."""

    def init_cache(self, slots: int, max_len: int, block: int) -> Cache:
        """State for `slots` requests of up to `max_len` positions; a tick that may be rejected has at most `block`
        rows.
        """
        ...

    def forward(self, rows: Rows, cache: Cache) -> tuple[Float[Array, "B d"], Float[Array, "B dc"], Cache]:
        """Hidden rows for `logits`, context rows for the drafter, and the state with the rows written."""
        ...


class Drafter(Protocol):
    """A drafter: how it keeps the target's context and how it proposes a block."""

    @property
    def block_size(self) -> int:
        """Drafts of a block, gamma."""
        ...

    def init_cache(self, slots: int, max_len: int) -> Cache:
        """State for `slots` requests of up to `max_len` positions."""
        ...

    def write_context(self, context: Float[Array, "B dc"], rows: Rows, keep: Bool[Array, "B"], cache: Cache) -> Cache:
        """Writes the context of the rows with `keep`; for a slot they are a prefix of its valid rows."""
        ...

    def propose(
        self,
        anchor: Int[Array, "R"],
        position: Int[Array, "R"],
        active: Bool[Array, "R"],
        sampling: SamplingState,
        cache: Cache,
        draft_noise: DraftNoise = draft_gumbel,
    ) -> Proposal:
        """Drafts `block_size` tokens behind `anchor`, which stands at absolute `position` and was not yet processed.

        Draft j is the argmax of its logits plus `draft_noise(sampling.seed, position, j, vocab)`.
        Slots that are not `active` get any finite proposal and influence no other slot.
        """
        ...
