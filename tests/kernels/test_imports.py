"""The kernels stand alone: they import and run where dspark_jax does not exist."""

import subprocess
import sys
from pathlib import Path

KERNELS = Path(__file__).resolve().parents[2] / "kernels"

SCRIPT = """
import importlib, pkgutil, sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "dspark_jax":
            raise ImportError("blocked: " + name)
sys.meta_path.insert(0, Block())
try:
    import dspark_jax
except ImportError:
    pass
else:
    raise SystemExit("the block does not work")
import dspark_kernels
names = [m.name for m in pkgutil.walk_packages(dspark_kernels.__path__, "dspark_kernels.")]
for name in names:
    importlib.import_module(name)
assert not any(m.split(".")[0] == "dspark_jax" for m in sys.modules)
print(" ".join(names))
"""


def test_every_module_imports_without_dspark_jax():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env={"PYTHONPATH": str(KERNELS), "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for operation in ("routing", "expert_mlp", "hyper_connection", "block_scaled", "draft_head"):
        assert f"dspark_kernels.{operation}.reference" in done.stdout.split()
