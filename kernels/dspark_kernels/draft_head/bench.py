"""Device time of the sequential draft head, a whole block of drafts, against the reference in the same program form.

    python -m dspark_kernels.draft_head.bench --out FILE.json [--tune]

The floor is W2 read once a draft; what else must be read and written (base logits, noise, the logits that are kept) is printed
beside it.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dspark_kernels.draft_head import api, reference, triton
from dspark_kernels.precision import einsum
from dspark_kernels.timing import Program, Records, read_ceiling, times_us, wait

VOCAB, RANK, GAMMAS, ROWS = 129280, 256, (5, 7), (1, 8, 64)
TEMPERATURE = 0.8
STEPS = 100  # calls of a program
STEP_US = 5.0  # what a draft may take beside one and a half times its floor

Arguments = tuple[Any, ...]
Draft = Callable[..., tuple[jax.Array, jax.Array]]


class Case(NamedTuple):
    """Requests, drafts of a block, and whether the drafts are drawn with noise or greedy."""

    rows: int
    gamma: int
    drawn: bool

    def __str__(self) -> str:
        return f"R={self.rows} gamma={self.gamma} {'with noise' if self.drawn else 'greedy'}"

    def bytes_moved(self) -> tuple[int, int]:
        """Of W2 alone, and of all that is read and written at least: base logits, noise, logits that are kept."""
        own = 2 * RANK * VOCAB
        return self.gamma * own, self.gamma * (own + self.rows * VOCAB * (4 + 2 + 4 * self.drawn))


def inputs() -> dict[Case, Arguments]:
    """base, anchor, W1, W2 and, with noise, temperature and noise of every case; cases share them."""
    keys = jax.random.split(jax.random.key(0), 5)
    rows, gamma = max(ROWS), max(GAMMAS)
    base = jax.jit(lambda key: 3 * jax.random.normal(key, (rows, gamma, VOCAB)))(keys[0])
    noise = jax.jit(lambda key: list(jax.random.gumbel(key, (gamma, rows, VOCAB))))(keys[1])
    anchor = jax.random.randint(keys[2], (rows,), 0, VOCAB)
    w1 = jax.random.normal(keys[3], (VOCAB, RANK)).astype(jnp.bfloat16)
    w2 = (0.1 * jax.random.normal(keys[4], (RANK, VOCAB))).astype(jnp.bfloat16)
    found: dict[Case, Arguments] = {}
    for r in ROWS:
        drawn = jnp.full((r,), TEMPERATURE), [n[:r] for n in noise]
        for g in GAMMAS:
            plain = (base[:r, :g], anchor[:r], w1, w2)
            found[Case(r, g, False)] = plain
            found[Case(r, g, True)] = (*plain, drawn[0], drawn[1][:g])
    return found


def step(run: Draft | None, carry: Arguments) -> Arguments:
    """One block, all of whose results the next one waits for; without `run` only what is around the call."""
    base, anchor, *rest = carry
    mixed = anchor * 17 + 1
    if run is not None:
        tokens, logits = jax.lax.optimization_barrier(run(*carry))
        mixed += tokens[:, -1] * 31 + (logits[:, -1, 0] > 1)
    return base, mixed % VOCAB, *rest


def variants(case: Case) -> dict[str, Draft]:
    """Other tiles of the kernels by name."""
    chosen = triton.sizes(case.rows, RANK)
    options = [chosen._replace(turn=False), chosen._replace(columns=64, depth=128, stages=2)]
    options += [chosen._replace(columns=64, depth=64, stages=4), chosen._replace(columns=128, depth=128, stages=2)]
    options += [chosen._replace(columns=256, depth=32, stages=4), chosen._replace(columns=256, warps=8, stages=3)]
    if case.drawn:
        options += [chosen._replace(piece=p) for p in (1024, 2048, 4096, 8192) if p != chosen.piece]
    return {str(sizes): partial(triton.draft, blocks=sizes) for sizes in options}


def check(arguments: Arguments) -> None:
    """Raises AssertionError unless the drafts are the argmax of the kept logits plus noise (greedy: of the raw logits to
    rounding), and the logits are the reference's after the same tokens.
    """
    base, anchor, w1, w2, *drawn = arguments
    tokens, logits = jax.jit(partial(api.draft, implementation="triton"))(*arguments)

    @jax.jit
    def errors(base, anchor, w1, w2, tokens, logits, temperature, noise):
        worst, wrong = jnp.zeros(()), jnp.zeros((), jnp.int32)
        for k in range(base.shape[1]):
            before = anchor if k == 0 else tokens[:, k - 1]
            raw = base[:, k] + einsum("ri,iv->rv", w1[before], w2)
            if noise is None:
                lost = jnp.max(raw, axis=-1) - jnp.take_along_axis(raw, tokens[:, k, None], axis=-1)[:, 0]
                worst = jnp.maximum(worst, jnp.max(lost))
                wrong += jnp.sum(logits[:, k] != reference.one_hot(tokens[:, k], VOCAB))
            else:
                kept = logits[:, k].astype(jnp.float32)
                expected = reference.processed(raw, temperature).astype(jnp.float32)
                worst = jnp.maximum(worst, jnp.max(jnp.abs(kept - expected) / (1 + jnp.abs(expected))))
                wrong += jnp.sum(jnp.argmax(kept + noise[k], axis=-1) != tokens[:, k])
        return worst, wrong

    worst, wrong = errors(base, anchor, w1, w2, tokens, logits, *(drawn or (None, None)))
    np.testing.assert_array_less(worst, 1e-2 if drawn else 1e-4)
    assert int(wrong) == 0, f"{int(wrong)} drafts or logits are wrong"


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", help="JSON file")
    parser.add_argument("--tune", action="store_true", help="also time other tiles, with gamma 5 (printed only)")
    args = parser.parse_args(argv)
    runs = {"": None, "triton": partial(api.draft, implementation="triton"), "jnp": reference.draft}
    cases, programs = inputs(), {}
    for case, carry in cases.items():
        chosen = runs | (variants(case) if args.tune and case.gamma == min(GAMMAS) else {})
        programs[case] = {name: Program(partial(step, run), carry, STEPS, 1) for name, run in chosen.items()}
    wait(program for of_case in programs.values() for program in of_case.values())
    records, rate = Records(args.out), read_ceiling()
    for case, carry in cases.items():
        try:
            check(carry)
            times = times_us(programs[case], 5)
            w2_bytes, all_bytes = case.bytes_moved()
            records.add("draft_head", str(case), times["triton"], w2_bytes, {"jnp": times["jnp"]})
        except Exception as error:
            print(f"draft_head {case}: {type(error).__name__}: {str(error)[:600]}", flush=True)
            continue
        goal = 1.5 * w2_bytes / rate * 1e6 + STEP_US * case.gamma
        state = "reached" if times["triton"] <= goal else "missed"
        print(f"  goal {goal:.1f} us {state}; all bytes take {all_bytes / rate * 1e6:.1f} us", flush=True)
        for name in sorted(times, key=times.__getitem__) if len(times) > 2 else ():
            print(f"  {case}: {times[name]:7.1f} us, {times[name] / case.gamma:5.1f} a draft  {name}", flush=True)


if __name__ == "__main__":
    main()
