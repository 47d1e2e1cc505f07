"""Greedy tokens of a shipped model on a mesh against those of one device.

In float32 they are equal, up to near-ties, whose margins are recomputed (`near_tie`); in bfloat16 differences are counted.
On every mesh: as it is, with a scheduler, with replicas of experts (several expert ranks), and in bfloat16.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dspark_jax.api import LM, load
from dspark_jax.bench.mesh_common import case
from dspark_jax.decode.sampling import SamplingParams
from dspark_jax.eplb import ExpertLayers, Placement
from dspark_jax.evaluate import Difference, compare
from dspark_jax.near_tie import margins
from dspark_jax.parallel.mesh import EXPERT, PIPE
from dspark_jax.results import Completion
from dspark_jax.serve.engine import Engine

EXCUSED = 10_000  # at most one excused difference in so many tokens
SCHEDULER = "threshold:0.5"  # needs no step times
PROMPTS = (
    "def read_lines(path):", "import os\nimport sys\n\n\ndef main():", "class Stack:\n    def __init__(self):",
    "The committee met on Monday to", "def fib(n):", "Once upon a time there was", "A list of the rivers of Europe:",
    "import json\n\n\ndef load(file):", "The opposite of", "while True:\n    line =", "In the year 1850 the city",
    "try:\n    value = int(", "She opened the door and", "def quicksort(items):", "for i in range(",
    "The main reason for this is that",
)  # fmt: skip


class Texts:
    """What one device answers, and what is compared with it.

    Args:
      prompts: how many of `PROMPTS`, again from the first if there are not enough.
      tokens: of an answer.
    """

    def __init__(self, model: str, prompts: int, tokens: int):
        self.model, self.tokens = model, tokens
        self.prompts = [PROMPTS[i % len(PROMPTS)] for i in range(prompts)]
        self.params = SamplingParams(max_tokens=tokens)
        self._found: dict[str, tuple[LM, list[Completion]]] = {}

    def alone(self, dtype: str) -> tuple[LM, list[Completion]]:
        """Plain decoding on one device, made at first use."""
        if dtype not in self._found:
            lm = load(self.model, dtype=jnp.dtype(dtype))
            self._found[dtype] = lm, lm.generate(self.prompts, self.params, speculate=False)
        return self._found[dtype]

    def on(self, mesh: Mesh, dtype: str, **options: Any) -> tuple[float, list[Completion]]:
        """Seconds of the answers of an engine, without compilation, and the answers."""
        lm = self.alone(dtype)[0]
        ways = mesh.shape[PIPE] * mesh.shape[EXPERT]
        longest = max(len(lm.encode(prompt)) for prompt in self.prompts) + self.tokens + lm.gamma + 2
        slots = ways * max(1, min(len(self.prompts), 16) // ways)
        with Engine(lm, mesh=mesh, slots=slots, max_len=longest, chunk=lm.gamma + 1, **options) as engine:
            engine.warmup()
            begin = time.perf_counter()
            found = engine.generate(self.prompts, self.params)
            return time.perf_counter() - begin, found


def variants(texts: Texts, mesh: Mesh) -> dict[str, tuple[str, dict[str, Any]]]:
    """By name the type of weights and the engine's options."""
    found: dict[str, tuple[str, dict[str, Any]]] = {"float32": ("float32", {})}
    found["float32, scheduler"] = ("float32", {"scheduler": SCHEDULER})
    if (ranks := mesh.shape[EXPERT]) > 1:
        found["float32, replicas"] = ("float32", {"placement": replicas(texts.alone("float32")[0], ranks)})
    return found | {"bfloat16": ("bfloat16", {})}


