"""The draft head against a loop in float64 written from the paper's equations (4 and 5), token by token."""

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.decode.sampling import processed_logits
from dspark_kernels import draft_head
from dspark_kernels.draft_head import reference

ROWS, GAMMA, VOCAB, RANK = 4, 3, 40, 6
RNG = np.random.default_rng(5)
BASE = RNG.normal(size=(ROWS, GAMMA, VOCAB)).astype(np.float32)
ANCHOR = RNG.integers(0, VOCAB, ROWS).astype(np.int32)
W1, W2 = (RNG.normal(size=shape).astype(np.float32) for shape in ((VOCAB, RANK), (RANK, VOCAB)))
TEMPERATURE = np.array([0, 1, 0.5, 2], np.float32)
NOISE = RNG.gumbel(size=(GAMMA, ROWS, VOCAB)).astype(np.float32)


def transcription(row: int, temperature: float):
    """Tokens and logits (scaled, not rounded) of one row; greedy logits are the raw ones."""
    token, tokens, kept = ANCHOR[row], [], []
    for k in range(GAMMA):
        logits = BASE[row, k] + W1[token].astype(np.float64) @ W2
        if temperature:
            logits = (logits - logits.max()) / temperature
            token = (np.asarray(jnp.asarray(logits, jnp.bfloat16), np.float64) + NOISE[k, row]).argmax()
        else:
            token = logits.argmax()
        tokens.append(token)
        kept.append(logits)
    return tokens, np.stack(kept)


def test_tokens_and_logits_follow_the_equations():
    run = jax.jit(draft_head.draft)
    for arguments in ((), (TEMPERATURE, list(NOISE))):
        tokens, logits = (np.asarray(x) for x in run(BASE, ANCHOR, W1, W2, *arguments))
        assert logits.dtype == jnp.bfloat16
        for row, temperature in enumerate(TEMPERATURE if arguments else np.zeros(ROWS)):
            expected, scaled = transcription(row, temperature)
            np.testing.assert_array_equal(tokens[row], expected)
            if temperature:
                np.testing.assert_allclose(logits[row].astype(np.float64), scaled, rtol=2**-7, atol=1e-6)
            else:
                hot = np.arange(VOCAB) == tokens[row][:, None]
                np.testing.assert_array_equal(logits[row].astype(np.float32), np.where(hot, 0, -np.inf))


def test_processed_is_the_decoders_rule_without_top_k_and_top_p():
    logits = RNG.normal(0, 20, (6, VOCAB)).astype(np.float32)
    logits[1, 5:] = -np.inf
    logits[2] = -np.inf
    logits[3] = 1.5
    temperature = np.array([0, 0.7, 1, 1e-30, 1.3, 0.01], np.float32)
    whole = (np.zeros(6, np.int32), np.ones(6, np.float32))
    expected = jax.jit(processed_logits)(logits, temperature, *whole).astype(jnp.bfloat16)
    np.testing.assert_array_equal(jax.jit(reference.processed)(logits, temperature), expected)
