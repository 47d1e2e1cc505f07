"""Device time of hyper-connection mixing (pre and expand together) against the reference in the same program form.

    python -m dspark_kernels.hyper_connection.bench --out FILE.json [--tune]
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from dspark_kernels.hyper_connection import reference, triton
from dspark_kernels.timing import Program, Records, times_us, wait

ROWS, STREAMS, WIDTH = (6, 48, 384, 512), 4, 4096
COLUMNS = (2 + STREAMS) * STREAMS
OPTIONS = {"iters": 20, "eps": 1e-6, "norm_eps": 1e-6}

Weights = tuple[jax.Array, jax.Array, jax.Array]


def inputs(rows: int) -> tuple[jax.Array, Weights]:
    """bf16 streams [T, 4, 4096], and fn, base, scale."""
    rng = np.random.default_rng(0)
    streams = jnp.asarray(rng.normal(size=(rows, STREAMS, WIDTH)), jnp.bfloat16)
    fn = jnp.asarray(rng.normal(0, 0.02, (STREAMS * WIDTH, COLUMNS)), jnp.float32)
    # Small weights of the output: the streams stay finite over the many calls of a program.
    base = jnp.asarray(np.where(np.arange(COLUMNS) // STREAMS == 1, -4, rng.normal(size=COLUMNS)), jnp.float32)
    return streams, (fn, base, jnp.array([0.7, 0.1, 0.9], jnp.float32))


def bytes_moved(rows: int) -> int:
    """Streams read by pre and expand and written once, fn once, input and output of the sublayer."""
    return 2 * rows * WIDTH * (3 * STREAMS + 2) + 4 * STREAMS * WIDTH * COLUMNS


def step(pre: Callable | None, expand: Callable | None, carry):
    """One call of each of the two functions that are given; every result feeds the next step."""
    streams, y, post, comb, weights = carry
    if pre is not None:
        y, post, comb = jax.lax.optimization_barrier(pre(streams, *weights))
        if expand is None:
            streams = streams.at[0, 0, 0].add(y[0, 0] * 1e-30 + (post[0, 0] + comb[0, 0, 0]).astype(y.dtype) * 1e-30)
    if expand is not None:
        streams = expand(streams, y, post, comb)
    if pre is None and expand is None:
        streams = streams.at[0, 0, 0].add(streams[0, 0, 1] * 1e-30)
    return streams, y, post, comb, weights


def check(rows: int) -> None:
    """Against the reference on this device; raises AssertionError. One bf16 step of difference is rounding."""
    streams, weights = inputs(rows)
    got = jax.jit(partial(triton.pre, **OPTIONS))(streams, *weights)
    expected = jax.jit(partial(reference.pre, **OPTIONS))(streams, *weights)
    for name, a, b in zip(("post", "comb"), got[1:], expected[1:], strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6, err_msg=name)
    _close(got[0], expected[0])
    _close(jax.jit(triton.expand)(streams, *expected), jax.jit(reference.expand)(streams, *expected))


def _close(a: jax.Array, b: jax.Array) -> None:
    np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=2**-7, atol=1e-2)


def variants() -> dict[str, tuple[Callable, Callable | None]]:
    """Other blocks and warps of the kernels by name."""
    pre = partial(triton.pre, **OPTIONS)
    found: dict[str, tuple[Callable | None, Callable | None]] = {"pre": (pre, None), "expand": (None, triton.expand)}
    for tile, warps, stages in ((64, 4, 3), (128, 4, 1), (128, 8, 3), (256, 4, 2), (256, 8, 2)):
        found[f"pre, tile {tile}, {warps} warps, {stages} stages"] = (partial(pre, tile=tile, warps=warps, stages=stages), None)
    for parts in (16, 32, 64):
        found[f"pre, {parts} parts"] = (partial(pre, parts=parts), None)
    for piece, warps in ((512, 1), (2048, 2), (4096, 4), (1024, 4)):
        found[f"pre, piece {piece}, {warps} warps"] = (partial(pre, piece=piece, read_warps=warps), None)
    for piece, warps in ((512, 2), (1024, 2), (2048, 4), (4096, 8), (4096, 4)):
        found[f"expand, piece {piece}, {warps} warps"] = (None, partial(triton.expand, piece=piece, warps=warps))
    return found  # pyright: ignore[reportReturnType]


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", help="JSON file")
    parser.add_argument("--tune", action="store_true", help="also time other block sizes and warps (printed only)")
    args = parser.parse_args(argv)
    plain = (partial(reference.pre, **OPTIONS), reference.expand)
    runs = {"": (None, None), "triton": (partial(triton.pre, **OPTIONS), triton.expand), "jnp": plain}
    programs = {}
    for rows in ROWS:
        streams, weights = inputs(rows)
        carry = (streams, *jax.jit(plain[0])(streams, *weights), weights)
        chosen = runs | (variants() if args.tune else {})
        programs[rows] = {name: Program(partial(step, *functions), carry) for name, functions in chosen.items()}
    wait(program for of_case in programs.values() for program in of_case.values())
    records = Records(args.out)
    for rows in ROWS:
        case = f"T={rows} n={STREAMS} H={WIDTH}"
        try:
            check(rows)
            times = times_us(programs[rows])
            records.add("hyper_connection", case, times["triton"], bytes_moved(rows), {"jnp": times["jnp"]})
        except Exception as error:
            print(f"hyper_connection {case}: {type(error).__name__}: {str(error)[:600]}", flush=True)
            continue
        for name in times if args.tune else ():
            print(f"  {case}: {times[name]:8.2f} us  {name}", flush=True)


if __name__ == "__main__":
    main()
