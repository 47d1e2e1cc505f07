"""What generation gives back: one record a decoding round while it runs, one completion a prompt at the end."""

from collections.abc import Hashable
from dataclasses import dataclass

from dspark_jax.decode.logprobs import TokenLogprobs


@dataclass(frozen=True)
class RoundOutput:
    """What one round committed for one request.

    Attributes:
      index: the request's place in the batch.
      round: 1, 2, …; 0 is the prefill, which draws the first token and verifies nothing.
      tokens: the committed tokens.
      pieces: the text that each of them completes; a piece is empty inside a multi-byte character.
      accepted: how many of the tokens, from the first, are accepted drafts.
      verified: drafts that the target checked, including those behind a rejection or a stop.
      finish_reason: "stop", "length" or "context" in the request's last round ("abort" without a round), else None.
      request_id: the engine's name of the request.
      logprobs: one entry a token, None unless `SamplingParams.logprobs` asked for them.
      rested: the scheduler let the drafter rest behind this round, so that the next one verifies nothing.
    """

    index: int
    round: int
    tokens: tuple[int, ...]
    pieces: tuple[str, ...]
    accepted: int
    verified: int
    finish_reason: str | None = None
    request_id: Hashable | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    rested: bool = False

    @property
    def wasted(self) -> int:
        """Drafts that the target checked for nothing: behind a rejection, a stop or a limit, and the rejected one."""
        return self.verified - self.accepted

    @property
    def text(self) -> str:
        """The pieces joined: the text that this round added."""
        return "".join(self.pieces)


@dataclass(frozen=True)
class Completion:
    """The answer to one prompt.

    Attributes:
      prompt: the prompt as it was given.
      prompt_tokens: its ids, with the beginning-of-sequence token that `encode` adds.
      tokens: the generated ids, a final stop token included.
      text: their text; special tokens have none.
      finish_reason: "stop" (a stop token), "length" (max_tokens) or "context" (the model's positions are used up).
      rounds: verification rounds while the request ran; the prefill is none.
      drafted: for every token, whether it is an accepted draft.
      verified_by_position: for draft position j, the rounds that put it to the test: draft j was verified and all
        drafts before it were accepted. Positions behind a stop or limit are not counted.
      accepted_by_position: how many of those rounds accepted it.
      prefill_seconds: from the start of the batch to the request's first token, compilation excluded.
      seconds: from the start of the batch to the request's last token, compilation excluded.
      logprobs: one entry a token, None unless `SamplingParams.logprobs` asked for them.
      verify_lengths: for every round the drafts that the target checked; a scheduler changes them.
      rested_rounds: rounds that were plain steps, because the scheduler let the drafter rest.
    """

    prompt: str | tuple[int, ...]
    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str
    finish_reason: str
    rounds: int
    drafted: tuple[bool, ...]
    verified_by_position: tuple[int, ...]
    accepted_by_position: tuple[int, ...]
    prefill_seconds: float
    seconds: float
    logprobs: tuple[TokenLogprobs, ...] | None = None
    verify_lengths: tuple[int, ...] = ()
    rested_rounds: int = 0

    @property
    def tokens_per_round(self) -> float | None:
        """Tau: committed tokens per verification round, accepted drafts and the target's own token together.

        The prefill's token is not counted and neither is the prefill; plain decoding has 1. None without a round.
        """
        return (len(self.tokens) - 1) / self.rounds if self.rounds else None

    @property
    def acceptance_by_position(self) -> tuple[float | None, ...]:
        """P(draft j accepted | it was verified and the drafts before it were accepted); None where it never was tested.

        Under a scheduler that spares doubtful drafts this is the rate of those that it let pass, not the drafter's own.
        """
        pairs = zip(self.accepted_by_position, self.verified_by_position, strict=True)
        return tuple(accepted / verified if verified else None for accepted, verified in pairs)

    @property
    def wasted(self) -> int:
        """Drafts that the target checked for nothing: they are not in the answer."""
        return sum(self.verify_lengths) - sum(self.drafted)

    @property
    def tokens_per_second(self) -> float | None:
        """Speed of decoding: tokens behind the first by the time since the first. None for a single token."""
        elapsed = self.seconds - self.prefill_seconds
        return (len(self.tokens) - 1) / elapsed if len(self.tokens) > 1 and elapsed > 0 else None


class Tally:
    """Collects the rounds of one request; `gamma` is the draft length (0: no drafter).

    `logprobs` says whether it asked for log-probabilities; without, they stay None.
    """

    def __init__(self, gamma: int, logprobs: bool = False):
        self.logprobs: tuple[TokenLogprobs, ...] | None = () if logprobs else None
        self.tokens: list[int] = []
        self.drafted: list[bool] = []
        self.verified = [0] * gamma
        self.accepted = [0] * gamma
        self.rounds = 0
        self.verify_lengths: list[int] = []
        self.rested_rounds = 0

    def add(
        self,
        tokens: tuple[int, ...],
        accepted: int,
        verified: int,
        *,
        prefill: bool = False,
        logprobs: tuple[TokenLogprobs, ...] | None = None,
        rested: bool = False,
    ) -> int:
        """Counts one round; returns how many of the `accepted` drafts are left (a stop or limit may cut the block)."""
        count = len(tokens)
        kept = min(accepted, count)
        self.rounds += not prefill
        self.rested_rounds += rested
        if not prefill:
            self.verify_lengths.append(verified)
        self.tokens += tokens
        if self.logprobs is not None:
            self.logprobs += logprobs or ()
        self.drafted += [j < kept for j in range(count)]
        # A block that ends with its own token tested one draft more than it kept, unless all were kept.
        for j in range(min(verified, count, accepted + 1)):
            self.verified[j] += 1
            self.accepted[j] += j < accepted
        return kept
