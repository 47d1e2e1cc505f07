"""Decoding slowed down: what one round drafts, believes, verifies and commits, laid open for a look."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from dspark_jax.decode import noise
from dspark_jax.decode.batch import BatchDecoder, prefill_items
from dspark_jax.decode.sampling import SamplingParams, processed_logits
from dspark_jax.decode.state import FINISH_REASONS, RUNNING, DecodeState, decode_item
from dspark_jax.decode.verify import REJECTION
from dspark_jax.errors import RequestError
from dspark_jax.parallel.mesh import EXPERT, param_specs

if TYPE_CHECKING:
    from dspark_jax.api import LM, Prompt


@dataclass(frozen=True)
class RoundTrace:
    """One round of one request; gamma drafts, vocabulary V.

    Attributes:
      position: absolute position of the anchor.
      anchor: the last committed token, not yet processed by the target when the round begins.
      drafts: [gamma] proposed tokens; the first `verified` of them are put to the test.
      q: [gamma, V] the distribution each draft was drawn from.
      p: [gamma + 1, V] the target's distribution behind the anchor and behind each draft.
      confidence: [gamma] the drafter's own P(draft survives | those before it did).
      uniform: [gamma] the number that decides: the draft survives where `uniform * q <= p`.
      verified, accepted: how many drafts were tested, and how many survived, from the first on.
      tokens: what the round committed: the accepted drafts and one token of the target's own, or fewer where a stop
        token or a limit cut the block.
      finish_reason: "stop", "length" or "context" in a request's last round, else None.
    """

    position: int
    anchor: int
    drafts: np.ndarray
    q: np.ndarray
    p: np.ndarray
    confidence: np.ndarray
    uniform: np.ndarray
    verified: int
    accepted: int
    tokens: tuple[int, ...]
    finish_reason: str | None

    @property
    def draft_p(self) -> np.ndarray:
        """[gamma] the target's probability of each draft."""
        return self.p[np.arange(len(self.drafts)), self.drafts]

    @property
    def draft_q(self) -> np.ndarray:
        """[gamma] the drafter's probability of each draft."""
        return self.q[np.arange(len(self.drafts)), self.drafts]

    @property
    def acceptance(self) -> np.ndarray:
        """[gamma] min(1, p / q): the chance that each draft had, given those before it."""
        return np.minimum(1, self.draft_p / self.draft_q)

    @property
    def overlap(self) -> np.ndarray:
        """[gamma] sum over the vocabulary of min(p, q): that chance before the draft was drawn."""
        return np.minimum(self.p[:-1], self.q).sum(-1)

    def table(self, decode: Callable[[Sequence[int]], str]) -> str:
        """The drafts line by line, as text."""
        lines = ["draft           q      p   min(1, p/q)  uniform  confidence  verdict"]
        for j, draft in enumerate(self.drafts):
            verdict = "accepted" if j < self.accepted else "rejected" if j == self.accepted else "behind a rejection"
            if j >= self.verified:
                verdict = "not verified"
            numbers = f"{self.draft_q[j]:6.3f} {self.draft_p[j]:6.3f} {self.acceptance[j]:13.3f} {self.uniform[j]:8.3f}"
            lines.append(f"{shown(decode, int(draft)):12} {numbers} {self.confidence[j]:11.3f}  {verdict}")
        last = f"{shown(decode, self.tokens[-1]):12}"
        if len(self.tokens) <= self.accepted:
            lines.append(f"{last} the last token: the request ended inside the block ({self.finish_reason})")
        else:
            own = "in place of the rejected draft" if self.accepted < self.verified else "behind the last draft"
            lines.append(f"{last} the target's own token, {own}")
        return "\n".join(lines)


def shown(decode: Callable[[Sequence[int]], str], token: int) -> str:
    """A token's text, quoted, short enough for a label."""
    text = repr(decode([token]))
    return text if len(text) <= 12 else text[:10] + "…'"


