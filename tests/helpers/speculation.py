"""Small pieces that the speculative-sampling tests share: sampling state, proposal laws, drafts."""

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.decode import noise
from dspark_jax.decode.sampling import SamplingState
from helpers.sampling_reference import softmax

# Compiler options of programs over very many rows: they run for longer than LLVM's optimisations, which the suite does
# without, take.
MANY_ROWS = {"xla_backend_optimization_level": 1}


def state(rows: int, temperature=1.0, top_k=0, top_p=1.0, first_seed=0) -> SamplingState:
    """The same parameters in every row, a seed of its own for each."""
    full = lambda value, dtype: jnp.full(rows, value, dtype)  # noqa: E731
    seed = jnp.arange(rows, dtype=jnp.uint32) + jnp.uint32(first_seed)
    return SamplingState(full(temperature, jnp.float32), full(top_k, jnp.int32), full(top_p, jnp.float32), seed)


def bf16_law(logits: np.ndarray) -> np.ndarray:
    """What a drafter that stores `logits` in bf16 really samples from."""
    return softmax(np.asarray(jnp.asarray(logits, jnp.bfloat16).astype(jnp.float32)))


def tile(x, rows: int) -> jax.Array:
    return jnp.broadcast_to(jnp.asarray(x), (rows, *np.shape(x)))


def draw_draft(q_logits, seed, anchor, index: int = 0):
    """One draft for each row from bf16 logits [R, V], as a drafter draws it."""
    gumbel = noise.draft_gumbel(seed, anchor, index, q_logits.shape[-1])
    return jnp.argmax(q_logits.astype(jnp.float32) + gumbel, axis=-1).astype(jnp.int32)
