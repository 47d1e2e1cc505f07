"""Writes what DeepSeek's own rounding of activations makes of the tiny V4 (committed as tests/data/v4_numerics_goldens.npz).

Usage: numerics_goldens.py FILE.npz
Weights and configuration are those of make_goldens.py, for the modes `ref` and `ref+inputs` rounded to bfloat16. Keys: under
`<mode>/` those of `tiny_v4.expected`, for `ref` and `ref+inputs` without taps but with `stepwise_logits`, the target's token by
token, another order of the same sums (for `ref` also `stepwise_draft_…` behind it); `quantiser/x` and what the quantisers
make of it, in fp32 and of its bfloat16 numbers.
"""

import dataclasses
import sys
from pathlib import Path

import numpy as np
import torch

import make_goldens
import tiny_v4
import v4_oracle

FP32 = ("_fn", "_base", "_scale", "ape", "attn_sink", "gate.bias")
TOKENS = {"q32": 28, "ref": 96}  # longer texts hold more numbers that lie near the middle of two codes
STEPS = 6
TEXTS = {"q32": 106, "q32+inputs": 0, "ref": 0, "ref+inputs": 0}  # seeds
# In fp32, relative noise of NOISE in the embeddings changes no output by more than MAX_SPREAD: no number is so near to
# the middle of two codes that another order of additions flips it. Few texts are like that.
NOISE, DRAWS, MAX_SPREAD = 5e-7, 8, 4e-5
MIN_MARGIN = 1e-4  # of every choice, as in random_configs.py

Arrays = dict[str, np.ndarray]


def outputs_at(c: v4_oracle.Cfg, P: tiny_v4.Weights, seed: int, tokens: int) -> tuple[torch.Tensor, list[int], Arrays]:
    """A random text, its steps, and what the oracle makes of them."""
    ids = torch.randint(2, 60, (tokens + 1,), generator=torch.Generator().manual_seed(seed))
    steps = list(range(5, tokens, STEPS))
    return ids, steps, tiny_v4.expected(c, P, ids, steps)


def spread(c: v4_oracle.Cfg, P: tiny_v4.Weights, ids: torch.Tensor, steps: list[int], outputs: Arrays, draw: int) -> float:
    """Largest change by noise, as a fraction of an output's largest value."""
    table = P["embed.weight"]
    noise = torch.randn(table.shape, generator=torch.Generator().manual_seed(draw))
    noisy = tiny_v4.expected(c, P | {"embed.weight": table * (1 + NOISE * noise)}, ids, steps)
    keys = ("target_logits", "main_hidden", "draft_logits", "draft_conf")
    return max(float(np.abs(noisy[k] - outputs[k]).max() / np.abs(outputs[k]).max()) for k in keys)


def well_conditioned(c: v4_oracle.Cfg, P: tiny_v4.Weights, seed: int) -> Arrays:
    """Outputs of a text that rounding errors do not change."""
    v4_oracle.margins.clear()
    ids, steps, outputs = outputs_at(c, P, seed, TOKENS["q32"])
    top = np.sort(outputs["draft_logits"], axis=-1)
    margin = min(*v4_oracle.margins, float((top[..., -1] - top[..., -2]).min()))
    worst = max(spread(c, P, ids, steps, outputs, draw) for draw in range(DRAWS))
    print(f"{c.prec}: text {seed}, margin {margin:.1e}, spread {worst:.1e}")
    if margin < MIN_MARGIN or worst > MAX_SPREAD:
        raise SystemExit(f"{c.prec}: text {seed} is badly conditioned; choose another in TEXTS")
    return outputs


@torch.no_grad()
def stepwise(c: v4_oracle.Cfg, P: tiny_v4.Weights, ids: list[int], steps: list[int]) -> Arrays:
    """The target's logits, computed token by token, and drafts behind them."""
    state: dict = {}
    logits, taps = zip(*(v4_oracle.target_forward(c, P, torch.tensor([i]), state) for i in ids[:-1]), strict=True)
    found = []
    for step in steps:
        context: dict = {}
        v4_oracle.draft_context(c, P, torch.cat(taps[: step + 1]), context)
        found.append(v4_oracle.draft_block(c, P, ids[step + 1], context))
    names = ("stepwise_draft_tokens", "stepwise_draft_logits")
    drafts = {name: torch.stack(values).numpy() for name, values in zip(names, zip(*found, strict=True), strict=False)}
    return {"stepwise_logits": torch.cat(logits).numpy(), **drafts}


def quantised() -> Arrays:
    """Rows of 128 numbers: many magnitudes, every middle of two codes, largest magnitudes at and beside a power of two."""
    generator = torch.Generator().manual_seed(7)
    noise = torch.randn(14, 128, generator=generator)
    x = noise * 10.0 ** torch.arange(-7, 7)[:, None]
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()  # 0 … 448
    middles8, middles4 = torch.zeros(128), torch.zeros(128)
    middles8[:126], middles8[127] = (codes[1:] + codes[:-1]) / 2, 448
    for group in middles4.view(4, 32):
        group[:7], group[7:14], group[31] = v4_oracle._MID, -v4_oracle._MID, 6
    edges = torch.zeros(12, 128)
    for row, largest in zip(edges.view(2, 6, 128), (448.0, 6.0), strict=True):
        peaks = torch.tensor([largest, largest * 0.25, largest * 64]).repeat(2)
        peaks[3:] = torch.nextafter(peaks[3:], torch.tensor(torch.inf))
        row[:] = torch.rand(6, 128, generator=generator) * peaks[:, None]
        row[:, ::32] = peaks[:, None]
    x = torch.cat([x, middles8[None], -middles8[None], middles4[None], middles4[None] * 2.0**-20, edges, torch.zeros(1, 128)])
    found = {"x": x.numpy()}
    for name, value in (("fp32", x), ("bf16", x.bfloat16())):
        found[f"{name}/fp8_64"] = v4_oracle.qdq_fp8(value, 64).float().numpy()
        found[f"{name}/fp8_128"] = v4_oracle.qdq_fp8(value, 128).float().numpy()
        found[f"{name}/fp4_32"] = v4_oracle.qdq_fp4(value).float().numpy()
        found[f"{name}/hadamard"] = v4_oracle.hadamard(value).float().numpy()
    return {f"quantiser/{key}": value for key, value in found.items()}


def main(path: Path) -> None:
    torch.set_num_threads(1)
    weights = tiny_v4.random_weights(make_goldens.CONFIG, torch.Generator().manual_seed(11))
    narrow = {k: v if k.endswith((*FP32, "tid2eid")) else v.bfloat16() for k, v in weights.items()}
    arrays = quantised()
    for mode in ("q32", "q32+inputs", "ref", "ref+inputs"):
        c = dataclasses.replace(make_goldens.CONFIG, prec=mode)
        if mode.startswith("q32"):
            outputs = well_conditioned(c, weights, TEXTS[mode])
        else:
            outputs = outputs_at(c, narrow, TEXTS[mode], TOKENS["ref"])[2]
            del outputs["main_hidden"]
            outputs |= stepwise(c, narrow, outputs["ids"].tolist(), outputs["draft_steps"].tolist() if mode == "ref" else [])
        arrays |= {f"{mode}/{key}": value for key, value in outputs.items()}
    np.savez_compressed(path, **arrays)
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
