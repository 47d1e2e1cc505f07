"""A target and its drafter as one module: the unit that is loaded, split and compiled."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dspark_jax.config import DraftConfig, TargetConfig
from dspark_jax.config_dense import DenseConfig
from dspark_jax.config_drafter import SeparateConfig, StandaloneConfig
from dspark_jax.drafters.draft_model import DraftModelDrafter
from dspark_jax.drafters.dspark import DSpark, DSparkDrafter
from dspark_jax.drafters.standalone import Standalone, StandaloneDrafter
from dspark_jax.errors import ConfigError, raise_all
from dspark_jax.models.deepseek_v4 import DeepseekV4
from dspark_jax.models.qwen3 import Qwen3


class SpeculativeLM(nnx.Module):
    """`target`, and `draft` (None where the checkpoint has no DSpark stages)."""

    def __init__(
        self,
        config: TargetConfig,
        draft: DraftConfig | None,
        *,
        dtype: jax.typing.DTypeLike = jnp.float32,
        axis: str | None = None,
        rngs: nnx.Rngs,
    ):
        if draft is not None:
            raise_all(ConfigError, "draft config", draft.faults(config))
        self.target = DeepseekV4(
            config, taps=draft.target_layer_ids if draft else (), dtype=dtype, axis=axis, rngs=rngs
        )
        self.draft = DSpark(config, draft, rngs=rngs) if draft else None

    @property
    def drafter(self) -> DSparkDrafter | None:
        """The drafter that the decoding round drives."""
        return None if self.draft is None else DSparkDrafter(self.target, self.draft)


class DenseLM(nnx.Module):
    """A dense `target`, and `draft`: a drafter with files of its own, or None."""

    def __init__(
        self,
        config: DenseConfig,
        draft: SeparateConfig | None = None,
        *,
        dtype: jax.typing.DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        if draft is not None:
            raise_all(ConfigError, "drafter config", draft.faults(config))
        taps = draft.target_layer_ids if isinstance(draft, StandaloneConfig) else ()
        self.target = Qwen3(config, taps=taps, dtype=dtype, rngs=rngs)
        self.draft: Any  # Standalone, Qwen3 or None
        if isinstance(draft, StandaloneConfig):
            self.draft = Standalone(draft, rngs=rngs)
        else:
            self.draft = Qwen3(draft.model, dtype=dtype, rngs=rngs) if draft else None
        self.config = draft

    @property
    def drafter(self) -> StandaloneDrafter | DraftModelDrafter | None:
        """The drafter that the decoding round drives; None: it runs plainly."""
        if isinstance(self.config, StandaloneConfig):
            return StandaloneDrafter(self.target, self.draft)
        return None if self.config is None else DraftModelDrafter(self.draft, self.config, self.target.vocab_size)


def embedding_dtype(params: Any) -> np.dtype:
    """Of a model's weights and activations: its target's embedding's, or where that has none its first array's."""
    target = params.get("target", params)  # a model of another kind names its parts otherwise
    embedding = target["model"]["embed_tokens"] if "model" in target else target.get("embed", target)
    return jnp.dtype(jax.tree.leaves(embedding)[0].dtype)
