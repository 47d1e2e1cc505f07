"""emulate_devices: works before jax starts, refuses afterwards. In subprocesses, because jax starts once."""

import os
import subprocess
import sys

import jax
import pytest

from dspark_jax.testing import emulate_devices

_CLEAN = {
    k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "NPROC", "JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES")
}


def run(code: str, **env: str) -> str:
    code = "from dspark_jax.testing import emulate_devices\nimport jax, os\n" + code
    done = subprocess.run(
        [sys.executable, "-c", code], env={**_CLEAN, "PYTHONPATH": os.pathsep.join(sys.path), **env},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_gives_the_devices_and_keeps_other_flags():
    out = run(
        "emulate_devices(3)\nprint(len(jax.devices()), jax.devices()[0].platform, os.environ['XLA_FLAGS'], "
        "int(os.environ['NPROC']) >= 3)\nemulate_devices(3)",
        XLA_FLAGS="--xla_force_host_platform_device_count=8 --xla_cpu_enable_fast_math=false",
    )
    assert out.startswith("3 cpu ") and out.endswith("True")
    assert "--xla_cpu_enable_fast_math=false" in out and "device_count=3" in out and "device_count=8" not in out


def test_says_that_it_is_too_late():
    present = len(jax.devices())
    before = dict(os.environ)
    with pytest.raises(RuntimeError, match=rf"emulate_devices\({present + 1}\) came too late.*{present} cpu"):
        emulate_devices(present + 1)
    assert dict(os.environ) == before


def test_the_present_number_is_accepted_at_any_time():
    present = len(jax.devices())
    emulate_devices(present)
    assert len(jax.devices()) == present


@pytest.mark.parametrize("count", [0, -1, 2.0, True, "4"])
def test_refuses_an_impossible_count(count):
    with pytest.raises(ValueError, match="count = "):
        emulate_devices(count)
