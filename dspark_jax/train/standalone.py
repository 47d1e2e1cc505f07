"""Training of a standalone drafter against a frozen dense target (paper section 4): the anchors of a sequence packed in one
forward pass, each block seeing the context in front of its anchor and itself.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int

from dspark_jax.decode.rows import padded_rows
from dspark_jax.drafters.dense_block import through_layers
from dspark_jax.drafters.heads import forced_logits
from dspark_jax.drafters.standalone import Standalone
from dspark_jax.models.qwen3 import Keys, Qwen3
from dspark_jax.train.conversations import Conversations
from dspark_jax.train.losses import DraftLosses, draft_losses
from dspark_jax.train.target import TrainState

FROZEN = ("embed_tokens", "lm_head", "d2t")  # the target's, or a table


def moved(path: tuple, _) -> bool:
    """Whether the optimiser moves a parameter of the drafter."""
    return path[0] not in FROZEN


def answer_anchors(key: jax.Array, data: Conversations, count: int) -> Int[Array, "B A"]:
    """`count` positions of every answer but its last token, evenly spread with a random shift; a short answer repeats some."""
    span = data.count - 1 - data.prompt  # at least 1
    shift = jax.random.uniform(key, (data.prompt.shape[0], count))
    return jnp.asarray(data.prompt)[:, None] + ((jnp.arange(count) + shift) * span[:, None] / count).astype(jnp.int32)


def read_target(target: Qwen3, data: Conversations) -> tuple[Float[Array, "B T md"], Float[Array, "B T d"]]:
    """The target's taps and hidden rows (for `logits`) of whole sequences, without gradient."""
    batch, length = data.token.shape
    rows = padded_rows(jnp.asarray(data.token), jnp.zeros((batch,), jnp.int32), jnp.asarray(data.count))
    hidden, taps, _ = target.forward(rows, target.init_cache(batch, length, 1))
    return jax.lax.stop_gradient((taps.reshape(batch, length, -1), hidden.reshape(batch, length, -1)))


def packed_blocks(
    model: Standalone, target: Qwen3, data: Conversations, taps: Float[Array, "B T md"], anchor: Int[Array, "B A"]
) -> Float[Array, "B A gamma d"]:
    """Hidden rows behind the norm, one a draft, of the blocks of all anchors: the same as in decoding."""
    config = model.config
    batch, count = anchor.shape
    length, width = taps.shape[1], config.block_rows
    rows = count * width
    fused = model.context(taps).reshape(batch * length, -1)
    at = jnp.tile(jnp.arange(length), batch)
    place = (anchor[:, :, None] + jnp.arange(width)).reshape(batch, rows)
    first = jnp.take_along_axis(jnp.asarray(data.token), anchor, axis=1)
    ids = jnp.full((batch, count, width), config.mask_token_id, jnp.int32).at[:, :, 0].set(first)
    in_front = jnp.arange(length) < jnp.repeat(anchor, width, axis=1)[:, :, None]
    block = jnp.arange(rows) // width
    seen = []
    for layer in model.layers:
        key, value = (x.reshape(batch, length, *x.shape[1:]).swapaxes(1, 2) for x in layer.self_attn.key_value(fused, at))
        seen.append([Keys(key, value, in_front)])
    x = model.embed(target, ids.reshape(batch, rows))
    x, _ = through_layers(model.layers, x, place, seen, block[:, None] == block)
    return model.norm(x.reshape(batch, count, width, -1)[:, :, width - config.block_size :])


def forced(
    model: Standalone, target: Qwen3, hidden: Float[Array, "N gamma d"], previous: Int[Array, "N gamma"]
) -> tuple[Float32[Array, "N gamma V"], Float32[Array, "N gamma"]]:
    """Logits and confidence logits when draft k follows token `previous[:, k]`."""
    base = model.base_logits(target, hidden)
    return forced_logits(model.markov_head, model.confidence_head, base, hidden, previous)


def objective(
    model: Standalone,
    target: Qwen3,
    data: Conversations,
    anchor: Int[Array, "B A"],
    decay: float,
    weights: tuple[float, float, float],
) -> DraftLosses:
    """The paper's losses of a batch. Rows behind an answer's last token count nowhere."""
    batch, count = anchor.shape
    gamma = model.config.block_size
    taps, hidden = read_target(target, data)
    drafted = packed_blocks(model, target, data, taps, anchor).reshape(batch * count, gamma, -1)
    at = (anchor[:, :, None] + jnp.arange(gamma)).reshape(batch, -1)
    inside = jnp.minimum(at + 1, data.token.shape[1] - 1)
    token = jnp.asarray(data.token)

    def rows(x: Array, index: Int[Array, "B n"]) -> Array:
        found = jnp.take_along_axis(x, index.reshape(*index.shape, *[1] * (x.ndim - 2)), axis=1)
        return found.reshape(batch * count, gamma, *x.shape[2:])

    previous, label = rows(token, jnp.minimum(at, inside)), rows(token, inside)
    logits, confidence = forced(model, target, drafted, previous)
    truth = jax.lax.stop_gradient(target.logits(rows(hidden, jnp.minimum(at, inside))))
    keep: Bool[Array, "N gamma"] = (at + 1 < jnp.asarray(data.count)[:, None]).reshape(batch * count, gamma)
    return draft_losses(logits, truth, confidence, label, keep, decay=decay, weights=weights)


def init_training(
    model: Standalone, optimizer: optax.GradientTransformation
) -> tuple[nnx.GraphDef, TrainState]:
    """Splits the drafter into its static graph and a fresh training state."""
    graph, params, fixed = nnx.split(model, moved, ...)
    return graph, TrainState(params, fixed, optimizer.init(params), jnp.zeros((), jnp.int32))


def training_step(
    target_graph: nnx.GraphDef,
    graph: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    *,
    anchors: int,
    seed: int,
    decay: float = 4.0,
    weights: tuple[float, float, float] = (0.1, 0.9, 1.0),
):
    """(state, target's parameters, conversations) -> (state, losses), jitted with the state donated.

    Conversations that are split over a mesh are trained on data-parallel: the losses are means over all of them.
    """

    def step(state: TrainState, frozen: nnx.State, data: Conversations) -> tuple[TrainState, dict[str, jax.Array]]:
        target = nnx.merge(target_graph, frozen)
        picked = answer_anchors(jax.random.fold_in(jax.random.key(seed), state.step), data, anchors)

        def loss_of(params: nnx.State):
            losses = objective(nnx.merge(graph, params, state.fixed), target, data, picked, decay, weights)
            return losses.total, losses

        (_, losses), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params: Any = optax.apply_updates(state.params, updates)
        metrics = {**losses._asdict(), "loss": losses.total, "grad_norm": optax.tree.norm(grads)}
        return TrainState(params, state.fixed, opt_state, state.step + 1), metrics

    return jax.jit(step, donate_argnums=0)
