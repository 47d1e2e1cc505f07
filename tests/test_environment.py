"""The settings that the other tests rely on."""

import subprocess
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.pages import ROOT


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


def test_make_changes_no_environment_behind_a_link(tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / ".installed-1").touch()
    (tmp_path / ".venv").symlink_to(other)
    command = [str(ROOT / "scripts/make_venv.sh"), ".venv", "/bin/false", ".venv/.installed-2", "-e", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "'rm .venv'" in done.stderr and str(other) in done.stderr
    assert [file.name for file in other.iterdir()] == [".installed-1"]
