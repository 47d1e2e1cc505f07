"""Device time of the grouped expert products against the read ceiling, or the matmul ceiling where rows are many.

    python -m dspark_kernels.expert_mlp.bench --tokens 8,64,512,4096 --formats bf16,fp8,fp4 --out FILE.json [--tune]

Each case is compared with the reference (on the first experts) before it is timed. `both` is the whole operation, with the
list of tiles and the sum over a row's choices. Peers compute the same products of bf16 weights: for gate and up, two.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_kernels.block_scaled import BlockScaled
from dspark_kernels.expert_mlp import api, few_rows, peers, reference, tiles, triton
from dspark_kernels.expert_mlp.few_rows import Lanes
from dspark_kernels.expert_mlp.triton import Blocks
from dspark_kernels.expert_mlp.tuning import Plan, plan
from dspark_kernels.formats import block_shapes
from dspark_kernels.timing import Records, read_ceiling

EXPERTS, WIDTH, INNER, TOP_K, LIMIT = 256, 4096, 2048, 6, 10.0
CHECKED = 16  # experts of the comparison with the reference, which computes all of them on all rows
MANY = 4096  # rows from which the floor is the products' one
POOL = ThreadPoolExecutor(12)


def matrix(kind: str, inputs: int, outputs: int, seed: int) -> triton.Weight:
    """Random [EXPERTS, inputs, outputs], an expert at a time."""
    keys = jax.random.split(jax.random.key(seed), EXPERTS)
    if kind == "bf16":
        make = lambda key: (jax.random.normal(key, (inputs, outputs)) * inputs**-0.5).astype(jnp.bfloat16)  # noqa: E731
        return jax.jit(lambda keys: jax.lax.map(make, keys))(keys)
    codes, scale = block_shapes(kind, inputs, outputs)  # type: ignore[arg-type]
    scales = jax.random.randint(jax.random.key(seed + 9), (EXPERTS, *scale), 118, 121).astype(jnp.uint8)
    if kind == "fp4":
        make = lambda key: jax.random.bits(key, codes, jnp.uint8)  # noqa: E731
    else:
        make = lambda key: jax.random.normal(key, codes).astype(jnp.float8_e4m3fn)  # noqa: E731
    return BlockScaled(jax.jit(lambda keys: jax.lax.map(make, keys))(keys), scales)


class _Records(Records):
    def amend(self, **values: Any) -> None:
        """Changes the last record: where the products, not the bytes, set the floor."""
        self.records[-1].update(values)
        if self.path:
            Path(self.path).write_text(json.dumps(self.records, indent=1) + "\n")


class Timer:
    """`step` (x, *args -> array) many times in one program, each call's x depends on the one before; compiles at once."""

    def __init__(self, step: Callable[..., Any], x: Any, args: tuple, expected_us: float):
        calls = int(np.clip(60_000 / expected_us, 4, 400))

        def run(x: Any, args: tuple) -> Any:
            def body(_: int, x: Any) -> Any:
                out = jax.lax.optimization_barrier(step(x, *args))
                return x + (1e-30 * out[0, 0]).astype(x.dtype)

            return jax.lax.fori_loop(0, calls, body, x)

        self.calls, self.arguments = calls, (x, args)
        self.compiled: Future = POOL.submit(lambda: jax.jit(run).lower(x, args).compile())

    def time_us(self, repeats: int = 3) -> float:
        """The shortest time of one call."""
        run = self.compiled.result()
        jax.block_until_ready(run(*self.arguments))
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            jax.block_until_ready(run(*self.arguments))
            times.append(time.perf_counter() - start)
        return min(times) / self.calls * 1e6


def matmul_rate() -> float:
    """Operations a second of an 8192^3 bf16 product."""
    x = jnp.full((8192, 8192), 0.01, jnp.bfloat16)
    return 2 * 8192**3 / Timer(lambda x, w: x @ w, x, (x + 0,), 1500).time_us() * 1e6


