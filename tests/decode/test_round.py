"""The decoding round: what a tick commits, what it leaves to the next one, and what a row may not do to another."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.decode import noise
from dspark_jax.decode.round import rounds
from dspark_jax.decode.sampling import SamplingParams
from dspark_jax.decode.state import CONTEXT, LENGTH, RUNNING, STOP, DecodeState, Emission
from dspark_jax.testing import LookupDrafter, LookupTarget
from helpers.sampling_reference import reference_law, softmax
from helpers.statistics import g_test, joint_index
from helpers.ticks import (
    GAMMA,
    MAX_LEN,
    SLOTS,
    VOCAB,
    WIDTH,
    WITHOUT_LIMIT,
    chunk,
    counting,
    counting_drafter,
    decode,
    hosted,
    item_of,
    prefill,
    start,
    step,
    text,
)

# The commit rule.


@dataclass(frozen=True)
class Block:
    """One slot in front of a tick: anchor 2 at `position`, and drafts of which 3, 4, 5 are right."""

    drafts: tuple[int, ...] = (3, 4, 5)
    verify: int = GAMMA
    stop: tuple[int, ...] = ()
    left: int = WITHOUT_LIMIT
    position: int = 6

    def by_single_tokens(self) -> tuple[list[int], int]:
        """What decoding one token after the other commits until the drafts no longer tell the next one, and why it ends."""
        tokens, last = [], 2
        while True:
            last = (last + 1) % VOCAB
            tokens.append(last)
            if last in self.stop:
                return tokens, STOP
            if len(tokens) == self.left:
                return tokens, LENGTH
            if self.position + len(tokens) == MAX_LEN - 1:
                return tokens, CONTEXT
            if len(tokens) > self.verify or self.drafts[len(tokens) - 1] != last:
                return tokens, RUNNING


def tick_over(blocks: list[Block]) -> tuple[DecodeState, Emission]:
    """One tick over the blocks, greedy; 7 tokens were emitted before."""
    target, drafter = counting(), counting_drafter()
    ints = lambda values: np.array([*values, *[0] * (SLOTS - len(blocks))], np.int32)  # noqa: E731
    params = [SamplingParams(max_tokens=7 + b.left, stop_token_ids=b.stop) for b in blocks]
    state = start(target, drafter, params)
    drafts = np.zeros((SLOTS, GAMMA), np.int32)
    cache = np.full((SLOTS, MAX_LEN), -1, np.int32)
    for r, b in enumerate(blocks):
        drafts[r], cache[r, : b.position] = b.drafts, 1
    requests = replace(
        state.requests,
        length=ints(b.position for b in blocks), anchor=ints(2 for _ in blocks), drafts=drafts,
        num_drafts=ints(b.verify for b in blocks), active=ints(1 for _ in blocks).astype(bool),
        emitted=ints(7 for _ in blocks),
    )  # fmt: skip
    state = replace(state, requests=requests, target_cache=cache)
    state, emission = step(target, drafter, state, item_of(requests, gamma=GAMMA), max_len=MAX_LEN)
    return hosted(state), hosted(emission)


RULE = {  # block -> tokens, accepted, reason
    "all accepted, then the bonus": (Block(), [3, 4, 5, 6], 3, RUNNING),
    "first rejected": (Block((9, 4, 5)), [3], 0, RUNNING),
    "second rejected": (Block((3, 9, 5)), [3, 4], 1, RUNNING),
    "stop in an accepted draft": (Block(stop=(4,)), [3, 4], 3, STOP),
    "stop in the first draft": (Block(stop=(3,)), [3], 3, STOP),
    "the first of two stops": (Block(stop=(5, 4)), [3, 4], 3, STOP),
    "stop in the bonus": (Block(stop=(6,)), [3, 4, 5, 6], 3, STOP),
    "stop in the correction": (Block((3, 9, 9), stop=(4,)), [3, 4], 1, STOP),
    "a stop that was rejected is none": (Block((3, 9, 9), stop=(9,)), [3, 4], 1, RUNNING),
    "a stop behind the rejection is none": (Block((9, 4, 5), stop=(4,)), [3], 0, RUNNING),
    "a stop behind the bonus is none": (Block(stop=(7,)), [3, 4, 5, 6], 3, RUNNING),
    "two tokens left": (Block(left=2), [3, 4], 3, LENGTH),
    "one token left": (Block(left=1), [3], 3, LENGTH),
    "exactly the block left": (Block(left=4), [3, 4, 5, 6], 3, LENGTH),
    "one more than the block left": (Block(left=5), [3, 4, 5, 6], 3, RUNNING),
    "fewer accepted than left": (Block((3, 9, 9), left=3), [3, 4], 1, RUNNING),
    "the limit in front of the stop": (Block(stop=(5,), left=2), [3, 4], 3, LENGTH),
    "the stop in front of the limit": (Block(stop=(4,), left=3), [3, 4], 3, STOP),
    "stop and limit at once": (Block(stop=(4,), left=2), [3, 4], 3, STOP),
    "end of the context": (Block(verify=2, position=MAX_LEN - 4), [3, 4, 5], 2, CONTEXT),
    "one position left": (Block(verify=0, position=MAX_LEN - 2), [3], 0, CONTEXT),
    "rejection in front of the context's end": (Block((3, 9, 9), 2, position=MAX_LEN - 4), [3, 4], 1, RUNNING),
    "limit and context at once": (Block(verify=2, left=3, position=MAX_LEN - 4), [3, 4, 5], 2, LENGTH),
    "stop, limit and context at once": (Block((3, 4, 5), 2, (5,), 3, MAX_LEN - 4), [3, 4, 5], 2, STOP),
    "one draft verified": (Block(verify=1), [3, 4], 1, RUNNING),
    "no draft verified": (Block(verify=0), [3], 0, RUNNING),
    "a stop that was not verified is none": (Block((3, 4, 5), 0, stop=(4,)), [3], 0, RUNNING),
}


def check_tick(blocks: list[Block], expected: list[tuple[list[int], int, int]]) -> None:
    state, emission = tick_over(blocks)
    requests = state.requests
    for r, (b, (tokens, accepted, reason)) in enumerate(zip(blocks, expected, strict=True)):
        got = text([emission], r), int(emission.accepted[r]), int(emission.reason[r])
        assert got == (tokens, accepted, reason), b
        n = len(tokens)
        assert emission.verified[r] == b.verify and not emission.token[r, n:].any(), b
        after = requests.length[r], requests.anchor[r], requests.emitted[r], requests.active[r]
        assert after == (b.position + n, tokens[-1], 7 + n, reason == RUNNING), b
        # The drafter's context: anchor and accepted drafts, as far as they were committed.
        assert state.draft_cache.length[r] == b.position + n and state.draft_cache.token[r] == [2, *tokens][n - 1], b
        if reason == RUNNING:
            assert requests.drafts[r].tolist() == [(tokens[-1] + 1 + j) % VOCAB for j in range(GAMMA)]
            assert requests.num_drafts[r] == min(GAMMA, MAX_LEN - 2 - b.position - n), b
    idle = slice(len(blocks), None)
    assert not emission.count[idle].any() and not requests.active[idle].any() and not requests.length[idle].any()


def test_the_commit_rule_case_by_case():
    assert len(RULE) <= SLOTS
    blocks = [case[0] for case in RULE.values()]
    check_tick(blocks, [case[1:] for case in RULE.values()])
    assert [(case[1], case[3]) for case in RULE.values()] == [b.by_single_tokens() for b in blocks]


def random_block(rng: np.random.Generator) -> Block:
    position = MAX_LEN - 1 - int(rng.integers(1, 8))
    drafts = tuple(3 + j if rng.random() < 0.8 else int(rng.integers(VOCAB)) for j in range(GAMMA))
    verify = int(rng.integers(0, min(GAMMA, MAX_LEN - 2 - position) + 1))
    stop = tuple(rng.choice(VOCAB, rng.integers(0, 3), replace=False).tolist())
    return Block(drafts, verify, stop, int(rng.integers(1, 8)), position)


def test_the_commit_rule_is_what_single_tokens_would_give():
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(20):
        blocks = [random_block(rng) for _ in range(SLOTS)]
        expected = []
        for b in blocks:
            tokens, reason = b.by_single_tokens()
            right = [b.drafts[j] == 3 + j for j in range(b.verify)] + [False]
            expected.append((tokens, right.index(False), reason))
            seen.add((len(tokens), reason))
        check_tick(blocks, expected)
    assert seen == {(n, reason) for n in range(1, WIDTH + 1) for reason in (RUNNING, STOP, LENGTH, CONTEXT)}


def test_with_all_verified_drafts_accepted_the_bonus_comes_from_plain_p_at_their_row():
    """Drafts drawn from p itself always survive. The token behind l of them is the one that plain decoding draws there."""
    target, drafter = LookupTarget.random(VOCAB, order=2, seed=1), LookupDrafter.random(VOCAB, GAMMA)
    rng = np.random.default_rng(0)
    params = [SamplingParams(temperature=1.0, seed=r, max_tokens=WITHOUT_LIMIT) for r in range(SLOTS)]
    state = start(target, drafter, params)
    verify = np.arange(SLOTS, dtype=np.int32) % WIDTH
    line = rng.integers(0, VOCAB, (SLOTS, 2 + GAMMA)).astype(np.int32)  # the token in front, the anchor, the drafts
    cache = np.full((SLOTS, MAX_LEN), -1, np.int32)
    cache[:, 4] = line[:, 0]
    table = np.asarray(target.table)
    q = np.stack([table[line[:, j], line[:, j + 1]] for j in range(GAMMA)], axis=1)
    requests = replace(
        state.requests,
        length=np.full(SLOTS, 5, np.int32), anchor=line[:, 1], drafts=line[:, 2:], num_drafts=verify,
        draft_logits=jnp.asarray(q, jnp.bfloat16), active=np.ones(SLOTS, bool),
    )  # fmt: skip
    state = replace(state, requests=requests, target_cache=cache)
    _, emission = step(target, drafter, state, item_of(requests, gamma=GAMMA), max_len=MAX_LEN)
    np.testing.assert_array_equal(emission.accepted, verify)
    np.testing.assert_array_equal(emission.count, verify + 1)
    draw = jax.jit(noise.gumbel, static_argnums=(2, 3))
    gumbel = draw(np.arange(SLOTS, dtype=np.uint32), 6 + verify, noise.BONUS, VOCAB)
    p = table[line[np.arange(SLOTS), verify], line[np.arange(SLOTS), verify + 1]]
    bonus = np.asarray(emission.token)[np.arange(SLOTS), verify]
    np.testing.assert_array_equal(bonus, (np.log(softmax(p)) + gumbel).argmax(-1))
    assert all(len(set(bonus[verify == n].tolist())) > 2 for n in range(WIDTH))


def test_the_verify_length_shrinks_near_the_context_end_and_nothing_is_written_past_it():
    target, drafter = counting(), counting_drafter()
    prompts = [[(r + i) % VOCAB for i in range(1 + r % WIDTH)] for r in range(SLOTS)]
    state = start(target, drafter, [SamplingParams(max_tokens=WITHOUT_LIMIT)] * SLOTS)
    state, first = prefill(target, drafter, state, prompts)
    state, made = decode(target, drafter, state, 7)
    made.insert(0, hosted(first))
    assert not np.asarray(state.requests.active).any()
    for r, prompt in enumerate(prompts):
        whole = prompt + text(made, r)
        assert whole == [(r + i) % VOCAB for i in range(MAX_LEN)]
        reasons = [int(e.reason[r]) for e in made if e.count[r]]
        assert reasons == [RUNNING] * (len(reasons) - 1) + [CONTEXT]
        verified = [int(e.verified[r]) for e in made if e.count[r]][1:]
        full, rest = divmod(MAX_LEN - 1 - len(prompt), WIDTH)  # positions behind the first token
        assert verified == [GAMMA] * full + [rest - 1] * (rest > 0)
        assert np.asarray(state.target_cache)[r].tolist() == [*whole[:-1], -1]
    assert {int(e.verified[r]) for e in made for r in range(SLOTS) if e.reason[r] == CONTEXT} == {0, 1, 2, 3}


# Prompts.


def babble(params: list[SamplingParams] | None = None, prompts=None):
    """A random target and drafter, requests that differ in everything, and their state and emission behind the prompt."""
    target, drafter = LookupTarget.random(VOCAB, order=2, seed=5), LookupDrafter.random(VOCAB, GAMMA, seed=6)
    state = start(target, drafter, params or PARAMS)
    state, first = prefill(target, drafter, state, prompts or PROMPTS)
    return target, drafter, state, [hosted(first)]


_RNG = np.random.default_rng(3)
PROMPTS = [_RNG.integers(0, VOCAB, 1 + r % WIDTH).tolist() for r in range(SLOTS)]
PARAMS = [
    SamplingParams((0.0, 0.7, 1.0, 1.4)[r // 4 % 4], (0, 5)[r % 2], (1.0, 0.9)[r // 2 % 2], seed=r, max_tokens=WITHOUT_LIMIT)
    for r in range(SLOTS)
]


def test_prompts_may_come_in_chunks_while_other_slots_wait_or_decode():
    """Even slots begin at once. Odd ones get their prompt in two chunks: the even ones wait for the first and decode
    beside the second."""
    prompts = [p * 2 if len(p) < 3 else p for p in PROMPTS]
    target, drafter, state, expected = babble(prompts=prompts)
    _, more = decode(target, drafter, state, 4)
    expected += more

    odd = np.arange(SLOTS) % 2 == 1
    state = start(target, drafter, PARAMS)
    state, first = prefill(target, drafter, state, [[] if o else p for o, p in zip(odd, prompts, strict=True)])
    before = hosted(state)
    fill = chunk([p[:1] if o else [] for o, p in zip(odd, prompts, strict=True)], [0] * SLOTS, [False] * SLOTS)
    state, emission = step(target, drafter, state, fill, max_len=MAX_LEN)
    same_rows(state, before, ~odd)
    # A chunk that is not the last one only fills the state.
    assert not emission.count.any() and not emission.reason.any()
    assert (np.asarray(state.requests.length)[odd] == 1).all() and not np.asarray(state.requests.active)[odd].any()

    fill = chunk([p[1:] if o else [] for o, p in zip(odd, prompts, strict=True)], [1] * SLOTS, [True] * SLOTS)
    pick = lambda a, b: np.where(odd.reshape(-1, *[1] * (b.ndim - 1)), a, b)  # noqa: E731
    item = jax.tree.map(pick, fill, hosted(item_of(state.requests, gamma=GAMMA)))
    state, emission = step(target, drafter, state, item, max_len=MAX_LEN)
    _, more = decode(target, drafter, state, 4)
    made = [hosted(first), hosted(emission), *more]
    for r in range(SLOTS):
        line = text(expected, r)
        assert text(made, r)[: len(line)] == line and len(line) >= 5


def test_b32_b33_the_drafter_draws_at_each_requests_own_settings():
    """Temperature 0: the argmax, one-hot. Otherwise the table at the request's temperature, top-k and top-p."""
    _, drafter, state, _ = babble()
    requests = hosted(state.requests)
    assert requests.active.all()
    table = np.asarray(drafter.table)
    previous = np.concatenate([requests.anchor[:, None], requests.drafts[:, :-1]], axis=1)
    for r, own in enumerate(PARAMS):
        for j in range(GAMMA):
            law = reference_law(table[j, previous[r, j]], own.temperature, own.top_k, own.top_p)
            stored = softmax(requests.draft_logits[r, j].astype(np.float32))
            np.testing.assert_array_equal(stored > 0, law > 0)
            np.testing.assert_allclose(stored, law, atol=0.01)  # bf16
            assert law[requests.drafts[r, j]] > 0


