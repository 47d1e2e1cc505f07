"""One tick: verify, commit, write the drafter's context, draft the next block (paper section 3; commit rule in
docs/architecture.md).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from dspark_jax.decode import noise
from dspark_jax.decode.logprobs import committed_logprobs
from dspark_jax.decode.protocols import Drafter, Head, Proposal, Target
from dspark_jax.decode.rest import draft_unless
from dspark_jax.decode.rows import Rows, mask_rows
from dspark_jax.decode.sampling import SamplingParams, SamplingState
from dspark_jax.decode.schedule import Schedule
from dspark_jax.decode.state import (
    CONTEXT,
    LENGTH,
    RUNNING,
    STOP,
    DecodeState,
    Emission,
    Requests,
    WorkItem,
    decode_item,
)
from dspark_jax.decode.verify import COUPLED, REJECTION, Verdict, coupled_sample, speculative_sample
from dspark_jax.models.cache import zero_where


def init_state(
    target: Target,
    drafter: Drafter | None,
    slots: int,
    max_len: int,
    stops: int = 8,
    schedule: Schedule | None = None,
) -> DecodeState:
    """Idle slots. `max_len` is the most positions of a request, prompt included; `stops` the most stop tokens."""
    gamma = drafter.block_size if drafter else 0
    return DecodeState(
        requests=init_requests(slots, gamma, target.vocab_size, stops),
        target_cache=target.init_cache(slots, max_len, gamma + 1),
        draft_cache=drafter.init_cache(slots, max_len) if drafter else (),
        stale=schedule.init(slots, gamma) if schedule else None,
    )


def init_requests(slots: int, gamma: int, vocab_size: int, stops: int) -> Requests:
    """Idle slots."""
    zero = jnp.zeros((slots,), jnp.int32)
    return Requests(
        length=zero,
        anchor=zero,
        drafts=jnp.zeros((slots, gamma), jnp.int32),
        draft_logits=jnp.zeros((slots, gamma, vocab_size), jnp.bfloat16),
        confidence=jnp.zeros((slots, gamma), jnp.float32),
        num_drafts=zero,
        active=jnp.zeros((slots,), bool),
        emitted=zero,
        max_tokens=zero,
        stop=jnp.full((slots, stops), -1, jnp.int32),
        sampling=SamplingState.from_params([SamplingParams()] * slots),
    )


def tick(
    target: Target,
    drafter: Drafter | None,
    state: DecodeState,
    item: WorkItem,
    max_len: int,
    logprobs: int | None = None,
    schedule: Schedule | None = None,
    axis: str | None = None,
    verify: str = REJECTION,
) -> tuple[DecodeState, Emission]:
    """Runs one work item. Without a drafter it is plain decoding through the same code.

    `logprobs` is the number of alternatives of `Emission.logprobs`; None leaves them out of the program. `schedule`
    decides how many of the new drafts the next tick verifies (None: all of them), with the slots split over the mesh
    axis `axis`. `verify` is REJECTION or COUPLED (`decode.verify`).
    """
    rows = item.rows()
    with jax.named_scope("target"):
        hidden, context, target_cache = target.forward(rows, state.target_cache)
    requests, draft_cache, stale, emission = advance(
        target, drafter, state.requests, state.draft_cache, state.stale, item, rows, hidden, context, max_len, logprobs,
        schedule, axis, verify,
    )  # fmt: skip
    return DecodeState(requests, target_cache, draft_cache, stale), emission


def advance(
    target: Head,
    drafter: Drafter | None,
    requests: Requests,
    draft_cache: Any,
    stale: Any,
    item: WorkItem,
    rows: Rows,
    hidden: Float[Array, "B d"],
    context: Float[Array, "B dc"],
    max_len: int,
    logprobs: int | None = None,
    schedule: Schedule | None = None,
    axis: str | None = None,
    verify: str = REJECTION,
) -> tuple[Requests, Any, Any, Emission]:
    """What follows the target's layers: verify, commit, write the context, draft, choose lengths. Slot r owns lane r of
    `draft_cache`. Requests, `draft_cache` and the schedule's history `stale` are handed back.

    Where the schedule rests, the drafter's context is written all the same, so that it may draft again in any later tick.
    `rows` may be packed where all of them are anchors and drafts.
    """
    gamma = drafter.block_size if drafter else 0

    # The rows that predict: the last committed one and every draft behind it.
    base = item.count - 1 - item.verify
    # Packed rows are an anchor and its drafts each, so all of them predict.
    chosen = _at(rows, hidden, base, gamma + 1) if rows.padded else mask_rows(hidden, rows.valid)
    position = item.start + base
    with jax.named_scope("verify"):
        if rows.padded:
            flat = lanes = target.logits(zero_where(chosen, jnp.broadcast_to(~item.final[:, None], chosen.shape[:2])))
        else:
            flat, lanes = target.logits(chosen), None

        def by_lane() -> Float32[Array, "R gamma+1 V"]:
            return rows.to_lanes(flat) if lanes is None else lanes

        def judged(logits: Float32[Array, "R n+1 V"]) -> Verdict:
            n = logits.shape[1] - 1
            drafts = requests.drafts[:, :n]
            if verify == COUPLED:
                return coupled_sample(logits, drafts, item.verify, requests.sampling, position)
            draft_logits = requests.draft_logits[:, :n]
            return speculative_sample(logits, draft_logits, drafts, item.verify, requests.sampling, position)

        if schedule and schedule.rests and gamma:
            # Without drafts only the anchors' rows are looked at; the tokens are the same.
            def first() -> Float32[Array, "R 1 V"]:
                return (rows.first_of_lanes(flat) if lanes is None else lanes[:, 0])[:, None]

            verdict = jax.lax.cond(jnp.any(item.verify > 0), lambda: judged(by_lane()), lambda: judged(first()))
        else:
            verdict = judged(by_lane())

    tokens, count, reason = _commit(requests, verdict.accepted, verdict.token, position, item.final, gamma, max_len)
    alive = item.final & (reason == RUNNING)
    last = jnp.take_along_axis(tokens, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    anchor = jnp.where(item.final, last, requests.anchor)
    length = jnp.where(item.final, position + count, item.start + item.count)
    length = jnp.where(item.count > 0, length, requests.length)
    requests = dataclasses.replace(
        requests,
        length=length,
        anchor=anchor,
        active=jnp.where(item.final, alive, requests.active),
        emitted=requests.emitted + count,
    )

    rested = None
    if drafter:
        requests = dataclasses.replace(
            requests, num_drafts=jnp.where(alive, jnp.clip(max_len - 2 - length, 0, gamma), requests.num_drafts)
        )
        with jax.named_scope("schedule"):
            plan = schedule.plan(requests, count, stale, axis) if schedule else None
        keep = jnp.where(item.final, base + count, item.count)
        with jax.named_scope("draft"):
            draft_cache = drafter.write_context(
                context, rows, rows.from_lanes(jnp.arange(rows.width) < keep[:, None]) & rows.valid, draft_cache
            )
            draft_noise = noise.coupled_gumbel if verify == COUPLED else noise.draft_gumbel
            old = Proposal(requests.drafts, requests.draft_logits, requests.confidence)
            inputs = (anchor, length, alive, requests.sampling, draft_cache, draft_noise)
            new = draft_unless(plan and plan.rest, drafter, inputs, old)
        requests = dataclasses.replace(requests, drafts=new.tokens, draft_logits=new.logits, confidence=new.confidence)
        if schedule:
            with jax.named_scope("schedule"):
                requests, stale = schedule.step(requests, count, stale, axis, plan)
        rested = plan and jnp.where(plan.rest & alive, 1, 0)
    emission = Emission(
        token=tokens,
        count=count,
        accepted=jnp.where(item.final, verdict.accepted, 0),
        verified=item.verify,
        reason=reason,
        logprobs=None if logprobs is None else committed_logprobs(by_lane(), tokens, count, logprobs),
        rested=rested,
    )
    return requests, draft_cache, stale, emission


def _at(rows: Rows, x: Float[Array, "B d"], base: Int[Array, "R"], count: int) -> Float[Array, "R count d"]:
    """`count` rows of every slot from index `base` on, within the slot."""
    index = jnp.clip(base[:, None] + jnp.arange(count), 0, rows.width - 1)
    lanes = rows.to_lanes(x)
    return lanes[jnp.arange(lanes.shape[0])[:, None], index]


def rounds(
    target: Target,
    drafter: Drafter | None,
    state: DecodeState,
    max_len: int,
    count: int,
    logprobs: int | None = None,
    schedule: Schedule | None = None,
    axis: str | None = None,
    verify: str = REJECTION,
) -> tuple[DecodeState, Emission]:
    """`count` decoding rounds in one loop; the emissions are stacked on a new leading axis. Arguments as for `tick`."""
    gamma = drafter.block_size if drafter else 0

    def step(state: DecodeState, _: None) -> tuple[DecodeState, Emission]:
        item = decode_item(state.requests, gamma)
        return tick(target, drafter, state, item, max_len, logprobs, schedule, axis, verify)

    return jax.lax.scan(step, state, None, length=count)


def _commit(
    requests: Requests,
    accepted: Int[Array, "R"],
    token: Int[Array, "R"],
    position: Int[Array, "R"],
    final: Bool[Array, "R"],
    gamma: int,
    max_len: int,
) -> tuple[Int[Array, "R gamma+1"], Int[Array, "R"], Int[Array, "R"]]:
    """Tokens, how many of them are committed, and the finish reason.

    The shortest of: accepted + 1; up to and including the first stop token; tokens left to the request; context left.
    """
    index = jnp.arange(gamma + 1)
    drafts = jnp.pad(requests.drafts[:, :gamma], ((0, 0), (0, 1)))
    tokens = jnp.where(index == accepted[:, None], token[:, None], drafts)
    stops = jnp.any(tokens[:, :, None] == requests.stop[:, None, :], axis=-1)
    offered = accepted + 1
    first_stop = jnp.min(jnp.where(stops & (index < offered[:, None]), index, gamma + 1), axis=1) + 1
    left = requests.max_tokens - requests.emitted
    room = max_len - 1 - position
    count = jnp.minimum(jnp.minimum(offered, first_stop), jnp.minimum(left, room))
    reason = jnp.where(count == room, CONTEXT, RUNNING)
    reason = jnp.where(count == left, LENGTH, reason)
    reason = jnp.where(count == first_stop, STOP, reason)
    count = jnp.where(final, count, 0)
    return jnp.where(index < count[:, None], tokens, 0), count, jnp.where(final, reason, RUNNING)
