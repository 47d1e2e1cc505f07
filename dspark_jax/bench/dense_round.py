"""Dense models in `bench.round`: Qwen3-4B with DeepSpec's DSpark drafter, its program under a stopwatch, and its floor."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import keystr, tree_flatten_with_path

from dspark_jax.bench.stage_programs import make_weights, makers, stored
from dspark_jax.checkpoint.layout import skeleton
from dspark_jax.config_dense import DenseConfig
from dspark_jax.config_drafter import StandaloneConfig
from dspark_jax.decode.program import DecodeProgram
from dspark_jax.decode.sampling import SamplingParams, SamplingState
from dspark_jax.parallel.leaves import ITEM_SIZE
from dspark_jax.parallel.mesh import EXPERT, make_mesh
from dspark_jax.parallel.ring_timer import ENDLESS

DenseShape = tuple[DenseConfig, StandaloneConfig]


def qwen3_4b() -> DenseShape:
    """Qwen3-4B (its config.json), and the DSpark drafter of DeepSpec's config/dspark/dspark_qwen3_4b.py."""
    target = DenseConfig(
        vocab_size=151936,
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        qk_norm=True,
        rope_theta=1e6,
        tie_word_embeddings=True,
    )
    drafter = StandaloneConfig(
        layers=dataclasses.replace(target, num_hidden_layers=5, tie_word_embeddings=False),
        block_size=7,
        mask_token_id=151669,
        target_layer_ids=(1, 9, 17, 25, 33),
        head="markov",
        markov_rank=256,
        confidence="markov",
        draft_vocab_size=target.vocab_size,
        num_target_layers=target.num_hidden_layers,
    )
    return target, drafter


DENSE_SHAPES: dict[str, Callable[[], DenseShape]] = {"qwen3-4b": qwen3_4b}


class DenseTimer:
    """`round_programs.Timer` of the program that `LM` decodes with: `calls` rounds in one call, one device.

    Args:
      draft: None is plain decoding.
      capacity: positions of a request.
    """

    experts = 1  # for `stage_programs.makers`; there are none

    def __init__(
        self, config: DenseConfig, draft: StandaloneConfig | None, dtype: str, requests: int, capacity: int, calls: int
    ):
        graph, shapes = skeleton(config, draft, dtype=jnp.dtype(dtype), axis=None)
        leaves, self._tree = tree_flatten_with_path(stored(shapes, dtype))
        mesh = make_mesh()
        self._place = NamedSharding(mesh, PartitionSpec(EXPERT))
        self.params: dict[str, Any] = {
            keystr(path): jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec()))
            for path, x in leaves
        }
        self.ticks, self.state = calls, None
        self._program = DecodeProgram(graph, shapes, mesh, requests, capacity)
        self._rounds = self._program.rounds(calls, draft is not None)
        self._step: Any = None

    def _params(self) -> Any:
        return jax.tree.unflatten(self._tree, list(self.params.values()))

    def makers(self) -> list[Callable[[], Any]]:
        return makers([self])

    def weights(self) -> dict[str, jax.Array]:
        made = make_weights(self.params, self.experts)
        return {key: jax.device_put(x, self.params[key].sharding) for key, x in made.items()}

    def compile(self) -> float:
        begin = time.perf_counter()
        shapes = jax.eval_shape(self._program.init_state, self._params())
        state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._place), shapes)
        self._step = self._rounds.lower(self._params(), state).compile()
        return time.perf_counter() - begin

    @property
    def temporaries(self) -> int:
        analysis = self._step.memory_analysis()
        return analysis.temp_size_in_bytes if analysis else 0

    def begin(self, tokens: Sequence[int], position: int, temperature: float) -> None:
        """The first round verifies the token alone, as behind a prompt; no request ends before its context is full."""
        state = self._program.init_state(self._params())
        params = [SamplingParams(temperature=temperature, seed=i) for i in range(len(tokens))]
        count = len(tokens)
        own = {
            "length": np.full(count, position, np.int32),
            "anchor": np.asarray(tokens, np.int32),
            "active": np.ones(count, bool),
            "max_tokens": np.full(count, ENDLESS, np.int32),
            "sampling": SamplingState.from_params(params),
        }
        own = jax.tree.map(lambda x: jax.device_put(x, self._place), own)
        self.state = dataclasses.replace(state, requests=dataclasses.replace(state.requests, **own))

    def timed(self, calls: int) -> tuple[float, list[Any]]:
        weights, outputs = self._params(), []
        jax.block_until_ready(self.state)
        begin = time.perf_counter()
        for _ in range(calls):
            self.state, emission = self._step(weights, self.state)
            outputs.append(emission)
        jax.block_until_ready((outputs[-1], self.state))
        return time.perf_counter() - begin, outputs

    def counts(self, output: Any) -> np.ndarray:
        return np.asarray(output.count)

    def free(self) -> None:
        self.state = None


def dense_bytes(
    config: DenseConfig, draft: StandaloneConfig | None, dtype: str, requests: int, context: int
) -> Mapping[str, int]:
    """Bytes that a round, or without a drafter a plain step, must read at least once, by part.

    "weights" are the target's with its head, "drafter" all of the drafter's but W2, "sequential head" W2 once a draft,
    "context" keys and values of the context, and "rows" those of tables: the embeddings and W1.
    """
    shapes = stored(skeleton(config, draft, dtype=jnp.dtype(dtype), axis=None)[1], dtype)
    found: dict[str, int] = dict.fromkeys(("weights", "drafter", "sequential head", "context", "rows"), 0)
    gamma = draft.block_size if draft else 0
    for path, x in tree_flatten_with_path(shapes)[0]:
        name, size, row = keystr(path), x.size * x.dtype.itemsize, x.shape[-1] * x.dtype.itemsize
        if "markov_w2" in name:
            found["sequential head"] += gamma * size
        elif "markov_w1" in name:
            found["rows"] += requests * gamma * row
        elif "embed_tokens" in name:
            target = "['target']" in name
            found["rows"] += requests * (gamma + 1 if target or draft is None else draft.block_rows) * row
            found["weights"] += size if target and config.tie_word_embeddings else 0
        else:
            found["weights" if "['target']" in name else "drafter"] += size
    for layers in (config, draft.layers if draft else None):
        if layers is not None:
            width = 2 * layers.num_key_value_heads * layers.head_dim * ITEM_SIZE[dtype]
            found["context"] += requests * context * layers.num_hidden_layers * width
    return found
