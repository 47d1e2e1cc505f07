"""Random numbers of decoding: each draw is a pure function of (seed, purpose, position).

Nothing depends on the batch: not on its size, its order, or its other rows. A purpose of its own for every use keeps
the streams apart; sharing noise between the draft and the residual draw would bias the output (the residual would
favour again what the draft favoured). Coupled verification has no residual, and shares noise on purpose: a stream of
its own, from which draft and target both choose the token at a position.
"""

from collections.abc import Callable
from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

ACCEPT: Final = 1
RESIDUAL: Final = 2
BONUS: Final = 3
DRAFT: Final = 4
COUPLED: Final = 5

# (seed [R], anchor position [R], index in the block, vocabulary) -> Gumbel noise [R, V] of one draft of every row.
DraftNoise = Callable[[Array, Array, int | Array, int], Array]


def _keys(seed: UInt32[Array, "*n"], purpose: int | Int[Array, "*n"]) -> Array:
    """Threefry keys [*n]: the two key words are the purpose and the seed themselves."""
    seed = jnp.asarray(seed, jnp.uint32)
    words = jnp.stack([jnp.broadcast_to(jnp.asarray(purpose).astype(jnp.uint32), seed.shape), seed], axis=-1)
    return jax.random.wrap_key_data(words, impl="threefry2x32")


def _fold(keys: Array, data: Array) -> Array:
    """`fold_in` element by element over equal shapes."""
    flat = jax.vmap(jax.random.fold_in)(keys.reshape(-1), data.reshape(-1).astype(jnp.uint32))
    return flat.reshape(keys.shape)


def _open_unit(bits: UInt32[Array, "*n"]) -> Float[Array, "*n"]:
    """Uniform in (0, 1), both ends excluded; full relative precision near 0 (2**-33 is the least value)."""
    return jnp.minimum((bits.astype(jnp.float32) + 0.5) * jnp.float32(2.0**-32), jnp.float32(1 - 2.0**-24))


def _gumbel(keys: Array, vocab: int) -> Float[Array, "R V"]:
    bits = jax.vmap(lambda key: jax.random.bits(key, (vocab,), jnp.uint32))(keys)
    # Large Gumbel values, which decide, come from small uniforms, where the precision is.
    return -jnp.log(-jnp.log1p(-_open_unit(bits)))


def uniform(
    seed: UInt32[Array, "R"], position: Int[Array, "R *more"], purpose: int | Int[Array, "R"]
) -> Float[Array, "R *more"]:
    """Uniform numbers in (0, 1), one for each absolute `position` of each row."""
    shape = seed.shape + (1,) * (position.ndim - 1)
    keys = jnp.broadcast_to(_keys(seed, purpose).reshape(shape), position.shape)
    flat = jax.vmap(lambda key: jax.random.bits(key, (), jnp.uint32))(_fold(keys, position).reshape(-1))
    return _open_unit(flat).reshape(position.shape)


def gumbel(
    seed: UInt32[Array, "R"], position: Int[Array, "R"], purpose: int | Int[Array, "R"], vocab: int
) -> Float[Array, "R V"]:
    """Standard Gumbel noise over the vocabulary for the token at absolute `position`; `purpose` may differ by row."""
    return _gumbel(_fold(_keys(seed, purpose), position), vocab)


def draft_gumbel(
    seed: UInt32[Array, "R"], anchor_position: Int[Array, "R"], index: int | Array, vocab: int
) -> Float[Array, "R V"]:
    """Gumbel noise for draft `index` (0-based) of the block whose anchor is at `anchor_position`."""
    keys = _fold(_keys(seed, DRAFT), anchor_position)
    return _gumbel(_fold(keys, jnp.broadcast_to(jnp.asarray(index), anchor_position.shape)), vocab)


def coupled_gumbel(
    seed: UInt32[Array, "R"], anchor_position: Int[Array, "R"], index: int | Array, vocab: int
) -> Float[Array, "R V"]:
    """Gumbel noise for the token at absolute position `anchor_position + 1 + index`, for draft and target alike."""
    return gumbel(seed, anchor_position + 1 + index, COUPLED, vocab)
