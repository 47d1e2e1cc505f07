"""How close a greedy choice was: two float32 programs of other shapes may part only where a choice is a near-tie.

Text changes when rounding flips one of three choices: the next token (argmax of the logits), a row's experts (top-k of
the router) or its compressed entries (top-k of the indexer). The first counts at the end of the prefix, the other two
wherever the prefix was processed, because their effects stay in the state.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Float32, Int

from dspark_jax.decode.rows import padded_rows
from dspark_jax.models.deepseek_v4 import DeepseekV4
from dspark_jax.models.layers import dot
from dspark_jax.models.moe import MoE
from dspark_jax.models.numerics import compiler_options
from dspark_jax.parallel.mesh import param_specs

if TYPE_CHECKING:
    from dspark_jax.api import LM

NEAR = 1e-5  # the invariant's bound (docs/architecture.md, "Exactness")
_PROGRAMS: "WeakKeyDictionary[LM, Callable[..., tuple[Array, Array, Array]]]" = WeakKeyDictionary()
_SHORTEST = 64  # prefixes are padded to powers of two from here on, so that few programs are compiled


@dataclass(frozen=True)
class Margins:
    """The least distance between what was chosen and the best that was not; infinite where nothing was chosen."""

    logit: float
    router: float
    indexer: float

    @property
    def least(self) -> float:
        """The smallest of the three."""
        return min(self.logit, self.router, self.indexer)

    @property
    def near(self) -> bool:
        """Whether rounding may have decided."""
        return self.least < NEAR

    def __str__(self) -> str:
        return f"logit {self.logit:.1e}, router {self.router:.1e}, indexer {self.indexer:.1e}"


def near_tie(lm: "LM", prefix: Sequence[int]) -> bool:
    """Whether the greedy token behind `prefix` (prompt and answer so far, as ids) hangs on a margin below `NEAR`."""
    return margins(lm, prefix).near


def margins(lm: "LM", prefix: Sequence[int]) -> Margins:
    """The margins behind `prefix`, recomputed in one pass over it; a model that is not V4-style has a logit margin."""
    length = len(prefix)
    size = max(_SHORTEST, 1 << (length - 1).bit_length())
    token = np.zeros((1, size), np.int32)
    token[0, :length] = prefix
    if (program := _PROGRAMS.get(lm)) is None:
        program = _PROGRAMS[lm] = _program(lm)
    found = jax.device_get(program(lm._params, token, np.int32(length)))
    return Margins(*(float(x) for x in found))


def _program(lm: "LM") -> Callable[..., tuple[Array, Array, Array]]:
    """The jitted pass over (parameters, padded prefix [1, T], its length) of a model; one compilation a length T."""
    graph = lm._graph  # this module is a part of the same package

    def run(params: nnx.State, token: Int[Array, "1 T"], count: Int[Array, ""]) -> tuple[Array, Array, Array]:
        target = nnx.merge(graph, params).target
        if isinstance(target, DeepseekV4):
            return _v4_margins(target, token, count)
        return _logit_margin(target, token, count), jnp.float32(jnp.inf), jnp.float32(jnp.inf)

    none = PartitionSpec()
    specs = (param_specs(lm._params), none, none)
    mapped = jax.shard_map(run, mesh=lm.mesh, in_specs=specs, out_specs=(none, none, none), check_vma=False)
    return jax.jit(mapped, compiler_options=compiler_options(lm.config))


def _logit_margin(target: Any, token: Int[Array, "1 T"], count: Int[Array, ""]) -> Float32[Array, ""]:
    """By `decode.protocols.Target` alone: one tick over the whole prefix."""
    size = token.shape[1]
    rows = padded_rows(token, jnp.zeros(1, jnp.int32), count[None])
    hidden, _, _ = target.forward(rows, target.init_cache(1, size, size))
    return _gap(target.logits(hidden[count - 1]), 1)


def _v4_margins(target: DeepseekV4, token: Int[Array, "1 T"], count: Int[Array, ""]) -> tuple[Array, Array, Array]:
    """`DeepseekV4.sequence`, with the router's and the indexer's choices looked at on the way."""
    size = token.shape[1]
    flat, position = token[0], jnp.arange(size)
    valid = position < count
    streams = target.embed_streams(flat)
    router = indexer = jnp.float32(jnp.inf)
    for layer in target.layers:
        seen: dict[str, Array] = {}

        def attend(x: Float[Array, "T d"], layer=layer) -> tuple[Float[Array, "T d"], Any]:
            out, aux = layer.attn.sequence(layer.attn_norm(x)[None])
            return out[0], aux

        def feed(x: Float[Array, "T d"], layer=layer, seen=seen) -> tuple[Float[Array, "T d"], Any]:
            x = layer.ffn_norm(x)
            seen["router"] = _router_margin(layer.ffn, x, valid)
            return layer.ffn(x, flat, valid, target.axis)

        streams, aux = layer.hc_attn(streams, attend)
        streams, _ = layer.hc_ffn(streams, feed)
        router = jnp.minimum(router, seen["router"])
        if aux is not None:
            entries = jnp.arange(aux.scores.shape[-1])
            visible = (entries < ((position + 1) // layer.attn.ratio)[:, None]) & valid[:, None]
            gap = _gap(jnp.where(visible, aux.scores[0], -jnp.inf), target.config.index_topk)
            indexer = jnp.minimum(indexer, jnp.min(gap))
    hidden = target.hc_head(streams)[count - 1]
    return _gap(target.logits(hidden), 1), router, indexer


def _router_margin(moe: MoE, x: Float[Array, "T d"], valid: Bool[Array, "T"]) -> Float32[Array, ""]:
    """Least gap of the router's top-k over the valid rows; a hash layer chooses by token id and has none."""
    if moe.gate.bias is None:
        return jnp.float32(jnp.inf)
    choice = jnp.sqrt(jax.nn.softplus(dot(x, moe.gate.weight[...], jnp.float32))) + moe.gate.bias[...]
    return jnp.min(jnp.where(valid, _gap(choice, moe.config.num_experts_per_tok), jnp.inf))


def _gap(scores: Float32[Array, "... N"], k: int) -> Float32[Array, "..."]:
    """The k-th best score minus the one behind it; infinite where at most k entries are finite."""
    if scores.shape[-1] <= k:
        return jnp.full(scores.shape[:-1], jnp.inf)
    best = jax.lax.top_k(scores, k + 1)[0]
    return jnp.where(jnp.isneginf(best[..., k]), jnp.inf, best[..., k - 1] - best[..., k])