def trace_rounds(
    lm: "LM", prompt: "Prompt", params: SamplingParams | None = None, *, rounds: int = 1, ignore_eos: bool = False
) -> list[RoundTrace]:
    """Decodes `prompt` round by round as `generate` does, at most `rounds` rounds, and keeps what each of them saw.

    Raises RequestError as `generate` does, for rounds below 1, and for a model without a drafter or with coupled verification.
    """
    if not (isinstance(rounds, int) and rounds >= 1):
        raise RequestError(f"rounds is {rounds!r}; expected an integer >= 1")
    if lm.draft_config is None:
        raise RequestError("the model has no drafter, so its rounds have nothing to show; choose one with mtp.* stages")
    if lm.verify != REJECTION:
        raise RequestError(f"a trace shows rejection sampling, and the model verifies {lm.verify}; load it without verify")
    requests = lm._reader.read([prompt], params, ignore_eos)
    slots, capacity = lm.mesh.shape[EXPERT], lm._decoder(requests, []).max_len
    decoder = BatchDecoder(lm._graph, lm._params, lm.mesh, slots, capacity, lm._chunk, rounds_per_call=1)
    decoder.compile(lm._params, [True])
    look = _look(decoder, lm._params)
    step = decoder._compiled["rounds"]

    state, emission = decoder._start(lm._params, requests), None
    for item in prefill_items([requests[0].prompt], slots, decoder.chunk):
        state, emission = decoder._compiled["prefill"](lm._params, state, decoder._place(item))
    reason = int(jax.device_get(emission.reason)[0]) if emission is not None else RUNNING
    found: list[RoundTrace] = []
    while reason == RUNNING and len(found) < rounds:
        seen = jax.device_get(look(lm._params, state))
        state, emission = step(lm._params, state)  # the old state is gone from here on
        out = jax.device_get(emission)
        reason = int(out.reason[0, 0])
        found.append(
            RoundTrace(
                **{name: value[0] for name, value in seen.items() if value.ndim > 1},
                position=int(seen["position"][0]),
                anchor=int(seen["anchor"][0]),
                verified=int(out.verified[0, 0]),
                accepted=int(out.accepted[0, 0]),
                tokens=tuple(int(t) for t in out.token[0, 0, : out.count[0, 0]]),
                finish_reason=None if reason == RUNNING else FINISH_REASONS[reason],
            )
        )
    return found


def _look(decoder: BatchDecoder, params: nnx.State) -> Callable[[nnx.State, DecodeState], dict[str, Any]]:
    """What the next round will see, by the model's own functions; the state is left as it is."""
    program = decoder.program

    def run(params: nnx.State, state: DecodeState) -> dict[str, jax.Array]:
        target, drafter = program._model(params)
        requests, gamma = state.requests, drafter.block_size
        rows = decode_item(requests, gamma).rows()
        hidden, _, _ = target.forward(rows, state.target_cache)
        logits = target.logits(rows.to_lanes(hidden))
        own = requests.sampling
        each = [jnp.broadcast_to(x[:, None], logits.shape[:2]) for x in (own.temperature, own.top_k, own.top_p)]
        after = requests.length[:, None] + 1 + jnp.arange(gamma)
        return {
            "position": requests.length,
            "anchor": requests.anchor,
            "drafts": requests.drafts,
            "q": jax.nn.softmax(requests.draft_logits.astype(jnp.float32), axis=-1),
            "p": jax.nn.softmax(processed_logits(logits, *each), axis=-1),
            "confidence": jax.nn.sigmoid(requests.confidence),
            "uniform": noise.uniform(own.seed, after, noise.ACCEPT),
        }

    rows = PartitionSpec(EXPERT)
    return jax.jit(
        jax.shard_map(run, mesh=program.mesh, in_specs=(param_specs(params), rows), out_specs=rows, check_vma=False)
    )
