"""Manifold-constrained hyper-connections in plain jnp (DeepSeek-V4 reference inference code; all coefficients fp32).

A token carries `n` residual streams. A sublayer reads one weighted sum of them (`collapse`) and its output is added
back to every stream beside a doubly stochastic mixture of the old ones (`expand`). The three sets of weights come
from the streams themselves (`coefficients`).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32


def _mix(streams: Float[Array, "B n d"], fn: Float32[Array, "nd m"], norm_eps: float) -> Float32[Array, "B m"]:
    flat = streams.reshape(streams.shape[0], -1).astype(jnp.float32)
    # The data of fn is fp32, so this product must not run in TF32 or bf16.
    mixed = jnp.matmul(flat, fn, precision=jax.lax.Precision.HIGHEST)
    return mixed * jax.lax.rsqrt(jnp.mean(jnp.square(flat), axis=-1, keepdims=True) + norm_eps)


def coefficients(
    streams: Float[Array, "B n d"],
    fn: Float32[Array, "nd m"],
    base: Float32[Array, "m"],
    scale: Float32[Array, "3"],
    *,
    iters: int,
    eps: float,
    norm_eps: float,
) -> tuple[Float32[Array, "B n"], Float32[Array, "B n"], Float32[Array, "B n n"]]:
    """Weights (pre [B, n], post [B, n], comb [B, n, n]) of one sublayer; m = (2 + n) n.

    `comb` is softmax over its last axis made doubly stochastic by `iters` Sinkhorn steps, columns first, with `eps`
    in every denominator. The steps scale rows and columns by two vectors, which is the same map as dividing the
    matrix each time.
    """
    n = streams.shape[1]
    mixed = _mix(streams, fn, norm_eps)
    pre = jax.nn.sigmoid(mixed[:, :n] * scale[0] + base[:n]) + eps
    post = 2 * jax.nn.sigmoid(mixed[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    comb = (mixed[:, 2 * n :] * scale[2] + base[2 * n :]).reshape(-1, n, n)
    return pre, post, _sinkhorn(jax.nn.softmax(comb, axis=-1) + eps, iters, eps)


def _sinkhorn(matrix: Float32[Array, "B n n"], iters: int, eps: float) -> Float32[Array, "B n n"]:
    # Rows of the batch last: the sums then run over short leading axes and vectorise.
    m = matrix.transpose(1, 2, 0)

    def step(_: int, scales: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        row, column = scales
        row = row / (row * jnp.sum(m * column[None], axis=1) + eps)
        return row, column / (column * jnp.sum(m * row[:, None], axis=0) + eps)

    start = (jnp.ones(m.shape[1:], m.dtype), 1 / (jnp.sum(m, axis=0) + eps))
    row, column = jax.lax.fori_loop(0, iters - 1, step, start)
    return (m * row[:, None] * column[None]).transpose(2, 0, 1)


def collapse(streams: Float[Array, "B n d"], pre: Float32[Array, "B n"]) -> Float[Array, "B d"]:
    """The sublayer's input: the streams summed with weights `pre`, in fp32, rounded once."""
    return jnp.sum(pre[:, :, None] * streams.astype(jnp.float32), axis=1).astype(streams.dtype)


def pre(
    streams: Float[Array, "B n d"],
    fn: Float32[Array, "nd m"],
    base: Float32[Array, "m"],
    scale: Float32[Array, "3"],
    *,
    iters: int,
    eps: float,
    norm_eps: float,
) -> tuple[Float[Array, "B d"], Float32[Array, "B n"], Float32[Array, "B n n"]]:
    """What goes in front of a sublayer: its input (`collapse`), and the weights post and comb of `expand`."""
    weights, post, comb = coefficients(streams, fn, base, scale, iters=iters, eps=eps, norm_eps=norm_eps)
    return collapse(streams, weights), post, comb


def expand(
    streams: Float[Array, "B n d"],
    output: Float[Array, "B d"],
    post: Float32[Array, "B n"],
    comb: Float32[Array, "B n n"],
) -> Float[Array, "B n d"]:
    """New streams: `post[k] * output + sum_j comb[j, k] * streams[j]`. The sum runs over the first index of `comb`."""
    old = streams.astype(jnp.float32)
    mixed = sum(comb[:, j, :, None] * old[:, j, None, :] for j in range(streams.shape[1]))
    return (post[:, :, None] * output.astype(jnp.float32)[:, None, :] + mixed).astype(streams.dtype)


def collapse_head(
    streams: Float[Array, "B n d"],
    fn: Float32[Array, "nd n"],
    base: Float32[Array, "n"],
    scale: Float32[Array, "1"],
    *,
    eps: float,
    norm_eps: float,
) -> Float[Array, "B d"]:
    """The streams' weighted sum in front of the output head."""
    pre = jax.nn.sigmoid(_mix(streams, fn, norm_eps) * scale + base) + eps
    return collapse(streams, pre)
