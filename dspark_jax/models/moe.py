"""Mixture of experts: routing, dispatch over the `expert` axis, expert networks and the shared expert."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int

from dspark_jax.config import TargetConfig
from dspark_jax.decode.rows import mask_rows
from dspark_jax.eplb.placement import PlacedLayer
from dspark_jax.models import numerics
from dspark_jax.models.dispatch import gathered
from dspark_jax.models.layers import Linear, dot
from dspark_kernels import expert_mlp as expert_kernels
from dspark_kernels import routing as routing_kernels
from dspark_kernels.block_scaled import BlockScaled
from dspark_kernels.formats import block_shapes
from dspark_kernels.routing import choose_slots


class MoEAux(NamedTuple):
    """What balancing needs: rows by expert, and the mean score share of each expert."""

    load: Float32[Array, "E"]
    share: Float32[Array, "E"]


class Routed(NamedTuple):
    """What the router of a layer chose: logical expert ids (-1 in padded rows), and its raw scores.

    Nothing is counted until `load` or `aux` is called, so that a program without either has no counter.
    """

    ids: Int[Array, "B k"]
    logits: Float32[Array, "B E"]

    def load(self) -> Float32[Array, "E"]:
        """Rows by expert; padded rows count nowhere."""
        return routing_kernels.expert_load(self.ids, self.logits.shape[1])

    def aux(self) -> MoEAux:
        """For training; share is a row's part of `sqrt(softplus(logits))`."""
        scores = mask_rows(jnp.sqrt(jax.nn.softplus(self.logits)), self.ids[:, 0] >= 0)
        share = scores / (jnp.sum(scores, axis=-1, keepdims=True) + 1e-9)
        return MoEAux(self.load(), jnp.sum(share, axis=0))


class Gate(nnx.Module):
    """Router. Hash layers look the experts up by token id (`tid2eid`, fixed); others choose by score plus `bias`."""

    def __init__(self, config: TargetConfig, hashed: bool, *, rngs: nnx.Rngs):
        self.weight = nnx.Param(
            jax.random.normal(rngs.params(), (config.hidden_size, config.n_routed_experts))
            / math.sqrt(config.hidden_size)
        )
        self.bias = None if hashed else nnx.Param(jnp.zeros((config.n_routed_experts,)))
        self.tid2eid = (
            nnx.Param(jnp.zeros((config.vocab_size, config.num_experts_per_tok), jnp.int32)) if hashed else None
        )


class Experts(nnx.Module):
    """The routed experts' weights, stacked [E, in, out], by slot [slots, in, out] under a placement; the leading axis is
    split over `expert`. Quantised, `w1` … hold codes and `w1_scale` … their scales (`BlockScaled`), else None.
    """

    def __init__(self, config: TargetConfig, placed: PlacedLayer | None = None, *, rngs: nnx.Rngs):
        d, f = config.hidden_size, config.moe_intermediate_size
        slots = placed.num_slots if placed else config.n_routed_experts
        self.w1, self.w1_scale = _matrices(config, slots, d, f, rngs)
        self.w3, self.w3_scale = _matrices(config, slots, d, f, rngs)
        self.w2, self.w2_scale = _matrices(config, slots, f, d, rngs)

    def weights(self) -> tuple[Array | BlockScaled, ...]:
        """w1, w3, w2 as the kernels take them."""
        pairs = ((self.w1, self.w1_scale), (self.w3, self.w3_scale), (self.w2, self.w2_scale))
        return tuple(w[...] if scale is None else BlockScaled(w[...], scale[...]) for w, scale in pairs)


def _matrices(
    config: TargetConfig, slots: int, inputs: int, outputs: int, rngs: nnx.Rngs
) -> tuple[nnx.Param, nnx.Param | None]:
    """Weights [slots, in, out], random; or codes and scales, zeros until a checkpoint fills them."""
    if config.expert_weights == "dense":
        return nnx.Param(jax.random.normal(rngs.params(), (slots, inputs, outputs)) / math.sqrt(inputs)), None
    codes, scale = block_shapes(config.expert_weights, inputs, outputs)
    dtype = jnp.uint8 if config.expert_weights == "fp4" else jnp.float8_e4m3fn
    return nnx.Param(jnp.zeros((slots, *codes), dtype)), nnx.Param(jnp.zeros((slots, *scale), jnp.uint8))


