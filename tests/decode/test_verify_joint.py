"""Several positions and rounds: the joint distribution of the tokens is the target's, at every verify length."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.decode.verify import speculative_sample
from helpers.sampling_reference import softmax
from helpers.speculation import MANY_ROWS, draw_draft, state
from helpers.statistics import joint_index, markov_joint, matches

N = 10**6
VOCAB, GAMMA = 3, 2
RNG = np.random.default_rng(42)
P_TABLE = RNG.normal(0, 1.2, (VOCAB, VOCAB)).astype(np.float32)
Q_TABLE = np.array(jnp.asarray(RNG.normal(0, 1.2, (GAMMA, VOCAB, VOCAB)), jnp.bfloat16).astype(jnp.float32))


def _decode(sampling, num_drafts, rounds: int):
    """Rounds of drafting and verification over the look-up tables; tokens [R, rounds * (GAMMA + 1)], count [R]."""
    rows = sampling.seed.shape[0]
    lane = jnp.arange(rows)
    anchor, position = jnp.zeros(rows, jnp.int32), jnp.zeros(rows, jnp.int32)
    tokens = jnp.full((rows, rounds * (GAMMA + 1) + 1), -1, jnp.int32)

    def one_round(_, carry):
        tokens, anchor, position = carry
        previous, drafts, q_rows = anchor, [], []
        for j in range(GAMMA):
            q_rows.append(jnp.asarray(Q_TABLE)[j, previous].astype(jnp.bfloat16))
            previous = draw_draft(q_rows[-1], sampling.seed, position, j)
            drafts.append(previous)
        drafts = jnp.stack(drafts, axis=1)
        p_rows = jnp.asarray(P_TABLE)[jnp.concatenate([anchor[:, None], drafts], axis=1)]
        verdict = speculative_sample(p_rows, jnp.stack(q_rows, axis=1), drafts, num_drafts, sampling, position)
        for j in range(GAMMA + 1):
            value = drafts[:, min(j, GAMMA - 1)]
            value = jnp.where(verdict.accepted == j, verdict.token, value)
            column = jnp.where(j <= verdict.accepted, position + j, tokens.shape[1] - 1)
            tokens = tokens.at[lane, column].set(value)
        return tokens, verdict.token, position + verdict.accepted + 1

    tokens, _, position = jax.lax.fori_loop(0, rounds, one_round, (tokens, anchor, position))
    return tokens, position


decode = jax.jit(_decode, static_argnames="rounds", compiler_options=MANY_ROWS)


LONG = pytest.mark.long  # a length alone; the mixed batch holds a third of each


@pytest.mark.parametrize("width", ["mixed", *(pytest.param(width, marks=LONG) for width in (0, 1, 2))])
def test_joint_of_three_tokens_over_rounds(width):
    num_drafts = jnp.arange(N, dtype=jnp.int32) % 3 if width == "mixed" else jnp.full(N, width, jnp.int32)
    tokens, done = decode(state(N), num_drafts, rounds=3)
    assert int(done.min()) >= 3
    joint = markov_joint(lambda prefix: softmax(P_TABLE[prefix[-1] if prefix else 0]), VOCAB, 3)
    verdict = matches(joint_index(np.asarray(tokens[:, :3]), VOCAB), joint)
    assert verdict, verdict


@pytest.mark.long  # one more program; the look-up models check the same through the round
def test_mean_accepted_length_follows_the_tables():
    _, done = decode(state(N), jnp.full(N, GAMMA, jnp.int32), rounds=1)
    expected, mass = 1.0, np.eye(VOCAB)[0]
    for j in range(GAMMA):  # mass of surviving drafts by their last token
        mass = mass @ np.minimum(softmax(P_TABLE), softmax(Q_TABLE[j]))
        expected += mass.sum()
    assert float(done.mean()) == pytest.approx(expected, abs=0.004)
