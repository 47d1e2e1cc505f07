"""How module parameters and checkpoint tensors correspond: DeepSeek-V4's key names, and transformers' for dense models.
Weights there are [out, in].
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.typing import PathParts

from dspark_jax.config import DraftConfig
from dspark_jax.config_dense import DenseConfig, ModelConfig
from dspark_jax.config_drafter import AnyDraftConfig
from dspark_jax.models.speculative import DenseLM, SpeculativeLM

Path = PathParts

# Vectors and tables that both sides store alike; every other `.weight` is a linear map, stored transposed.
_STRAIGHT = {"embed", "markov_w1", "norm", "q_norm", "kv_norm", "attn_norm", "ffn_norm", "main_norm"}
_STRAIGHT |= {"embed_tokens", "k_norm", "input_layernorm", "post_attention_layernorm", "hidden_norm"}
_HYPER = {"hc_attn", "hc_ffn", "hc_head"}
_BIASES = {"gate_bias": "gate_proj.bias", "joint_bias": "joint_proj.bias", "proj_bias": "proj.bias"}
_FP32 = {"fn", "base", "scale", "ape", "attn_sink", "bias"}
_CODES = {np.dtype(np.uint8): "fp4", np.dtype(jnp.float8_e4m3fn): "fp8"}


@dataclass(frozen=True)
class Entry:
    """One module parameter and the checkpoint tensors that hold it.

    Attributes:
      keys: tensor names; several for stacked experts, in expert order.
      shape: the shape each of them has in the file.
      load: file arrays -> module array.
      save: module array -> file arrays.
      dtype: "fp32", "int", "weight" (a number of the model's dtype), or what is kept as in the file: "fp4" and "fp8"
        codes, and their "scale".
    """

    path: Path
    keys: tuple[str, ...]
    shape: tuple[int, ...]
    load: Callable[[list[np.ndarray]], np.ndarray]
    save: Callable[[np.ndarray], list[np.ndarray]]
    dtype: str


def skeleton(
    config: ModelConfig, draft: AnyDraftConfig | None, *, dtype: jax.typing.DTypeLike, axis: str | None
) -> tuple[nnx.GraphDef, nnx.State]:
    """Graph and parameters of a `SpeculativeLM` or `DenseLM` with shapes in place of arrays; nothing is allocated."""

    def make() -> SpeculativeLM | DenseLM:
        if isinstance(config, DenseConfig):
            assert not isinstance(draft, DraftConfig), "embedded stages on a dense target"
            return DenseLM(config, draft, dtype=dtype, rngs=nnx.Rngs(0))
        assert draft is None or isinstance(draft, DraftConfig), "a separate drafter on a V4-style target"
        return SpeculativeLM(config, draft, dtype=dtype, axis=axis, rngs=nnx.Rngs(0))

    return nnx.split(nnx.eval_shape(make))


def entries(params: nnx.State) -> list[Entry]:
    """The correspondence for every parameter of a `SpeculativeLM` or `DenseLM` (shapes suffice)."""
    values = ((path, variable.get_value()) for path, variable in nnx.to_flat_state(params))
    return [_entry(path, tuple(value.shape), value.dtype) for path, value in values]


def _entry(path: Path, shape: tuple[int, ...], dtype: np.dtype) -> Entry:
    names = [str(p) for p in path[1:]]  # without "target" or "draft"
    leaf = names[-1]
    kind = "int" if leaf in ("tid2eid", "d2t") else "fp32" if leaf in _FP32 else "weight"
    if len(names) > 1 and names[-2] == "experts":
        matrix, _, scale = leaf.partition("_")
        kind = scale or _CODES.get(np.dtype(dtype), kind)
        keys = tuple(".".join([*names[:-1], str(e), matrix, scale or "weight"]) for e in range(shape[0]))
        return Entry(path, keys, shape[:0:-1], lambda a: np.stack([x.T for x in a]), lambda w: [x.T for x in w], kind)
    if np.dtype(dtype).itemsize == 1:
        kind = "scale" if leaf.endswith("scale") else "fp8"
    if leaf in ("wo_a", "wo_a_scale"):
        groups, inputs, rank = shape
        key = ".".join([*names[:-1], "wo_a", "scale" if leaf == "wo_a_scale" else "weight"])
        return Entry(
            path,
            (key,),
            (groups * rank, inputs),
            lambda a: a[0].reshape(groups, rank, inputs).transpose(0, 2, 1),
            lambda w: [w.transpose(0, 2, 1).reshape(groups * rank, inputs)],
            kind,
        )
    if len(names) > 1 and names[-2] in _HYPER:
        key = ".".join([*names[:-2], f"{names[-2]}_{leaf}"])
        transposed = leaf == "fn"
    elif leaf in _BIASES:
        key, transposed, kind = ".".join([*names[:-1], _BIASES[leaf]]), False, "fp32"
    else:
        key = ".".join(names)
        transposed = leaf in ("weight", "scale") and names[-2] not in _STRAIGHT
    if transposed:
        return Entry(path, (key,), shape[::-1], lambda a: a[0].T, lambda w: [w.T], kind)
    return Entry(path, (key,), shape, lambda a: a[0], lambda w: [w], kind)


def from_tensors(params: nnx.State, tensors: Mapping[str, np.ndarray]) -> dict[Path, np.ndarray]:
    """Module arrays by path from checkpoint tensors that are all present and well shaped."""
    return {e.path: e.load([np.asarray(tensors[k]) for k in e.keys]) for e in entries(params)}
