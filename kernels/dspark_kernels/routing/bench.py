"""Device time of routing against the reference in the same program form.

    python -m dspark_kernels.routing.bench --out FILE.json [--tune]
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dspark_kernels.lowerings import Implementation
from dspark_kernels.routing import api, reference, replicas, triton
from dspark_kernels.routing.reference import SlotRouting
from dspark_kernels.timing import Program, Records, times_us, wait

SCALE = 1.5


class Case(NamedTuple):
    """Rows, experts, experts by row, and whether an eighth of the experts has 2 to 4 slots."""

    rows: int
    experts: int
    top_k: int
    replicas: bool

    def tables(self) -> tuple[np.ndarray, np.ndarray] | tuple[None, None]:
        """expert_slots and replica_count."""
        if not self.replicas:
            return None, None
        rng = np.random.default_rng(0)
        count = np.where(np.arange(self.experts) % 8 == 0, rng.integers(2, 5, self.experts), 1)
        slots, table = rng.permutation(count.sum()), np.full((self.experts, 4), -1)
        for e, end in enumerate(np.cumsum(count)):
            table[e, : count[e]] = slots[end - count[e] : end]
        return table, count

    def inputs(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """logits (NaN in padded rows), bias, valid (one row in eight is padded)."""
        rng = np.random.default_rng(1)
        valid = np.arange(self.rows) % 8 != 7
        logits = rng.normal(size=(self.rows, self.experts)).astype(np.float32)
        logits[~valid] = np.nan
        return jnp.asarray(logits), jnp.asarray(rng.normal(0, 0.1, self.experts), jnp.float32), jnp.asarray(valid)

    def bytes_moved(self) -> int:
        """Inputs read and results written once."""
        slots = self.experts if not self.replicas else int(self.tables()[1].sum())  # pyright: ignore[reportOptionalMemberAccess]
        return 4 * self.rows * self.experts + 4 * self.experts + 12 * self.rows * self.top_k + 4 * slots

    def options(self) -> dict:
        """Arguments of `route_to_slots` beside logits, bias and valid."""
        table, count = self.tables()
        return {"top_k": self.top_k, "scale": SCALE, "expert_slots": table, "replica_count": count, "offset": 1}


SHAPES = ((256, 6), (256, 8), (384, 6), (384, 8))
CASES = [Case(t, e, k, True) for e, k in SHAPES for t in (8, 64, 512)]
CASES += [Case(t, e, k, False) for e, k in (SHAPES[0], SHAPES[-1]) for t in (8, 64, 512)]
CASES += [Case(2048, 256, 6, True)]

Routed = Callable[[jax.Array, jax.Array, jax.Array], SlotRouting]


def implementations(case: Case, tune: bool) -> dict[str, Routed]:
    """The operation by name: the default kernel, the reference, and with `tune` other blocks and warps."""
    options = case.options()

    def by_api(name: Implementation) -> Routed:
        return lambda x, bias, valid: api.route_to_slots(x, bias=bias, valid=valid, implementation=name, **options)

    found = {"triton": by_api("triton"), "jnp": by_api("reference")}
    table, count = case.tables()
    tables = triton.Tables.identity(case.experts) if table is None or count is None else triton.Tables.build(table, count)
    scores = {"top_k": case.top_k, "scale": SCALE}

    def two(rows: int, warps: int, place_warps: int) -> Routed:
        def run(x, bias, valid):
            chosen = triton.select(x, bias=bias, valid=valid, rows=rows, warps=warps, **scores)
            return SlotRouting(*chosen, *triton.place(chosen[0], tables, 1, warps=place_warps))

        return run

    if not tune:
        return found
    for rows, warps, place_warps in ((1, 1, 2), (1, 1, 4), (1, 1, 8), (1, 2, 4), (1, 4, 4), (2, 1, 4), (4, 1, 4), (4, 4, 4)):
        found[f"{rows} rows, {warps} warps, then {place_warps}"] = two(rows, warps, place_warps)
    return found


def check(case: Case) -> None:
    """Against the reference on this device; raises AssertionError.

    The device's exp and log differ between kernel and reference by rounding: another expert may be chosen where the
    scores agree to 1e-5. The slots must be those of the reference's rule for the chosen experts.
    """
    x, bias, valid = case.inputs()
    options = case.options()
    runs = implementations(case, tune=False)
    got, expected = (jax.jit(runs[name])(x, bias, valid) for name in ("triton", "jnp"))
    np.testing.assert_allclose(got.weights, expected.weights, atol=1e-5)
    ids, keep = np.asarray(got.ids), np.asarray(valid)
    assert (ids[~keep] == -1).all() and (np.sort(ids[keep])[:, 1:] != np.sort(ids[keep])[:, :-1]).all()
    choice = np.asarray(reference.score_function(x, "sqrt_softplus") + bias)
    chosen, best = (np.take_along_axis(choice[keep], np.asarray(v)[keep], 1) for v in (ids, expected.ids))
    np.testing.assert_allclose(chosen, best, atol=1e-5)
    slots = ids
    if options["expert_slots"] is not None:
        slots = replicas.choose_slots_numpy(ids, options["expert_slots"], options["replica_count"], offset=1)
    np.testing.assert_array_equal(got.slots, slots)
    np.testing.assert_array_equal(got.rows, np.bincount(slots[slots >= 0], minlength=got.rows.size))


def step(run: Routed | None, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """One call, all of whose results the next step waits for; without `run` only what is around the call."""
    x, bias, valid = carry
    tiny = x[0, 0]
    if run is not None:
        out = jax.lax.optimization_barrier(run(x, bias, valid))
        tiny = out.weights[0, 0] + out.slots[0, 0] + out.rows[0] + out.ids[0, 0]
    return x + 1e-30 * tiny, bias, valid


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", help="JSON file")
    parser.add_argument("--tune", action="store_true", help="also time other block sizes and warps (printed only)")
    args = parser.parse_args(argv)
    programs = {}
    for case in CASES:
        carry = case.inputs()
        runs = implementations(case, args.tune and case[1:] == (256, 6, True))
        programs[case] = {name: Program(partial(step, run), carry) for name, run in ({"": None} | runs).items()}
    wait(program for of_case in programs.values() for program in of_case.values())
    records = Records(args.out)
    for case in CASES:
        name = f"T={case.rows} E={case.experts} k={case.top_k}" + (" replicas" if case.replicas else "")
        try:
            check(case)
            times = times_us(programs[case])
            peers = {label: times[label] for label in ("jnp", "two launches") if label in times}
            records.add("routing", name, times["triton"], case.bytes_moved(), peers)
        except Exception as error:
            print(f"routing {name}: {type(error).__name__}: {str(error)[:600]}", flush=True)
            continue
        for label in sorted(times, key=times.__getitem__) if args.tune and len(times) > 3 else ():
            print(f"  {name}: {times[label]:7.2f} us  {label}", flush=True)


if __name__ == "__main__":
    main()
