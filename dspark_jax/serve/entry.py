"""What the engine keeps of a request from its submission until its end was read."""

import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from dspark_jax.requests import Prompt
from dspark_jax.results import Completion, RoundOutput, Tally
from dspark_jax.serve.scheduler import Commit
from dspark_jax.text import TextStream


@dataclass
class Entry:
    """A request's answer so far. Times are of `time.perf_counter`, in seconds.

    Attributes:
      index: number of the request.
      submitted, first, last: when it was submitted, and when its first and its last token arrived.
      outputs: what was committed and not yet read.
    """


    index: int
    prompt: Prompt
    prompt_tokens: tuple[int, ...]
    tally: Tally
    text: TextStream
    submitted: float
    first: float = 0.0
    last: float = 0.0
    finish_reason: str | None = None
    outputs: deque[RoundOutput] = field(default_factory=deque)

    def deliver(self, commit: Commit) -> RoundOutput:
        """Takes what one tick committed."""
        kept = self.tally.add(
            commit.tokens, commit.accepted, commit.verified, prefill=commit.prefill, logprobs=commit.logprobs,
            rested=commit.rested,
        )  # fmt: skip
        pieces = [self.text.push(token) for token in commit.tokens]
        if commit.prefill:
            self.first = time.perf_counter()
        if commit.finish_reason:
            pieces[-1] += self.text.flush()
            self._finish(commit.finish_reason)
        output = RoundOutput(
            index=self.index, round=self.tally.rounds, tokens=commit.tokens, pieces=tuple(pieces), accepted=kept,
            verified=commit.verified, finish_reason=commit.finish_reason, request_id=commit.key,
            logprobs=commit.logprobs, rested=commit.rested,
        )  # fmt: skip
        self.outputs.append(output)
        return output

    def abort(self, key: Hashable) -> None:
        """Ends the request `key`."""
        self._finish("abort")
        self.outputs.append(RoundOutput(self.index, self.tally.rounds, (), (), 0, 0, "abort", key))

    def _finish(self, reason: str) -> None:
        self.finish_reason, self.last = reason, time.perf_counter()

    def completion(self, decode: Callable[[Sequence[int]], str]) -> Completion:
        """The whole answer, after its end."""
        tally = self.tally
        return Completion(
            prompt=self.prompt if isinstance(self.prompt, str) else self.prompt_tokens,
            prompt_tokens=self.prompt_tokens,
            tokens=tuple(tally.tokens),
            text=decode(tally.tokens),
            finish_reason=self.finish_reason or "",
            rounds=tally.rounds,
            drafted=tuple(tally.drafted),
            verified_by_position=tuple(tally.verified),
            accepted_by_position=tuple(tally.accepted),
            prefill_seconds=self.first - self.submitted,
            seconds=self.last - self.submitted,
            logprobs=tally.logprobs,
            verify_lengths=tuple(tally.verify_lengths),
            rested_rounds=tally.rested_rounds,
        )
