"""What `bench.load` measures: a model with its prompts, or the shapes of one with a recording."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dspark_jax.bench.load_run import Workload
from dspark_jax.bench.stage_programs import scaled
from dspark_jax.bench.synthetic import SyntheticRing, random_params, ring_makers, shapes_of
from dspark_jax.config_dense import ModelConfig
from dspark_jax.config_drafter import AnyDraftConfig
from dspark_jax.decode.calibrate import Rounds
from dspark_jax.decode.rounds_file import read_rounds
from dspark_jax.errors import ConfigError, RequestError
from dspark_jax.parallel.ring import Ring, RingConfig
from dspark_jax.parallel.ring_timer import Slot
from dspark_jax.parallel.stage import PipelineSpec
from dspark_jax.presets import model_configs
from dspark_jax.requests import RequestReader
from dspark_jax.serve.model import read_model
from dspark_jax.text import as_tokenizer

PROMPT = 48  # tokens of a prompt that are used


@dataclass(frozen=True)
class Texts:
    """Real prompts, shuffled anew in every batch."""

    ids: tuple[tuple[int, ...], ...]
    temperature: float
    seed: int
    position: int = 0

    @property
    def longest(self) -> int:
        return max(map(len, self.ids))

    def prompts(self, slots: Sequence[Slot], batch: int) -> dict[Slot, Sequence[int]]:
        rng = np.random.default_rng((self.seed, batch))
        order = np.concatenate([rng.permutation(len(self.ids)) for _ in range(-(-len(slots) // len(self.ids)))])
        return {slot: self.ids[i] for slot, i in zip(slots, order, strict=False)}


@dataclass(frozen=True)
class Empty:
    """One token behind an empty context of `position` tokens: what it holds changes no time."""

    position: int
    temperature: float = 1.0
    longest: int = 1

    def prompts(self, slots: Sequence[Slot], batch: int) -> dict[Slot, Sequence[int]]:
        return dict.fromkeys(slots, (0,))


@dataclass(frozen=True)
class Model:
    """What is measured.

    Attributes:
      params: of the whole model, on the host, or their shapes.
      rounds: where acceptance is drawn from; None where drafts are verified for what they are.
      chunk: prompt tokens of a tick.
    """

    name: str
    config: ModelConfig
    draft: AnyDraftConfig
    params: Any
    dtype: Any
    workload: Workload
    rounds: Rounds | None
    chunk: int

    def ring(self, spec: PipelineSpec, mesh: Mesh, sizes: RingConfig) -> Ring:
        if self.rounds is None or spec.draft is None:
            return Ring(spec, self.params, mesh, sizes)
        return SyntheticRing(spec, self.params, mesh, sizes, self.rounds)

    def makers(self, ring: Ring) -> list[Callable[[], Any]]:
        """What compiles all that `place` needs."""
        return [] if self.rounds is None else ring_makers(ring)

    def place(self, ring: Ring) -> dict[str, jax.Array]:
        """The ring's parameters on its mesh."""
        return ring.pipeline.place(self.params, ring.mesh) if self.rounds is None else random_params(ring)


def real_model(
    name: str,
    prompts: Path,
    temperature: float,
    seed: int,
    dtype: str | None,
    mesh: Mesh,
    drafter: Path | None = None,
    draft_tokens: int | None = None,
) -> Model:
    """A shipped model or a checkpoint folder, with the prompts of a file; `drafter` as for `Engine`.

    Raises DSparkError for what cannot be read, and for a model without a drafter.
    """
    from dspark_jax.evaluate import read_prompts  # needs what the command line needs

    texts = [p.prompt for p in read_prompts(prompts, None)]
    read = read_model(name, mesh, dtype, "dequantised", drafter=drafter, draft_tokens=draft_tokens)
    config, draft = read.config, read.draft
    if draft is None:
        raise RequestError(f"--model {name} has no drafter; choose one with mtp.* stages, or give it one (--drafter)")
    if not temperature >= 0:
        raise RequestError(f"--temperature is {temperature}; expected a number >= 0")
    reader = RequestReader(config, as_tokenizer(read.tokenizer), config.max_position_embeddings)
    ids = tuple(tuple(request.prompt[:PROMPT]) for request in reader.read(texts, None, True))
    workload = Texts(ids, temperature, seed)
    return Model(name, config, draft, read.params, read.dtype, workload, None, draft.block_size + 1)


def shaped_model(
    preset: str, layers: int | None, context: int, recorded: Path, dtype: str | None, mesh: Mesh
) -> Model:
    """A preset's shapes with random weights, and acceptance out of a recording.

    Raises ConfigError for an impossible size, a file that cannot be read, and a mesh of several devices.
    """
    if mesh.size > 1:
        raise ConfigError(f"--shape makes its weights on one device, and the mesh has {mesh.size}; leave --mesh out")
    config, draft = model_configs(preset)
    assert draft is not None
    whole = config.num_hidden_layers
    layers = whole if layers is None else layers
    if not 5 <= layers <= whole or context < 1:
        raise ConfigError(
            f"--layers is {layers} and --context {context}; expected 5 … {whole} layers and a context of at least 1"
        )
    config, draft = scaled(config, draft, layers) if layers < whole else (config, draft)
    rounds = read_rounds(recorded)
    dtype = dtype or ("float32" if mesh.devices.flat[0].platform == "cpu" else "bfloat16")
    name = f"{preset} shapes, {layers} layers, random weights"
    params = shapes_of(config, draft, dtype)
    return Model(name, config, draft, params, jnp.dtype(dtype), Empty(context), rounds, 1)
