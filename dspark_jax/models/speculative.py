"""A target and its drafter as one module: the unit that is loaded, split and compiled."""

import jax
import jax.numpy as jnp
from flax import nnx

from dspark_jax.config import DraftConfig, TargetConfig
from dspark_jax.config_dense import DenseConfig
from dspark_jax.drafters.dspark import DSpark, DSparkDrafter
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
    """A dense `target` without a drafter; attributes as of `SpeculativeLM`."""

    def __init__(self, config: DenseConfig, *, dtype: jax.typing.DTypeLike = jnp.float32, rngs: nnx.Rngs):
        self.target = Qwen3(config, dtype=dtype, rngs=rngs)
        self.draft = None

    @property
    def drafter(self) -> None:
        """None: the decoding round runs plainly."""