def candidates(sizes: Plan, kind: str) -> dict[str, list[tuple[int, Blocks | Lanes]]]:
    """Tile sizes to try for each product: the plan's, then others."""
    m = sizes.block_m
    if isinstance(sizes.gate_up, Lanes):
        options = [(16, 32, 1), (16, 64, 1), (16, 64, 2), (8, 64, 1), (8, 64, 2), (8, 128, 1), (8, 128, 2), (4, 128, 1)]
        others = [*((m, Lanes(*o)) for o in options), (16, Blocks(128, 32, 4, 6))]  # the last: the kernels of more rows
        return {name: [(m, getattr(sizes, name)), *others] for name in ("gate_up", "down")}
    if m > 16:
        options = [(64, 128, 64, 4, 3), (64, 128, 64, 8, 3), (128, 128, 64, 8, 3), (128, 128, 64, 8, 4), (128, 256, 64, 8, 3)]
        options += [(128, 128, 32, 8, 4), (64, 64, 64, 4, 4)]
    elif kind == "bf16":
        options = [(16, 64, 64, 4, 4), (16, 64, 128, 4, 3), (16, 128, 64, 4, 4), (16, 32, 128, 4, 4), (16, 32, 256, 4, 3)]
        options += [(16, 64, 64, 4, 6), (16, 128, 128, 8, 3)]
    else:
        options = [(16, 64, 128, 4, 4), (16, 64, 64, 4, 4), (16, 128, 64, 4, 5), (16, 128, 128, 8, 4), (16, 128, 32, 4, 6)]
    if kind != "bf16":
        options = [o for o in options if o[1] <= 128]
    found = [(o[0], Blocks(*o[1:])) for o in options]
    swaps = [(b, blocks._replace(swap=True)) for b, blocks in found if blocks.n >= 64][:3]
    return {name: [(m, getattr(sizes, name)), *found, *swaps] for name in ("gate_up", "down")}


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", default="8,64,512,4096")
    parser.add_argument("--formats", default="bf16,fp8,fp4")
    parser.add_argument("--out", help="JSON file")
    parser.add_argument("--tune", action="store_true", help="also try other tile sizes (printed only)")
    parser.add_argument("--no-peers", action="store_true")
    args = parser.parse_args(argv)
    records, began = _Records(args.out), time.perf_counter()
    rates = {"read": read_ceiling(), "matmul": matmul_rate()}
    print(f"ceilings: {rates['read'] / 1e12:.2f} TB/s, {rates['matmul'] / 1e12:.0f} TFLOP/s", flush=True)
    for kind in args.formats.split(","):
        weights = [matrix(kind, i, o, s) for s, (i, o) in enumerate([(WIDTH, INNER), (WIDTH, INNER), (INNER, WIDTH)])]
        for rows in map(int, args.tokens.split(",")):
            try:
                _case(rows, kind, weights, records, rates, args)
            except Exception as error:
                print(f"{kind} T={rows}: {type(error).__name__}: {str(error)[:400]}", flush=True)
            print(f"  after {time.perf_counter() - began:.0f} s", flush=True)
        del weights