# What rows may not do to each other.


def same_rows(a, b, rows: Any = slice(None), order=None) -> None:
    """Every leaf has the slots first; `order[r]` is where row r of `a` lies in `b`."""
    other = np.arange(SLOTS)[rows] if order is None else np.asarray(order)[rows]

    def compare(x, y):
        x, y = np.asarray(x)[rows], np.asarray(y)[other]
        if x.dtype == jnp.bfloat16:  # numpy knows no equality of its NaN
            x, y = x.astype(np.float32), y.astype(np.float32)
        np.testing.assert_array_equal(x, y)

    jax.tree.map(compare, a, b)


def poison(state: DecodeState, rows: np.ndarray) -> DecodeState:
    """Garbage in everything that the slots hold, NaN where it is a number; they stay inactive."""
    requests = hosted(state.requests)

    def spoil(x: np.ndarray) -> np.ndarray:
        bad = x.copy()
        bad[rows] = np.nan if jnp.issubdtype(x.dtype, jnp.floating) else 10**6
        return bad

    spoiled = jax.tree.map(spoil, replace(requests, active=np.zeros(SLOTS, np.int32)))
    cache = np.array(state.target_cache)
    cache[rows] = -1  # unwritten positions give NaN hidden rows
    return replace(state, requests=replace(spoiled, active=requests.active), target_cache=cache)


