"""Greedy answers of a GGUF model by transformers in fp32, for prompts of a JSONL file ("prompt" on each line).

Usage: python greedy_text.py FILE.gguf PROMPTS.jsonl OUT.npz [COUNT] [TOKENS]
Keys: prompt_0 …, text_0 …: ids of the prompt and of its answer (end of sequence does not stop); chat: MESSAGES (JSON), and
chat_ids: them by the model's chat template.
Transformers reads weights and tokenizer from the GGUF file by code of its own.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

MESSAGES = [
    {"role": "user", "content": "Name 3 rivers.\n"},
    {"role": "assistant", "content": "Rhine,  Nile, Amazon."},
    {"role": "user", "content": " And 12 more?"},
]


@torch.no_grad()
def main() -> None:
    file, prompts, out = map(Path, sys.argv[1:4])
    count, tokens = (int(sys.argv[i]) if len(sys.argv) > i else default for i, default in ((4, 20), (5, 64)))
    names = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**names)
    model = AutoModelForCausalLM.from_pretrained(**names, dtype=torch.float32).eval()
    chat = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=True)["input_ids"]
    arrays = {"chat": np.array(json.dumps(MESSAGES)), "chat_ids": np.array(chat, np.int32)}
    lines = [json.loads(line)["prompt"] for line in prompts.read_text(encoding="utf-8").splitlines() if line]
    for i, prompt in enumerate(lines[:count]):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        found = ids[0].tolist()
        cache = None
        for _ in range(tokens):
            step = model(ids, past_key_values=cache, use_cache=True)
            cache = step.past_key_values
            ids = step.logits[:, -1:].argmax(-1)
            found.append(int(ids))
        arrays[f"prompt_{i}"] = np.array(found[:-tokens], np.int32)
        arrays[f"text_{i}"] = np.array(found[-tokens:], np.int32)
        print(i, repr(tokenizer.decode(found[-tokens:])[:70]), flush=True)
    np.savez(out, **arrays)


if __name__ == "__main__":
    main()