def inputs(rows: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x, ids, weights: random routing, every row to TOP_K different experts."""
    rng = np.random.default_rng(rows)
    ids = rng.random((rows, EXPERTS)).argsort(axis=1)[:, :TOP_K].astype(np.int32)
    x = jnp.asarray(rng.normal(size=(rows, WIDTH)), jnp.bfloat16)
    return x, jnp.asarray(ids), jnp.asarray(rng.random(ids.shape), jnp.float32)


def check(rows: int, weights: list[triton.Weight], sizes: Plan) -> float:
    """Largest difference from the reference over its largest value, with ids of the first experts."""
    x, ids, share = inputs(min(rows, 512))
    few = [jax.tree.map(lambda v: v[:CHECKED], w) for w in weights]
    ids = jnp.where(ids % 5 == 0, -1, ids % CHECKED)
    expected = jax.jit(lambda *a: reference.expert_mlp(*a, limit=LIMIT))(x, ids, share, *few)
    got = jax.jit(lambda *a: api.grouped(*a, limit=LIMIT, sizes=sizes))(x, ids, share, *few)
    return float(jnp.max(jnp.abs(got - expected)) / jnp.max(jnp.abs(expected)))


def _case(rows: int, kind: str, weights: list[triton.Weight], records: _Records, rates: dict, args) -> None:
    x, ids, share = inputs(rows)
    entries = rows * TOP_K
    sizes = plan(entries, EXPERTS, kind)  # type: ignore[arg-type]
    active = len(np.unique(np.asarray(ids))) / EXPERTS
    moved = [int(sum(v.nbytes for v in jax.tree.leaves(w)) * active) for w in weights]
    bytes_of = {"gate_up": moved[0] + moved[1], "down": moved[2], "both": sum(moved)}
    work = {"gate_up": 4 * entries * WIDTH * INNER, "down": 2 * entries * WIDTH * INNER, "both": 6 * entries * WIDTH * INNER}
    floor = {n: bytes_of[n] / rates["read"] * 1e6 for n in bytes_of}
    if rows >= MANY:
        floor = {n: work[n] / rates["matmul"] * 1e6 for n in work}
    hidden = jnp.full((entries, INNER), 0.1, jnp.bfloat16)

    def timer(name: str, block_m: int, blocks: Blocks | Lanes) -> Timer:
        listed = tiles.build(ids, EXPERTS, block_m)
        of: Any = few_rows if isinstance(blocks, Lanes) else triton
        options = {"block_m": block_m, "blocks": blocks}
        if name == "down":
            return Timer(lambda h, t, w2: of.down(h, t, w2, **options), hidden, (listed, weights[2]), floor[name])
        step = lambda x, s, t, w1, w3: of.gate_up(x, s, t, w1, w3, limit=LIMIT, **options)  # noqa: E731
        return Timer(step, x, (share, listed, *weights[:2]), floor[name])

    programs = {n: timer(n, sizes.block_m, getattr(sizes, n)) for n in ("gate_up", "down")}
    whole = lambda x, *a: api.grouped(x, *a, limit=LIMIT, sizes=sizes)  # noqa: E731
    programs["both"] = Timer(whole, x, (ids, share, *weights), floor["both"])
    tuned = {}
    if args.tune:
        tuned = {n: [(o, timer(n, *o)) for o in options[1:]] for n, options in candidates(sizes, kind).items()}
    others = {}
    if kind == "bf16" and not args.no_peers:
        dense = tiles.build(ids, EXPERTS, 16)
        sizes_of = jnp.asarray(np.bincount(np.asarray(ids).reshape(-1), minlength=EXPERTS), jnp.int32)
        rows_in = {"gate_up": x[dense.order // TOP_K], "down": hidden}
        for name, w in (("gate_up", weights[0]), ("down", weights[2])):
            steps = peers.steps(rows)
            others[name] = {p: Timer(s, rows_in[name], (w, sizes_of), 300 * max(1, rows / 64)) for p, s in steps.items()}
    # Compiling beside a measurement would delay its launches.
    compiling = [t for by_name in others.values() for t in by_name.values()] + [t for o in tuned.values() for _, t in o]
    wait([t.compiled for t in (*programs.values(), *compiling)])
    print(f"{kind} T={rows}: error {check(rows, weights, sizes):.2e} of the largest value, {sizes}", flush=True)
    for name, program in programs.items():
        try:
            taken = program.time_us()
        except Exception as error:
            print(f"{kind} T={rows} {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        twice = 2 if name == "gate_up" else 1
        found = {p: twice * us for p, t in others.get(name, {}).items() if (us := _tried(f"{name} {p}", t))}
        ceiling = f"{rates['matmul'] / 1e12:.0f} TFLOP/s" if rows >= MANY else None
        records.add("expert_mlp", f"{name} T={rows} {kind}", taken, bytes_of[name], found)
        if ceiling:
            records.amend(floor_us=round(floor[name], 2), ceiling=ceiling, fraction=round(floor[name] / taken, 3))
        print(f"  fraction {floor[name] / taken:.3f}", flush=True)
    for name, options in tuned.items():
        times = sorted((us, str(o)) for o, t in options if (us := _tried(f"{kind} T={rows} {name} {o}", t)))
        for us, label in times:
            print(f"  tune {kind} T={rows} {name}: {us:9.1f} us {floor[name] / us:.3f} {label}", flush=True)


def _tried(label: str, timer: Timer) -> float | None:
    try:
        return timer.time_us(2)
    except Exception as error:
        print(f"  {label}: {type(error).__name__}: {str(error)[:160]}", flush=True)
        return None


if __name__ == "__main__":
    main()
