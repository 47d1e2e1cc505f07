"""Device time of linear maps with fp8 codes, V4-Flash's, against the read floor and the bf16 product of XLA.

    python -m dspark_kernels.block_linear.bench --tokens 1,8,48,512 --out FILE.json [--matrices wq_a,wkv] [--tune]

A program goes through enough copies of a matrix that none is still in the device's cache when its turn comes again.
Peers: the product with bf16 weights (a single row beside seven rows of zeros), and with codes that XLA widens. `--tune` times
the kernels in other sizes too, and prints, when a matrix is done, its lines for `tuning.TUNED` with the fastest ones.
"""

import argparse
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dspark_kernels.block_linear import block_linear, reference, triton
from dspark_kernels.block_linear.triton import Plan
from dspark_kernels.block_linear.tuning import bucket, plan
from dspark_kernels.block_scaled import BlockScaled, widened
from dspark_kernels.expert_mlp.few_rows import Lanes
from dspark_kernels.expert_mlp.triton import Blocks
from dspark_kernels.formats import block_shapes
from dspark_kernels.precision import einsum
from dspark_kernels.timing import Program, Records, times_us, wait

# Groups, inputs, outputs.
SHAPES = {
    "wq_a": (1, 4096, 1024),
    "wkv": (1, 4096, 512),
    "wq_b": (1, 1024, 32768),
    "wo_a": (8, 4096, 1024),
    "wo_b": (1, 8192, 4096),
    "index wq_b": (1, 1024, 8192),
    "shared w1": (1, 4096, 2048),
    "shared w2": (1, 2048, 4096),
    "main_proj": (1, 4096, 4096),
}
CACHE, MOST_COPIES = 128e6, 32  # bytes of all copies, more than twice the cache; but no more programs than this to compile


def weights(groups: int, inputs: int, outputs: int) -> list[BlockScaled]:
    """Copies of a random matrix."""
    codes, scale = ((groups, *shape) for shape in block_shapes("fp8", inputs, outputs))
    count = int(np.clip(np.ceil(CACHE / np.prod(codes)), 2, MOST_COPIES))
    make = jax.jit(lambda key: jax.random.normal(key, codes).astype(jnp.float8_e4m3fn))
    scales = jax.random.randint(jax.random.key(1), scale, 118, 121).astype(jnp.uint8)
    return [BlockScaled(make(key), scales + 0) for key in jax.random.split(jax.random.key(0), count)]


def program(product: Callable | None, x: jax.Array, copies: list, steps: int) -> Program:
    """`product(x, w)` with one copy after the other, each x depending on the result before; without it, only that."""

    def step(carry: tuple) -> tuple:
        x, copies = carry
        for w in copies:
            y = x[..., :1] if product is None else jax.lax.optimization_barrier(product(x, w))
            x = jax.lax.optimization_barrier(x + y[:1, :1, :1].astype(x.dtype) * 1e-30)
        return x, copies

    return Program(step, (x, copies), steps=steps, unroll=1)