def test_a_finished_row_changes_nothing_for_the_others():
    target, drafter, whole, first = babble()
    whole, expected = decode(target, drafter, whole, 4)
    others = np.arange(SLOTS) % 3 != 0
    # Every third request ends at once or in one of the next rounds.
    short = [p if o else SamplingParams(1.0, 4, 0.8, seed=p.seed, max_tokens=1 + r % 5)
             for r, (p, o) in enumerate(zip(PARAMS, others, strict=True))]  # fmt: skip
    target, drafter, state, made = babble(short)
    for t in range(4):
        ended = ~np.asarray(state.requests.active)
        assert not ended[others].any()
        state = poison(state, ended)
        before = hosted((state.requests, state.target_cache, state.draft_cache))
        state, more = decode(target, drafter, state, 1)
        same_rows(more[0], expected[t], others)
        # The row itself: nothing is emitted, nothing moves.
        assert not more[0].count[ended].any() and not more[0].reason[ended].any()
        same_rows((state.requests, state.target_cache, state.draft_cache), before, ended)
        made += more
    same_rows(state, whole, others)
    same_rows(made[0], first[0], others)
    assert ended[~others].all() and {len(text(made, r)) for r in range(0, SLOTS, 3)} == {1, 2, 3, 4, 5}


def test_the_order_of_the_batch_changes_nothing():
    target, drafter, whole, first = babble()
    whole, expected = decode(target, drafter, whole, 3)
    place = np.random.default_rng(1).permutation(SLOTS)  # row r goes to place[r]
    back = np.argsort(place)
    target, drafter, state, moved = babble([PARAMS[r] for r in back], [PROMPTS[r] for r in back])
    state, more = decode(target, drafter, state, 3)
    same_rows((whole, *first, *expected), (state, *moved, *more), order=place)


