"""Writes the golden file of one fixed tiny V4 with DSpark stages (committed as tests/data/v4_tiny_goldens.npz).

Usage: make_goldens.py FILE.npz
Keys: cfg (JSON), P/<checkpoint key>, ids [S+1], target_logits [S, V], main_hidden [S, 3 * dim], draft_steps [n],
draft_tokens [n, 5], draft_logits [n, 5, V], draft_conf [n, 5]; everything fp32 without quantisation.
"""

import sys
from pathlib import Path

import torch

import tiny_v4
import v4_oracle

CONFIG = v4_oracle.Cfg(
    vocab=64, dim=64, n_layers=5, n_hash=2, heads=4, head_dim=96, rope=32, q_rank=24, o_groups=2, o_rank=16,
    experts=8, topk=2, inter=32, ratios=(0, 8, 4, 8, 4, 0, 0, 0), limit=2.0, window=8,
    idx_heads=8, idx_dim=64, idx_topk=2, yarn_orig=64, noise=63, targets=(2, 3, 4), rank=16,
)  # fmt: skip


def main(path: Path) -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(11)
    weights = tiny_v4.random_weights(CONFIG, generator)
    ids = torch.randint(2, 60, (45,), generator=generator)
    outputs = tiny_v4.expected(CONFIG, weights, ids, list(range(5, 44, 3)))
    tiny_v4.save(path, CONFIG, weights, outputs)
    print(f"{path}: {len(weights)} tensors, target logits' standard deviation {outputs['target_logits'].std():.2f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
