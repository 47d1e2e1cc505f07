"""Decoding of look-up-table models under a scheduler: many small batches at once, each with a schedule of its own."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Int

from dspark_jax.decode import noise
from dspark_jax.decode.protocols import Proposal
from dspark_jax.decode.round import init_state, tick
from dspark_jax.decode.sampling import SamplingState, processed_logits
from dspark_jax.decode.schedule import Block, Schedule, StepCost, expected_rate, survival
from dspark_jax.decode.schedule.order import admission_rank, admitted
from dspark_jax.decode.state import DecodeState, Requests, decode_item
from dspark_jax.decode.verify import REJECTION
from dspark_jax.testing import LookupDrafter, LookupTarget
from helpers.speculation import MANY_ROWS


@dataclass(frozen=True)
class Retrospective:
    """The forbidden search over the whole path: the length whose rate is best in the light of all of today's drafts."""

    cost: StepCost

    @property
    def history(self) -> int:
        return 0

    def lengths(self, block: Block, axis: str | None = None) -> Int[Array, "R"]:
        rank, gains = admission_rank(survival(block.confidence), block.candidates)
        requests = jnp.sum(block.active, dtype=jnp.int32)
        tokens = requests + jnp.concatenate([jnp.zeros(1), jnp.cumsum(gains)])
        return admitted(rank, block.candidates, jnp.argmax(expected_rate(self.cost, requests, tokens)))


@struct.dataclass
class KeyedDrafter(LookupDrafter):
    """A look-up drafter whose noise is keyed as it should be, or, with `by_position`, by the token's absolute position alone.

    The flag is data, so that both share a compiled program.
    """

    by_position: Bool[Array, ""]

    @classmethod
    def of(cls, table: np.ndarray, confidence: np.ndarray, by_position: bool = False) -> "KeyedDrafter":
        """Tables as for LookupDrafter, rounded to bf16."""
        rounded = jnp.asarray(table, jnp.bfloat16).astype(jnp.float32)
        return cls(rounded, jnp.asarray(confidence, jnp.float32), jnp.asarray(by_position))

    def propose(self, anchor, position, active, sampling, cache, draft_noise=noise.draft_gumbel) -> Proposal:
        previous, tokens, kept, confidence = anchor, [], [], []
        for j in range(self.block_size):
            confidence.append(self.confidence_table[j, previous])
            logits = processed_logits(self.table[j, previous], sampling.temperature, sampling.top_k, sampling.top_p)
            logits = logits.astype(jnp.bfloat16)
            at, index = jnp.where(self.by_position, position + j, position), jnp.where(self.by_position, 0, j)
            gumbel = draft_noise(sampling.seed, at, index, self.table.shape[-1])
            previous = jnp.argmax(logits.astype(jnp.float32) + gumbel, axis=-1).astype(anchor.dtype)
            tokens.append(previous)
            kept.append(logits)
        return Proposal(jnp.stack(tokens, 1), jnp.stack(kept, 1), jnp.stack(confidence, 1))


def begin(target, drafter, sampling: SamplingState, prompt: Int[Array, "R"], max_len: int) -> DecodeState:
    """Every slot with a prompt of one token, the anchor at position 0: the first tick draws one token behind it."""
    slots = sampling.seed.shape[0]
    state = init_state(target, drafter, slots, max_len)
    own = {"anchor": prompt, "active": jnp.ones(slots, bool), "max_tokens": jnp.full(slots, 10**6), "sampling": sampling}
    return replace(state, requests=replace(state.requests, **own))


@dataclass(frozen=True)
class Plan:
    """A schedule over batches of `group` neighbouring slots; None verifies whole blocks."""

    schedule: Schedule | None
    group: int = 1

    def step(self, requests: Requests, committed: jax.Array, stale: jax.Array) -> tuple[Requests, jax.Array]:
        if self.schedule is None:
            return requests, stale
        slots, group = committed.size, self.group
        split = lambda x: x.reshape(slots // group, group, *x.shape[1:])  # noqa: E731
        planned = jax.vmap(self.schedule.step)(*jax.tree.map(split, (requests, committed, stale)))
        return jax.tree.map(lambda x: x.reshape(slots, *x.shape[2:]), planned)


HISTORY = 5  # blocks that every plan may look back on


def _decode(target, drafter, sampling, prompt, choice, plans: tuple[Plan, ...], ticks: int, verify: str):
    gamma = drafter.block_size
    width = ticks * (gamma + 1)
    max_len = width + gamma + 3
    slots = sampling.seed.shape[0]
    state = begin(target, drafter, sampling, prompt, max_len)
    lane = jnp.arange(slots)[:, None]

    def plan(requests, committed, stale):
        return jax.lax.switch(choice, [plan.step for plan in plans], requests, committed, stale)

    def one(carry, _):
        state, stale, tokens = carry
        begin = state.requests.emitted[:, None]
        state, emission = tick(target, drafter, state, decode_item(state.requests, gamma), max_len, verify=verify)
        index = jnp.arange(gamma + 1)
        tokens = tokens.at[lane, jnp.where(index < emission.count[:, None], begin + index, width)].set(emission.token)
        requests, stale = plan(state.requests, emission.count, stale)
        return (replace(state, requests=requests), stale, tokens), emission.verified

    start = (state, jnp.ones((slots, HISTORY, gamma)), jnp.full((slots, width + 1), -1))
    (_, _, tokens), verified = jax.lax.scan(one, start, None, length=ticks)
    return tokens[:, :width], verified


_compiled = jax.jit(_decode, static_argnames=("plans", "ticks", "verify"), compiler_options=MANY_ROWS)


def decode(
    target: LookupTarget,
    drafter: LookupDrafter,
    sampling: SamplingState,
    plans: tuple[Plan, ...],
    choice: int = 0,
    *,
    prompt: np.ndarray | None = None,
    ticks: int = 4,
    verify: str = REJECTION,
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [N, ...] behind the prompt, -1 where there is none yet, and verify lengths [ticks, N], by `plans[choice]`.

    `prompt` has one token a slot, 0 by default. The first tick is the prompt's: it verifies nothing, and its token has
    seen no scheduler. All plans are branches of one program, so that they are compiled together.
    """
    prompt = np.zeros(sampling.seed.shape, np.int32) if prompt is None else prompt
    found = _compiled(target, drafter, sampling, prompt, choice, plans=plans, ticks=ticks, verify=verify)
    return jax.tree.map(np.asarray, found)
