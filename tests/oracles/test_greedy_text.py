"""SmolLM2's greedy text against transformers on the same weights, fp32 (README.md says how to get both files)."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from dspark_jax import SamplingParams, load
from dspark_jax.near_tie import margins

pytestmark = pytest.mark.oracle


def test_greedy_text_is_that_of_transformers():
    names = [os.environ.get(name) for name in ("SMOLLM2_GGUF", "SMOLLM2_TEXTS")]
    if not all(names):
        pytest.skip("SMOLLM2_GGUF and SMOLLM2_TEXTS name no files; see tests/oracles/README.md")
    with np.load(Path(str(names[1]))) as archive:
        found = {key: archive[key].tolist() for key in archive}
    count = len(found) // 2 - 1
    prompts, texts = ([found[f"{kind}_{i}"] for i in range(count)] for kind in ("prompt", "text"))
    lm = load(str(names[0]), max_len=512)
    # The tokenizer is made from the same tables by other code.
    assert [lm.encode(lm.decode(prompt)) for prompt in prompts] == prompts
    assert lm.chat is not None and lm.chat.encode(json.loads(found["chat"])) == found["chat_ids"]
    params = SamplingParams(max_tokens=len(texts[0]))
    answers = [answer.tokens for i in range(0, count, 4) for answer in lm.generate(prompts[i : i + 4], params, ignore_eos=True)]
    excused = []
    for i, (prompt, text, answer) in enumerate(zip(prompts, texts, answers, strict=True)):
        apart = [j for j, pair in enumerate(zip(text, answer, strict=True)) if pair[0] != pair[1]]
        if apart:
            margin = margins(lm, [*prompt, *text[: apart[0]]])
            print(f"prompt {i}: apart at token {apart[0]}, {margin}")
            assert margin.near, f"prompt {i} parts at token {apart[0]} by a margin of {margin.logit:.1e}"
            excused.append(i)
    print(f"{count} prompts of {params.max_tokens} tokens, {len(excused)} excused")
    assert len(excused) <= max(1, count * params.max_tokens // 10_000)
