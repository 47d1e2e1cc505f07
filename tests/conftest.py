"""Process-wide settings of the test suite. They must be in the environment before JAX is imported; tests that start
subprocesses (the command line) pass them on."""

import gc
import os
import platform
import sys
from pathlib import Path

if "jax" in sys.modules:
    raise RuntimeError("jax was imported before tests/conftest.py configured it; look for a pytest plugin that does")

ROOT = Path(__file__).resolve().parent.parent

os.environ.setdefault("JAX_PLATFORMS", "cpu")

def _flag(name: str, value: str) -> None:
    flags = os.environ.get("XLA_FLAGS", "")
    if f"--{name}" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --{name}={value}".strip()


# Eight emulated devices, so that meshes are tested on any machine.
_flag("xla_force_host_platform_device_count", "8")
# XLA's "AVX2" is without fused multiply-add. With it the last few values of an array, which a vectorised loop leaves
# over, are rounded in another way than the rest, so that a row's last bit would depend on its place in the batch.
if platform.machine() in ("x86_64", "AMD64"):
    _flag("xla_cpu_max_isa", "AVX2")
# Most of the suite's time is compilation of programs that run a few times: without LLVM's optimisations it is a third less.
_flag("xla_backend_optimization_level", "0")
# XLA sizes its CPU thread pools by this: with fewer threads than device programs in flight, collectives deadlock.
os.environ.setdefault("NPROC", "32")
# Weights must never become constants of a program. The warning is an error here; the placement tables stay far below.
os.environ.setdefault("JAX_CAPTURED_CONSTANTS_WARN_BYTES", "1000000")
# Compiled programs are kept between runs, small ones too: a suite of many small programs lives on it.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
os.environ.setdefault("JAX_ENABLE_COMPILATION_CACHE", "true")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.05")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

# Tracing makes millions of objects that live on; looking through them for cycles every 700 takes a tenth of its time.
gc.set_threshold(200_000, 20, 20)

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

# The first example of a test compiles, so time limits on single examples say nothing; the same examples on every run.
settings.register_profile("dspark", deadline=None, derandomize=True, database=None)
settings.load_profile("dspark")

MAPPINGS = 40_000  # of memory, from which on programs are dropped; Linux ends a process that wants more than 65,530


@pytest.fixture(scope="module", autouse=True)
def few_programs():
    """Drops compiled programs between test modules: each holds some 20 mappings, and a process may not have many.

    Otherwise what earlier modules left is frozen: a collection looks through this module's objects alone.
    """
    gc.freeze()
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MAPPINGS:
        import jax  # here alone: the process that only hands out the tests starts without it

        jax.clear_caches()
        gc.unfreeze()
        gc.collect()
