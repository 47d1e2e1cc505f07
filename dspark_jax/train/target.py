"""Pre-training of a target: next-token loss, the indexer's own loss, and balanced experts."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx, struct
from jaxtyping import Array, Float32, Int

from dspark_jax.models.attention import Select
from dspark_jax.models.deepseek_v4 import DeepseekV4
from dspark_jax.train.balance import load_spread, update_bias
from dspark_jax.train.losses import indexer_loss, next_token_loss

Metrics = dict[str, Float32[Array, ""]]
Run = Callable[..., tuple["TrainState", Metrics]]


@dataclass(frozen=True)
class TargetRules:
    """Weights and rates besides the optimiser's. Up to step `dense_steps` queries see every compressed entry."""

    dense_steps: int = 500
    indexer_weight: float = 0.1
    bias_rate: float = 1e-3


@struct.dataclass
class TrainState:
    """Trainable parameters, the ones set by rules (router bias, hash tables), optimiser state and step."""

    params: nnx.State
    fixed: nnx.State
    opt_state: optax.OptState
    step: Int[Array, ""]


def trainable(path: tuple, _) -> bool:
    """Whether the optimiser moves a parameter: not the hash tables, not the router's selection bias."""
    return path[-1] != "tid2eid" and tuple(path[-2:]) != ("gate", "bias")


def init_target(model: DeepseekV4, optimizer: optax.GradientTransformation) -> tuple[nnx.GraphDef, TrainState]:
    """Splits a model into its static graph and a fresh training state."""
    graph, params, fixed = nnx.split(model, trainable, ...)
    return graph, TrainState(params, fixed, optimizer.init(params), jnp.zeros((), jnp.int32))


class TargetStep:
    """(state, tokens [B, T+1], step) -> (state, metrics), jitted with the state donated.

    Up to `rules.dense_steps` queries of compressed sparse layers see every finished entry, afterwards the indexer's
    choice; these are two programs.
    """

    def __init__(self, graph: nnx.GraphDef, optimizer: optax.GradientTransformation, rules: TargetRules):
        self.graph, self.optimizer, self.rules = graph, optimizer, rules
        self.dense: Run = jax.jit(partial(self._step, select="all"), donate_argnums=0)
        self.sparse: Run = jax.jit(partial(self._step, select="indexer"), donate_argnums=0)

    def __call__(self, state: TrainState, tokens: Int[Array, "B T1"], index: int) -> tuple[TrainState, Metrics]:
        return (self.dense if index < self.rules.dense_steps else self.sparse)(state, tokens)

    def _loss(self, params: nnx.State, fixed: nnx.State, tokens: Int[Array, "B T1"], select: Select):
        model = nnx.merge(self.graph, params, fixed)
        out = model.sequence(tokens[:, :-1], select=select)
        loss = next_token_loss(model.logits(out.hidden), tokens[:, 1:])
        index = [indexer_loss(aux) for aux in out.attention if aux is not None]
        kl = jnp.mean(jnp.stack(index)) if index else jnp.zeros(())
        return loss + self.rules.indexer_weight * kl, (loss, kl, out.moe)

    def _step(self, state: TrainState, tokens: Int[Array, "B T1"], select: Select) -> tuple[TrainState, Metrics]:
        grad = jax.value_and_grad(self._loss, has_aux=True)
        (_, (loss, kl, moe)), grads = grad(state.params, state.fixed, tokens, select)
        updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params)
        params: Any = optax.apply_updates(state.params, updates)
        fixed = balance(state.fixed, moe, self.rules.bias_rate)
        metrics = {
            "loss": loss,
            "indexer_kl": kl,
            "grad_norm": optax.tree.norm(grads),
            "expert_imbalance": jnp.mean(jnp.stack([load_spread(aux) for aux in moe])),
        }
        return TrainState(params, fixed, opt_state, state.step + 1), metrics


def balance(fixed: nnx.State, moe, rate: float) -> nnx.State:
    """Moves each layer's router bias by that layer's own load."""

    def move(path: tuple, leaf: jax.Array) -> jax.Array:
        keys = [getattr(k, "key", None) for k in path]
        if "bias" not in keys:
            return leaf
        layer = next(k for k in keys if isinstance(k, int))
        return update_bias(leaf, moe[layer], rate)

    return jax.tree_util.tree_map_with_path(move, fixed)


def evaluate_target(graph: nnx.GraphDef, select: Select = "indexer"):
    """(params, fixed, tokens [B, T], labels [B, T]) -> loss in nats summed over the labels >= 0; jitted."""

    def run(
        params: nnx.State, fixed: nnx.State, tokens: Int[Array, "B T"], labels: Int[Array, "B T"]
    ) -> Float32[Array, ""]:
        model = nnx.merge(graph, params, fixed)
        logits = model.logits(model.sequence(tokens, select=select).hidden)
        chosen = jnp.take_along_axis(logits, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
        return jnp.sum(jnp.where(labels >= 0, jax.nn.logsumexp(logits, axis=-1) - chosen, 0.0))

    return jax.jit(run)
