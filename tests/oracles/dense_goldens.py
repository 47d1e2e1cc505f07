"""Tiny random Qwen3 and Llama models of transformers, with what they answer: tests/data/dense_goldens.npz.

Usage: python dense_goldens.py OUT.npz
"""

import json
import sys

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

PROMPT, NEW = 21, 40  # tokens
MARGIN = 1e-3  # between the two best logits of every greedy step


def models():
    """By name: tied embeddings and query and key norms, head_dim unlike hidden / heads; and neither of them."""
    common = {"vocab_size": 96, "num_hidden_layers": 3, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    common |= {"max_position_embeddings": 256, "attn_implementation": "eager"}
    qwen3 = Qwen3Config(
        hidden_size=32, intermediate_size=44, num_attention_heads=4, num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}, tie_word_embeddings=True, **common,
    )  # fmt: skip
    llama = LlamaConfig(
        hidden_size=36, intermediate_size=40, num_attention_heads=6, num_key_value_heads=3, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4}, tie_word_embeddings=False, **common,
    )  # fmt: skip
    return {"qwen3": Qwen3ForCausalLM(qwen3), "llama": LlamaForCausalLM(llama)}


@torch.no_grad()
def randomise(model, seed: int) -> None:
    """No parameter keeps its initial value; all are float16 numbers, so that the file can hold them as such."""
    g = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=g)
        if p.ndim == 1:
            noise = 1 + 0.2 * noise
        else:  # small embeddings, so that a tied head does not find the last token again
            noise *= 0.3 if "embed_tokens" in name else 1.5 / p.shape[1] ** 0.5
        p.copy_(noise.half().float())


@torch.no_grad()
def answers(model, ids: torch.Tensor) -> dict[str, np.ndarray]:
    """The greedy continuation of `ids` without a cache, and logits and layer outputs over all of it."""
    for _ in range(NEW):
        best = model(ids).logits[0, -1].topk(2)
        if best.values[0] - best.values[1] < MARGIN:
            raise SystemExit(f"near-tie behind {ids.shape[1]} tokens; take another seed")
        ids = torch.cat([ids, best.indices[:1, None]], 1)
    out = model(ids, output_hidden_states=True)
    return {
        "ids": ids[0].numpy().astype(np.int32),
        "logits": out.logits[0].numpy(),
        "layer_0": out.hidden_states[1][0].numpy(),
        "layer_1": out.hidden_states[2][0].numpy(),
    }


def main() -> None:
    torch.set_num_threads(1)
    arrays: dict[str, np.ndarray] = {"prompt": np.int32(PROMPT)}
    for seed, (name, model) in enumerate(models().items()):
        model.eval()
        randomise(model, seed)
        ids = torch.randint(3, 96, (1, PROMPT), generator=torch.Generator().manual_seed(10 + seed))
        found = answers(model, ids)
        text = found["ids"][PROMPT:]
        if len(set(text.tolist())) < 10:
            raise SystemExit(f"{name} repeats itself: {text.tolist()}; take another seed")
        arrays |= {f"{name}/{key}": value for key, value in found.items()}
        arrays[f"{name}/config"] = np.array(json.dumps(model.config.to_dict()))
        arrays |= {
            f"{name}/W/{key}": value.numpy().astype(np.float16)
            for key, value in model.state_dict().items()
            if not (key == "lm_head.weight" and model.config.tie_word_embeddings)
        }
        print(name, text.tolist())
    np.savez_compressed(sys.argv[1], **arrays)


if __name__ == "__main__":
    main()