def candidates(rows: int, sizes: Plan, inputs: int, outputs: int) -> list[Plan]:
    """Sizes to try beside `sizes`."""
    m = min(max(8, bucket(rows)), 64)
    base = max(sizes.split, 1)
    splits = sorted({max(base // 4, 1), max(base // 2, 1), base, base * 2, base * 4})
    near, blocks = splits[1:4], [(128, 64, 4, 4), (64, 64, 4, 5)]
    lanes = splits if m <= 16 else near
    found = [Plan(m, Lanes(*o), s, direct) for o in ((8, 64), (16, 64)) for s in lanes for direct in (False, True)]
    if m <= 16:
        found += [Plan(m, Lanes(*o), s) for o in ((8, 128), (16, 32)) for s in near]
    else:
        blocks += [(64, 128, 4, 4), (128, 32, 4, 6), (64, 64, 2, 6)]
    found += [Plan(max(m, 16), Blocks(*o), s) for o in blocks for s in near]
    if rows > 64:
        found = [Plan(n, Blocks(*o), s) for n in (64, 128) for o in ((128, 64, 4, 4), (128, 64, 8, 3)) for s in near]
    return [p for p in dict.fromkeys(found) if p != sizes and p.fits(inputs, outputs)]


def check(x: jax.Array, w: BlockScaled, sizes: Plan) -> float:
    """Largest difference from the reference over its largest value."""
    expected = jax.jit(reference.block_linear)(x, w)
    got = jax.jit(lambda x, w: triton.block_linear(x, w, sizes=sizes))(x, w)
    return float(jnp.max(jnp.abs(got - expected)) / jnp.max(jnp.abs(expected)))


def peer(x: jax.Array, w: jax.Array) -> jax.Array:
    """The bf16 product as `dspark_jax.models.layers.dot` has it."""
    padded = jnp.pad(x, ((0, 7), (0, 0), (0, 0))) if x.shape[0] == 1 else x
    return einsum("tgk,gkn->tgn", padded, w)[: x.shape[0]].astype(x.dtype)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", default="1,8,48,512")
    parser.add_argument("--matrices", help="of the matrices, with commas between them")
    parser.add_argument("--out", help="JSON file")
    parser.add_argument("--tune", action="store_true", help="also time other sizes (printed only), and print the fastest")
    args = parser.parse_args(argv)
    records = Records(args.out)
    names = list(SHAPES) if args.matrices is None else args.matrices.split(",")
    for name in names:
        copies = weights(*SHAPES[name])
        dense = [jax.jit(widened, static_argnums=1)(w, jnp.bfloat16) for w in copies]
        best = {bucket(rows): _case(name, rows, copies, dense, records, args.tune) for rows in map(int, args.tokens.split(","))}
        if args.tune:
            lines = [f"        {rows}: {_text(found)}," for rows, found in best.items() if found]
            print("\n".join([f"    {SHAPES[name]}: {{  # {name}", *lines, "    },"]), flush=True)
        del copies, dense


def _text(p: Plan) -> str:
    """As in `tuning`, without what is read by others or left as it is."""
    sizes = p.blocks[:2] if isinstance(p.blocks, Lanes) else p.blocks[:4]
    return f"Plan({p.block_m}, {type(p.blocks).__name__}{sizes}, {p.split}{', direct=True' * p.direct})"


def _case(name: str, rows: int, copies: list, dense: list, records: Records, tune: bool) -> Plan | None:
    """Measures and prints; the fastest of the sizes, None if nothing ran."""
    groups, inputs, outputs = SHAPES[name]
    x = jnp.asarray(np.random.default_rng(rows).normal(size=(rows, groups, inputs)), jnp.bfloat16)
    sizes, steps = plan(rows, groups, inputs, outputs), max(2, 128 // len(copies))

    def made(product: Callable) -> Program:
        return program(lambda x, w: product(x, w).astype(x.dtype), x, copies, steps)

    plans = [sizes, *(candidates(rows, sizes, inputs, outputs) if tune else ())]
    own = {str(p): made(functools.partial(triton.block_linear, sizes=p)) for p in plans} if tune else {}
    programs = {"": program(None, x, copies, steps), "block_linear": made(block_linear), **own}
    programs |= {"bf16": program(peer, x, dense, steps), "widened": made(reference.block_linear)}
    case = f"{name} {groups}x{inputs}x{outputs} T={rows}"
    try:
        wait(programs.values())
        print(f"{case}: error {check(x, copies[0], sizes):.1e} of the largest value, {sizes}", flush=True)
        times = {key: value / len(copies) for key, value in times_us(programs).items()}
        moved = sum(v.nbytes for v in copies[0]) + rows * groups * (2 * inputs + 2 * outputs)
        peers = {key: times[key] for key in ("bf16", "widened") if key in times}
        records.add("block_linear", case, times["block_linear"], moved, peers)
    except Exception as error:
        print(f"block_linear {case}: {type(error).__name__}: {str(error)[:600]}", flush=True)
        return None
    for key, value in sorted(times.items(), key=lambda item: item[1])[:12] if tune else ():
        print(f"  {case}: {value:8.2f} us  {key}", flush=True)
    return min((p for p in plans if str(p) in times), key=lambda p: times[str(p)], default=None)


if __name__ == "__main__":
    main()
