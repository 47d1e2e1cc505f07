"""Writes goldens of tiny V4 models with DSpark stages whose configurations are drawn at random.

Usage: random_configs.py FOLDER [COUNT]
Writes FOLDER/random_0.npz ... with the keys of make_goldens.py, plus `margin` (the smallest gap of any top-k or draft
argmax in the file) and `spread` (the largest difference between whole and chunked evaluation by the oracle itself, as a
fraction of the largest logit).
"""

import random
import sys
from pathlib import Path

import numpy as np
import torch

import tiny_v4
import v4_oracle

TOKENS = 41
# A draw with a smaller margin than this is dropped: rounding could flip a choice, and the file would test the tie.
MIN_MARGIN = 1e-4
MAX_SPREAD = 2e-5


def ratio_lists(rng: random.Random) -> tuple[int, ...]:
    """3 to 5 layers with at least one compressed-sparse (4) and one heavily compressed one, in any order."""
    layers = rng.randint(3, 5)
    heavy = rng.choice((2, 3, 5, 6, 7, 9, 12))
    kinds = [4, heavy, *(rng.choice((0, 4, heavy)) for _ in range(layers - 2))]
    rng.shuffle(kinds)
    return tuple(kinds)


def random_config(rng: random.Random, index: int) -> v4_oracle.Cfg:
    """A configuration; `index` sets what differs between files: stages, block size, hash layers, groups, streams."""
    ratios = ratio_lists(rng)
    layers, stages = len(ratios), 1 + index % 3
    groups = (2, 1, 3)[index // 2 % 3]
    rope = rng.choice((4, 8, 12, 16))
    experts = rng.randint(5, 9)
    vocab = rng.randint(40, 90)
    return v4_oracle.Cfg(
        vocab=vocab,
        dim=rng.choice((32, 40, 48)),
        n_layers=layers,
        n_hash=(1, 2, 0)[(index + index // 3) % 3],
        heads=groups * rng.randint(1, 3),
        head_dim=rope + rng.choice((4, 8, 20)),
        rope=rope,
        q_rank=rng.randint(12, 24),
        o_groups=groups,
        o_rank=rng.randint(6, 12),
        experts=experts,
        topk=rng.randint(1, 3),
        inter=rng.choice((16, 24)),
        ratios=ratios + (0,) * stages,
        route_scale=rng.choice((1.0, 1.5, 2.5)),
        limit=rng.choice((1.0, 2.0, 10.0)),
        window=rng.randint(3, 13),
        # With few index heads ReLU makes scores exactly zero, and the order of ties is nobody's promise.
        idx_heads=rng.randint(6, 9),
        idx_dim=rope + rng.choice((4, 8)),
        idx_topk=rng.randint(1, 4),
        theta=rng.choice((1e3, 1e4)),
        ctheta=rng.choice((4e4, 1.6e5)),
        # Small enough that the correction changes the frequencies within these few positions; 0 switches it off.
        yarn_orig=rng.choice((0, 32, 64)),
        yarn_factor=rng.choice((4.0, 16.0)),
        hc=(4, 2, 4, 3)[index % 4],
        iters=rng.choice((4, 20)),
        block=(5, 3, 7, 1, 4, 6)[index % 6],
        noise=vocab - 1,
        targets=tuple(sorted(rng.sample(range(layers), rng.randint(1, 3)))),
        stages=stages,
        rank=rng.choice((8, 16)),
    )


@torch.no_grad()
def chunked_spread(
    c: v4_oracle.Cfg, P: tiny_v4.Weights, ids: torch.Tensor, whole: np.ndarray, rng: random.Random
) -> float:
    """Largest difference of the logits in chunks of random sizes, as a fraction of the largest logit."""
    parts, state, start = [], {}, 0
    while start < len(ids):
        size = rng.randint(1, 6)
        parts.append(v4_oracle.target_forward(c, P, ids[start : start + size], state)[0].numpy())
        start += size
    return float(np.abs(np.concatenate(parts) - whole).max() / np.abs(whole).max())


def write_case(path: Path, index: int) -> None:
    """Draws configuration and weights until the case is well conditioned, then writes it."""
    for attempt in range(100):
        rng = random.Random(f"{index} {attempt}")
        c = random_config(rng, index)
        generator = torch.Generator().manual_seed(1000 * index + attempt)
        P = tiny_v4.random_weights(c, generator)
        ids = torch.randint(0, c.vocab - 1, (TOKENS,), generator=generator)
        v4_oracle.margins.clear()
        outputs = tiny_v4.expected(c, P, ids, list(range(0, TOKENS - 1, 3)))
        top = np.sort(outputs["draft_logits"], axis=-1)
        margin = min(*v4_oracle.margins, float((top[..., -1] - top[..., -2]).min()))
        spread = chunked_spread(c, P, ids[:-1], outputs["target_logits"], rng)
        if margin >= MIN_MARGIN and spread <= MAX_SPREAD:
            extra = {"margin": np.float64(margin), "spread": np.float64(spread)}
            tiny_v4.save(path, c, P, outputs | extra)
            print(f"{path}: ratios {c.ratios}, attempt {attempt}, margin {margin:.1e}, spread {spread:.1e}")
            return
    raise SystemExit(f"{path}: no well-conditioned draw in 100 attempts; loosen MIN_MARGIN or MAX_SPREAD")


def main(folder: Path, count: int) -> None:
    torch.set_num_threads(1)
    for index in range(count):
        write_case(folder / f"random_{index}.npz", index)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 6)
