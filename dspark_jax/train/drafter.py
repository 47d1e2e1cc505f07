"""Training of DSpark stages against a frozen target (paper section 4): many anchors of a sequence in one forward
pass.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int

from dspark_jax.drafters.dspark import DSpark
from dspark_jax.models.deepseek_v4 import DeepseekV4
from dspark_jax.train.losses import DraftLosses, draft_losses
from dspark_jax.train.target import TrainState, balance, trainable


class Anchors(NamedTuple):
    """Sampled anchors: positions [B, A], and whether the block behind each stays inside its document and sequence."""

    position: Int[Array, "B A"]
    keep: Bool[Array, "B A"]


def sample_anchors(key: jax.Array, tokens: Int[Array, "B T1"], count: int, gamma: int, bos: int) -> Anchors:
    """`count` positions a sequence, evenly spread with a random shift; the gamma tokens behind one must exist and
    hold no bos.
    """
    batch, length = tokens.shape
    span = length - gamma
    shift = jax.random.uniform(key, (batch, count))
    position = ((jnp.arange(count) + shift) * span / count).astype(jnp.int32)
    behind = tokens[jnp.arange(batch)[:, None, None], position[:, :, None] + 1 + jnp.arange(gamma)]
    return Anchors(position, ~jnp.any(behind == bos, axis=-1))


def packed_blocks(
    target: DeepseekV4, stages: DSpark, tokens: Int[Array, "B T1"], taps: Float[Array, "B T md"], anchors: Anchors
) -> tuple[Float32[Array, "N gamma V"], Float32[Array, "N gamma"], Float[Array, "N gamma d"], tuple]:
    """Teacher-forced draft logits, confidence logits, hidden rows and router statistics of all anchors, N = B * A.

    A block reads the context keys of the `window` positions in front of its anchor, gathered from the sequence's
    keys, and its own rows: the same set as in decoding, for every anchor at once.
    """
    batch, count = anchors.position.shape
    length, gamma, window = taps.shape[1], stages.draft.block_size, stages.config.sliding_window
    position = anchors.position.reshape(-1)
    row = jnp.repeat(jnp.arange(batch), count)
    at = jnp.broadcast_to(jnp.arange(length), (batch, length)).reshape(-1)
    keys = stages.context_kv(taps.reshape(batch * length, -1), at)
    source = position[:, None] - window + jnp.arange(window)
    visible = source >= 0
    flat = row[:, None] * length + jnp.maximum(source, 0)
    history = [jnp.where(visible[..., None], k[flat], 0) for k in keys]
    anchor = tokens[row, position]
    hidden, routed = stages.block(target, anchor, position, anchors.keep.reshape(-1), history, visible)
    previous = tokens[row[:, None], position[:, None] + jnp.arange(gamma)]
    logits, confidence = stages.forced(target, hidden, previous)
    return logits, confidence, hidden, tuple(choice.aux() for choice in routed)


def draft_objective(
    target: DeepseekV4, stages: DSpark, tokens: Int[Array, "B T1"], anchors: Anchors
) -> tuple[DraftLosses, tuple]:
    """The paper's losses of a batch; gradients reach the stages only (embedding, head and target are frozen)."""
    out = target.sequence(tokens[:, :-1])
    taps, hidden = jax.lax.stop_gradient((out.taps, out.hidden))
    batch, count = anchors.position.shape
    gamma = stages.draft.block_size
    logits, confidence, _, moe = packed_blocks(target, stages, tokens, taps, anchors)
    row = jnp.repeat(jnp.arange(batch), count)
    at = anchors.position.reshape(-1)[:, None] + jnp.arange(gamma)
    truth = jax.lax.stop_gradient(target.logits(hidden[row[:, None], at]))
    label = tokens[row[:, None], at + 1]
    return draft_losses(logits, truth, confidence, label, anchors.keep.reshape(-1)), moe


def init_drafter(stages: DSpark, optimizer: optax.GradientTransformation) -> tuple[nnx.GraphDef, TrainState]:
    """Splits the stages into their static graph and a fresh training state."""
    graph, params, fixed = nnx.split(stages, trainable, ...)
    return graph, TrainState(params, fixed, optimizer.init(params), jnp.zeros((), jnp.int32))


def drafter_step(
    target_graph: nnx.GraphDef,
    graph: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    *,
    anchors: int,
    bos: int,
    seed: int,
    bias_rate: float = 1e-3,
):
    """(state, target params, tokens [B, T+1]) -> (state, losses), jitted with the state donated."""

    def step(
        state: TrainState, frozen: nnx.State, tokens: Int[Array, "B T1"]
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        target = nnx.merge(target_graph, frozen)
        key = jax.random.fold_in(jax.random.key(seed), state.step)

        def loss_of(params: nnx.State):
            stages = nnx.merge(graph, params, state.fixed)
            picked = sample_anchors(key, tokens, anchors, stages.draft.block_size, bos)
            losses, moe = draft_objective(target, stages, tokens, picked)
            return losses.total, (losses, moe)

        (_, (losses, moe)), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params: Any = optax.apply_updates(state.params, updates)
        metrics = {**losses._asdict(), "loss": losses.total, "grad_norm": optax.tree.norm(grads)}
        return TrainState(params, balance(state.fixed, moe, bias_rate), opt_state, state.step + 1), metrics

    return jax.jit(step, donate_argnums=0)
