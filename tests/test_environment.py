"""The settings that the other tests rely on."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest


def test_eight_emulated_devices():
    assert jax.default_backend() == "cpu"
    assert jax.device_count() == 8


def test_weights_captured_as_constants_are_an_error():
    weights = jnp.asarray(np.ones((600, 600), np.float32))  # 1.4 MB
    with pytest.raises(UserWarning, match="constants"):
        jax.jit(lambda x: x + weights).lower(jnp.float32(1.0))


def test_warnings_are_errors():
    with pytest.raises(DeprecationWarning):
        warnings.warn("old", DeprecationWarning, stacklevel=1)
