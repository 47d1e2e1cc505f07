"""Exact speculative decoding of DeepSeek-V4-style models with DSpark drafters, in JAX.

`load("nano").generate(["def fib(n):"], SamplingParams(max_tokens=64))` is the whole of it; see README.md.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dspark_jax.errors import CheckpointError, ConfigError, DSparkError, RequestError

if TYPE_CHECKING:
    from dspark_jax.api import LM, load
    from dspark_jax.decode.logprobs import TokenLogprobs
    from dspark_jax.decode.sampling import SamplingParams
    from dspark_jax.results import Completion, RoundOutput
    from dspark_jax.serve.engine import Engine

__version__ = "0.1.0"
__all__ = [
    "CheckpointError",
    "Completion",
    "ConfigError",
    "DSparkError",
    "Engine",
    "LM",
    "RequestError",
    "RoundOutput",
    "SamplingParams",
    "TokenLogprobs",
    "__version__",
    "load",
]

# Imported when first used: the package itself imports at once, without JAX.
_LAZY = {
    "Completion": "dspark_jax.results",
    "Engine": "dspark_jax.serve.engine",
    "LM": "dspark_jax.api",
    "RoundOutput": "dspark_jax.results",
    "SamplingParams": "dspark_jax.decode.sampling",
    "TokenLogprobs": "dspark_jax.decode.logprobs",
    "load": "dspark_jax.api",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