class SharedExpert(nnx.Module):
    """The expert that every row passes, with the same clamp."""

    def __init__(self, config: TargetConfig, *, rngs: nnx.Rngs):
        width = config.moe_intermediate_size * config.n_shared_experts
        options = {"fp8_inputs": config.fp8_inputs, "codes": config.linear_weights == "fp8"}
        self.w1 = Linear(config.hidden_size, width, rngs=rngs, **options)
        self.w3 = Linear(config.hidden_size, width, rngs=rngs, **options)
        self.w2 = Linear(width, config.hidden_size, rngs=rngs, **options)
        self.config = config

    def __call__(self, x: Float[Array, "B d"]) -> Float32[Array, "B d"]:
        limit = self.config.swiglu_limit
        hidden = expert_kernels.swiglu(self.w1(x).astype(jnp.float32), self.w3(x).astype(jnp.float32), limit)
        dtype = x.dtype if self.config.numerics == "reference" else jnp.float32
        return self.w2(hidden.astype(x.dtype), dtype).astype(jnp.float32)


class MoE(nnx.Module):
    """Feed-forward sublayer. `axis` names the mesh axis that experts are split over; None computes all of them here.

    Routing knows logical experts alone. With `placed` the weights are laid out by slot, and every chosen expert is
    replaced by one of its slots before rows leave their rank.
    """

    def __init__(self, config: TargetConfig, hashed: bool, placed: PlacedLayer | None = None, *, rngs: nnx.Rngs):
        self.gate = Gate(config, hashed, rngs=rngs)
        self.experts = Experts(config, placed, rngs=rngs)
        self.shared_experts = SharedExpert(config, rngs=rngs)
        self.config, self.placed = config, placed

    def __call__(
        self, x: Float[Array, "B d"], token: Int[Array, "B"], valid: Bool[Array, "B"], axis: str | None
    ) -> tuple[Float[Array, "B d"], Routed]:
        """Routed experts plus the shared one, and the router's choice; invalid rows come out as zeros."""
        c = self.config
        x = mask_rows(x, valid)
        logits = dot(x, self.gate.weight[...], jnp.float32)
        hashed = None if self.gate.tid2eid is None else self.gate.tid2eid[...][token]
        bias = None if self.gate.bias is None else self.gate.bias[...].astype(jnp.float32)
        routing = routing_kernels.route(
            logits, top_k=c.num_experts_per_tok, scale=c.routed_scaling_factor, valid=valid, bias=bias, ids=hashed
        )
        out = self._experts(x, routing, axis) + self.shared_experts(x)
        return mask_rows(out.astype(x.dtype), valid), Routed(routing.ids, logits)

    def _experts(
        self, x: Float[Array, "B d"], routing: routing_kernels.Routing, axis: str | None
    ) -> Float32[Array, "B d"]:
        ids, weights = self._places(routing.ids, axis), routing.weights
        if axis is None:
            return self._local(x, ids, weights)
        return gathered(x, ids, weights, self._local, self.experts.w1.shape[0], axis)

    def _local(self, x: Float[Array, "B d"], ids: Int[Array, "B k"], weights: Float32[Array, "B k"]) -> Float32[Array, "B d"]:
        """Sums over the experts that are here."""
        c, matrices = self.config, self.experts.weights()
        if c.numerics == "reference":
            return numerics.expert_mlp(x, ids, weights, *matrices, limit=c.swiglu_limit, fp8_inputs=c.fp8_inputs)
        return expert_kernels.expert_mlp(x, ids, weights, *matrices, limit=c.swiglu_limit)

    def _places(self, ids: Int[Array, "B k"], axis: str | None) -> Int[Array, "B k"]:
        """Where the weights of the chosen experts are in the stacked arrays: the slot of a replica, or the id itself."""
        if self.placed is None:
            return ids
        tables = self.placed.tables
        # Rows are split over the axis: ranks that all began with an expert's first replica would crowd it.
        offset = 0 if axis is None else jax.lax.axis_index(axis)
        return choose_slots(ids, tables.expert_slots, tables.replica_count, offset=offset)
