"""The shipped model: greedy text with the drafter is plain greedy text, and damaged weights are refused."""

import shutil
import sys
from pathlib import Path

import pytest

from dspark_jax import LM, SamplingParams, cli, load
from dspark_jax.api import ASSETS
from dspark_jax.evaluate import Difference, compare, read_prompts

PROMPTS = read_prompts(Path(__file__).parents[1] / "data" / "nano_prompts.jsonl")
# Excused differences are at most one token in so many.
EXCUSED = 10_000


@pytest.fixture(scope="module")
def nano() -> LM:
    return load("nano")


def differences(lm: LM, prompts: list[str], batch: int, max_tokens: int) -> tuple[list[Difference], int]:
    """Every text that is not plain decoding's, and the tokens compared."""
    params = SamplingParams(max_tokens=max_tokens)
    found, tokens = [], 0
    for i in range(0, len(prompts), batch):
        part = prompts[i : i + batch]
        fast, plain = lm.generate(part, params), lm.generate(part, params, speculate=False)
        tokens += sum(len(p.tokens) for p in plain)
        each = (compare(lm, i + j, f, p) for j, (f, p) in enumerate(zip(fast, plain, strict=True)))
        found += [d for d in each if d is not None]
    for d in found:
        print(f"prompt {d.index} differs from token {d.at + 1} on; {'' if d.excused else 'not '}excused ({d.margins})")
    return found, tokens


@pytest.mark.long
def test_greedy_text_is_plain_greedy_text(nano: LM):
    short = [p for p in PROMPTS if len(nano.encode(p.prompt)) < 60]
    chosen = [next(p for p in short[i:] if p.kind == kind).prompt for kind in ("code", "prose") for i in (0, 2, 4, 6)]
    fast = nano.generate(chosen, SamplingParams(max_tokens=96), ignore_eos=True)
    plain = nano.generate(chosen, SamplingParams(max_tokens=96), speculate=False, ignore_eos=True)
    assert [f.text for f in fast] == [p.text for p in plain]
    assert all(len(f.tokens) == 96 for f in fast)
    assert all(sum(f.accepted_by_position) > 0 for f in fast)  # drafts were accepted, and some were not
    assert all(sum(f.accepted_by_position) < sum(f.verified_by_position) for f in fast)


def test_every_mechanism_is_at_work(nano: LM):
    """Longer than the window, more compressed entries than the indexer keeps, several heavily compressed ones."""
    c = nano.config
    reached = min(len(nano.encode(p.prompt)) for p in PROMPTS) + 128
    assert reached > c.sliding_window and reached // 4 > c.index_topk and reached // 16 > 4
    assert {*c.compress_ratios} == {0, 4, 16} and 0 < c.num_hash_layers < c.num_hidden_layers


@pytest.mark.long
@pytest.mark.parametrize("batch", [1, 8])
def test_greedy_text_is_plain_greedy_text_on_all_prompts(nano: LM, batch: int):
    found, tokens = differences(nano, [p.prompt for p in PROMPTS], batch, 128)
    print(f"batch {batch}: {len(PROMPTS) - len(found)} of {len(PROMPTS)} texts identical, {tokens} tokens")
    assert len(PROMPTS) == 50 and tokens > 5000
    assert all(d.excused for d in found)
    assert len(found) * EXCUSED <= tokens


@pytest.mark.parametrize("damage", ["truncated", "no header", "wrong header", "other shapes", "empty"])
def test_damaged_weights_are_one_message_and_exit_code_2(damage, monkeypatch, capsys, tmp_path):
    folder = tmp_path / "nano"
    shutil.copytree(ASSETS / "nano", folder)
    weights = folder / "model.safetensors"
    data = weights.read_bytes()
    if damage == "truncated":
        weights.write_bytes(data[: len(data) // 2])
    elif damage == "no header":
        weights.write_bytes(b"\xff" * 8 + data[8:])
    elif damage == "wrong header":
        weights.write_bytes(data[:8] + data[8:4000].replace(b'"', b"'") + data[4000:])
    elif damage == "empty":
        weights.write_bytes(b"")
    else:
        config = folder / "config.json"
        config.write_text(config.read_text().replace('"moe_intermediate_size": 32', '"moe_intermediate_size": 48'))
    monkeypatch.setattr(sys, "argv", ["dspark-jax", "generate", "--model", str(folder), "--prompt", "a"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == ""
    assert err.startswith("dspark-jax: error: ") and str(folder) in err and "Traceback" not in err
    assert "model.safetensors" in err or damage == "other shapes"