def test_rounds_in_one_program_are_ticks_one_by_one():
    target, drafter, state, _ = babble()
    one_by_one, made = decode(target, drafter, state, 3)
    program = jax.jit(rounds, static_argnames=("max_len", "count"))
    together, stacked = program(target, drafter, state, max_len=MAX_LEN, count=3)
    same_rows(together, one_by_one)
    for t, emission in enumerate(made):
        same_rows(jax.tree.map(lambda x, t=t: x[t], stacked), emission)


# Noise.


def test_draft_noise_is_fresh_every_round():
    """A position that is drafted again after a rejection gets another draw: noise by anchor and index, not by position."""
    target = counting()
    drafter = LookupDrafter(jnp.zeros((GAMMA, VOCAB, VOCAB)), jnp.zeros((GAMMA, VOCAB)))  # the draft is the noise alone
    params = [SamplingParams(temperature=1.0, seed=100 + r, max_tokens=WITHOUT_LIMIT) for r in range(SLOTS)]
    state, _ = prefill(target, drafter, start(target, drafter, params), [[r % VOCAB] for r in range(SLOTS)])
    draw = jax.jit(lambda seed, at: jnp.stack([noise.draft_gumbel(seed, at, j, VOCAB).argmax(-1) for j in range(GAMMA)], 1))
    pairs = []
    for _ in range(12):
        before = hosted(state.requests)
        live = before.active
        np.testing.assert_array_equal(before.drafts[live], np.asarray(draw(before.sampling.seed, before.length))[live])
        state, (emission,) = decode(target, drafter, state, 1)
        after = hosted(state.requests)
        # One token further, draft j + 1 of the last round and draft j of this one stand at the same position.
        again = live & after.active & (emission.count == 1)
        pairs += [np.stack([before.drafts[again, j + 1], after.drafts[again, j]], 1) for j in range(GAMMA - 1)]
    pairs = np.concatenate(pairs)
    assert len(pairs) > 400
    assert g_test(np.bincount(joint_index(pairs, VOCAB), minlength=VOCAB**2), np.full(VOCAB**2, 1 / VOCAB**2)) > 1e-4
    assert 0.03 < (pairs[:, 0] == pairs[:, 1]).mean() < 0.16  # 1 / 12 by chance, 1 with noise by position
