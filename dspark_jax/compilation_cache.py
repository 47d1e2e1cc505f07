"""Compiled programs are kept on disk, so that the second start is fast."""

import os
from pathlib import Path

import jax

_MIN_SECONDS = "jax_persistent_cache_min_compile_time_secs"


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/dspark_jax/jax`, or `~/.cache/dspark_jax/jax`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~")) / ".cache"
    return root / "dspark_jax" / "jax"


def use_default_cache() -> None:
    """Points JAX's persistent compilation cache at `default_cache_dir`, unless the user has chosen a folder.

    JAX_COMPILATION_CACHE_DIR and `jax.config` win; JAX_ENABLE_COMPILATION_CACHE=false turns the cache off. Programs
    that take 0.3 s are worth keeping (JAX's own limit is 1 s), unless JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS says
    otherwise. Initialises no backend.
    """
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(default_cache_dir()))
    if _MIN_SECONDS.upper() not in os.environ and getattr(jax.config, _MIN_SECONDS) == 1.0:
        jax.config.update(_MIN_SECONDS, 0.3)