def replicas(lm: LM, ranks: int) -> Placement:
    """A quarter more slots than experts, with replicas, other experts in every layer."""
    layers, experts = ExpertLayers.of(lm.config, lm.draft_config), lm.config.n_routed_experts  # type: ignore[arg-type,union-attr]
    slots = -(-(experts + experts // 4) // ranks) * ranks
    rows = [[(7 * slot + layer) % experts if slot < experts else (slot + layer) % experts for slot in range(slots)]
            for layer in range(layers.num_layers)]  # fmt: skip
    return Placement(rows, experts, ranks)  # type: ignore[arg-type]


def equality(texts: Texts, mesh: Mesh, names: Sequence[str] | None = None) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """For each variant (those of `names`) a record, and what must not be."""
    for name, (dtype, options) in variants(texts, mesh).items():
        if names is not None and name not in names:
            continue
        lm, plain = texts.alone(dtype)
        seconds, found = texts.on(mesh, dtype, **options)
        pairs = enumerate(zip(found, plain, strict=True))
        parted = [d for i, (a, b) in pairs if (d := compare(lm, i, a, b)) is not None]
        one, faults = verdict(name, dtype, parted, sum(len(p.tokens) for p in plain))
        text = f"{texts.model}, {name}, {len(plain)} prompts, {texts.tokens} tokens"
        yield case("equality", text, mesh, 1e6 * seconds) | one, [f"{text}: {fault}" for fault in faults]


def verdict(name: str, dtype: str, parted: Sequence[Difference], tokens: int) -> tuple[dict[str, Any], list[str]]:
    """What a record says of the differences, and which of them must not be: only in float32 identity is promised."""
    excused = sum(d.excused for d in parted)
    said = [{"prompt": d.index, "token": d.at, "excused": d.excused, **vars(d.margins)} for d in parted]
    found = {"tokens": tokens, "different": len(parted), "excused": excused, "differences": said}
    if dtype != "float32":
        return found, []
    faults = [
        f"prompt {d.index} differs from one device from token {d.at + 1} on, no near-tie ({d.margins})"
        for d in parted
        if not d.excused
    ]
    if excused > max(1, tokens // EXCUSED):
        faults.append(f"{excused} near-ties in {tokens} tokens; expected at most one in {EXCUSED}")
    return found, faults


def in_processes(model: str, mesh: str, devices: int, tokens: int, limit: float) -> tuple[list[int], str]:
    """Ids that `generate` prints in one process for every device of a mesh, and what went wrong. Call it before JAX takes the
    devices' memory. CPUs are emulated where JAX_PLATFORMS says so.
    """
    cpu = os.environ.get("JAX_PLATFORMS", "").startswith("cpu")
    command = [sys.executable, "-m", "dspark_jax.cli", "launch", "--processes", str(devices), "--mesh", mesh]
    command += ["--emulate-devices", "1"] * cpu
    command += ["--", "generate", "--model", model, "--prompt", PROMPTS[0], "--max-tokens", str(tokens), "--json"]
    process = subprocess.Popen(
        command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | {"XLA_FLAGS": _flags()}
    )
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.terminate()  # it ends its own processes
        process.communicate()
        return [], f"no end after {limit:.0f} s; NCCL_DEBUG=INFO shows which process waits for which"
    if process.returncode:
        return [], f"exit code {process.returncode}: {err.strip()[-300:]}"
    return json.loads(out)["token_ids"], ""


def _flags() -> str:
    return " ".join(flag for flag in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in flag)


def processes(texts: Texts, mesh: Mesh, found: Sequence[int], seconds: float) -> tuple[dict[str, Any], list[str]]:
    """A record of the ids of `in_processes`, its seconds with start and compilation, and what must not be.

    `generate` takes float32 on CPUs and bfloat16 elsewhere.
    """
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    lm, plain = texts.alone(dtype)
    expected = plain[0]
    same = next((i for i, (a, b) in enumerate(zip(found, expected.tokens, strict=False)) if a != b), len(found))
    text = f"{texts.model}, {dtype}, one process a device, 1 prompt, {len(found)} tokens"
    one = case("equality", text, mesh, 1e6 * seconds, tokens=len(found), same=same)
    if same == len(found) == len(expected.tokens) or dtype != "float32":
        return one, []
    found_margins = margins(lm, (*expected.prompt_tokens, *expected.tokens[:same]))
    if found_margins.near:
        return one | {"excused": 1}, []
    return one, [f"{text}: {list(found)}, and one device says {list(expected.tokens)} ({found_margins})"]
