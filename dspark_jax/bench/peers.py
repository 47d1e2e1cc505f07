"""Other programs beside `bench.round`: the same shapes, random weights, context and numbers of requests, on the same device.

Each runs in a process of its own (`torch_peers`) that ends before JAX takes the device's memory. Of DeepSeek-V4 transformers'
plain step; of Qwen3 transformers' plain step, as it is and compiled, and DeepSpec's round, from a checkout. What cannot be
imported or fails is a line on stderr.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dspark_jax.config import DraftConfig, TargetConfig, to_hf
from dspark_jax.config_dense import DenseConfig, dense_to_hf
from dspark_jax.config_drafter import StandaloneConfig, standalone_to_hf
from dspark_jax.errors import ConfigError

SCRIPT = Path(__file__).with_name("torch_peers.py")
NAMES = ("transformers", "compiled", "deepspec")

Times = Mapping[tuple[int, bool], Mapping[str, float]]


class Peer(NamedTuple):
    """A process: its name in the records, the most seconds it may take, whether it drafts, and what it is told."""

    name: str
    limit: float
    drafting: bool
    job: dict[str, Any]


def peers_of(
    names: Sequence[str],
    config: TargetConfig | DenseConfig,
    draft: DraftConfig | StandaloneConfig,
    batches: Sequence[int],
    context: int,
    temperature: float,
    deepspec: Path | None,
) -> list[Peer]:
    """Those of `names` that there are for a model; none where experts are codes, which they do not have.

    "transformers" and of a dense model "compiled" are plain steps, "deepspec" is a dense model's round, from a checkout.
    """
    job: dict[str, Any] = {"batches": list(batches), "context": context}
    found: dict[str, Peer] = {}
    if isinstance(config, TargetConfig):
        if config.expert_weights != "fp4":
            own = {"peer": "deepseek_v4", "config": to_hf(config, None)}
            found["transformers"] = Peer("transformers", 150, False, {**job, **own})
        return [found[name] for name in names if name in found]
    job["config"] = dense_to_hf(config)
    found["transformers"] = Peer("transformers", 90, False, {**job, "peer": "qwen3"})
    found["compiled"] = Peer("transformers compiled", 200, False, {**job, "peer": "qwen3_compiled"})
    if deepspec is not None and 1 in batches:  # it has no others
        assert isinstance(draft, StandaloneConfig)
        own = {"drafter": standalone_to_hf(draft), "deepspec": str(deepspec.resolve()), "temperature": temperature}
        found["deepspec"] = Peer("DeepSpec", 90, True, {**job, **own, "peer": "deepspec"})
    return [found[name] for name in names if name in found]


def check_deepspec(folder: Path | None) -> None:
    """Raises ConfigError for a folder that is no checkout of DeepSpec."""
    if folder is not None and not (folder / "deepspec" / "eval" / "dspark").is_dir():
        raise ConfigError(f"--deepspec is {str(folder)!r}; expected the folder of a DeepSpec checkout, with deepspec/ in it")


def measure_peers(peers: Sequence[Peer], say: Callable[[str], None]) -> Times:
    """Microseconds by name, for requests side by side and whether drafts are made. `say` gets a line for each, and faults."""
    found: dict[tuple[int, bool], dict[str, float]] = {}
    for peer in peers:
        what = "round" if peer.drafting else "plain step"
        for line in _run(peer):
            name = " ".join([peer.name, *([line["how"]] if "how" in line else [])])
            case = f"batch {line['requests']}, {what}: {name}" if "requests" in line else name
            if "error" in line:
                say(f"{case}: not measured: {line['error']}")
                continue
            tokens = f", {line['tokens']} tokens" if "tokens" in line else ""
            say(f"{case}: {line['us']:.0f} us{tokens}")
            found.setdefault((line["requests"], peer.drafting), {})[name] = round(line["us"], 2)
    return found


def _run(peer: Peer) -> Iterator[dict[str, Any]]:
    """What the process printed, and at the end why there is no more if it failed."""
    command = [sys.executable, "-P", str(SCRIPT), json.dumps(peer.job)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=peer.limit, env=_environment(), check=False)
        printed, failed = done.stdout, done.returncode != 0
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        why = lines[-1] if lines else f"exit code {done.returncode}"
    except subprocess.TimeoutExpired as error:
        printed, failed, why = error.stdout or b"", True, f"no end after {peer.limit:.0f} s"
    for line in printed.decode(errors="replace").splitlines():
        if line.startswith("{"):  # libraries print too
            yield json.loads(line)
    if failed:
        yield {"error": why[:300]}


def _environment() -> dict[str, str]:
    """Without this project's folders on the path: `kernels` in it is also the name of a package that transformers looks for."""
    own = ("dspark_jax", "dspark_kernels")
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    kept = [path for path in paths if path and not any((Path(path) / name).is_dir() for name in own)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(kept)}
