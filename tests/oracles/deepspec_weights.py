"""Weights for deepspec_goldens.py: a tiny random Qwen3 target, and DeepSpec's drafter with each kind of head, trained for a
moment on what the target says so that some of its drafts are right. The committed ones are in tests/data/deepspec_tiny.

Usage: python deepspec_weights.py DEEPSPEC_CHECKOUT OUT_FOLDER

Writes the folders `target` and `drafter-<name>` by save_pretrained. Training amplifies rounding: another processor finds
other weights, then as good as these.
"""

import sys
from pathlib import Path

import torch
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM

CHECKOUT, OUT = sys.argv[1:3]
sys.path.insert(0, CHECKOUT)
from deepspec.modeling.dspark.qwen3 import Qwen3DSparkModel, build_draft_config  # noqa: E402

VOCAB, GAMMA, TAPS = 96, 5, [0, 2, 4]
MASK = VOCAB - 1
PROMPTS, NEW = (9, 22), 48  # tokens
STEPS, RATE = 40, 5e-3
HEADS = {  # by name: seed and configuration
    "vanilla": (2, {"markov_head_type": "vanilla", "confidence_head_with_markov": True}),
    "gated": (2, {"markov_head_type": "gated", "confidence_head_with_markov": True}),
    "rnn": (3, {"markov_head_type": "rnn", "confidence_head_with_markov": True}),
    # No head, as in DFlash, but a confidence: of the hidden row alone.
    "parallel": (2, {"markov_rank": 0, "confidence_head_with_markov": False}),
}


class Arguments(dict):
    __getattr__ = dict.__getitem__


@torch.no_grad()
def randomise(model: torch.nn.Module, seed: int) -> None:
    """No parameter keeps its initial value: zero biases and unit norms hide missing terms."""
    g = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=g)
        if "norm" in name:
            p.copy_(1 + 0.2 * noise)
        elif p.ndim == 1:  # biases
            p.copy_(0.5 * noise)
        elif "embed_tokens" in name:  # small, so that a tied head does not find the last token again
            p.copy_(0.3 * noise)
        else:
            p.copy_(1.5 / p.shape[1] ** 0.5 * noise)


@torch.no_grad()
def save(model: torch.nn.Module, folder: Path) -> None:
    """All values as bfloat16 numbers, stored as float32."""
    for p in model.parameters():
        p.copy_(p.bfloat16())
    model.save_pretrained(folder)


def make_target(folder: Path) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=20, num_hidden_layers=6, num_attention_heads=4, head_dim=8,
        num_key_value_heads=2, max_position_embeddings=512, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        rms_norm_eps=1e-6, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    target = Qwen3ForCausalLM(config)
    randomise(target, seed=0)
    save(target, folder)
    return target.eval()


@torch.no_grad()
def continued(target: Qwen3ForCausalLM, prompt: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The text [n] after NEW greedy tokens, and the hidden rows [n, taps · hidden] that drafters read."""
    ids = prompt[None]
    for _ in range(NEW):
        ids = torch.cat([ids, target(ids).logits[:, -1:].argmax(-1)], 1)
    layers = target(ids, output_hidden_states=True).hidden_states
    return ids[0], torch.cat([layers[i + 1][0] for i in TAPS], -1)


def loss(drafter: Qwen3DSparkModel, ids: torch.Tensor, taps: torch.Tensor, first: int) -> torch.Tensor:
    """Of the blocks [A, γ] behind every anchor from position `first` on, packed into one forward as DeepSpec packs them."""
    size = len(ids)
    anchors = torch.arange(first, size - GAMMA)
    places = anchors[:, None] + torch.arange(GAMMA)
    block = torch.full(places.shape, MASK)
    block[:, 0] = ids[anchors]
    owner = torch.arange(len(anchors)).repeat_interleave(GAMMA)
    seen = torch.cat([torch.arange(size) < anchors[owner, None], owner[:, None] == owner], 1)
    hidden = drafter._forward_backbone(
        position_ids=torch.cat([torch.arange(size), places.flatten()])[None],
        attention_mask=torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)[None, None],
        noise_embedding=drafter.embed_tokens(block.flatten())[None],
        target_hidden_states=taps[None],
    ).view(1, *places.shape, -1)
    logits, previous, labels = drafter.compute_logits(hidden), ids[places][None], ids[places + 1][None]
    if drafter.markov_head is not None:
        logits = drafter.markov_head.apply_block_logits(logits, token_ids=previous, hidden_states=hidden)
    total = functional.cross_entropy(logits.flatten(0, 2), labels.flatten())
    if drafter.confidence_head is not None:
        right = (logits.argmax(-1) == labels).float()
        total += functional.binary_cross_entropy_with_logits(drafter.predict_confidence_step(hidden, previous), right)
    return total


def make_drafter(folder: Path, target: Qwen3ForCausalLM, texts: list, seed: int, head: dict) -> None:
    arguments = {"block_size": GAMMA, "num_draft_layers": 2, "target_layer_ids": TAPS, "mask_token_id": MASK}
    arguments |= {"num_anchors": 4, "markov_rank": 8, "confidence_head_alpha": 1.0, **head}
    drafter = Qwen3DSparkModel(build_draft_config(target.config, Arguments(arguments)))
    drafter.config._attn_implementation = "eager"
    randomise(drafter, seed)
    drafter.initialize_embeddings_and_head(embed_tokens=target.model.embed_tokens, lm_head=target.lm_head)
    optimiser = torch.optim.Adam([p for p in drafter.parameters() if p.requires_grad], RATE)
    for _ in range(STEPS):
        optimiser.zero_grad()
        total = sum(loss(drafter, *text, first) for text, first in zip(texts, PROMPTS, strict=True))
        total.backward()
        optimiser.step()
    print(folder.name, f"loss {float(total):.2f}")
    save(drafter, folder)


def main() -> None:
    torch.set_num_threads(1)
    target = make_target(Path(OUT) / "target")
    prompts = [torch.randint(MASK, (n,), generator=torch.Generator().manual_seed(n)) for n in PROMPTS]
    texts = [continued(target, prompt) for prompt in prompts]
    for name, (seed, head) in HEADS.items():
        make_drafter(Path(OUT) / f"drafter-{name}", target, texts, seed, head)


if __name__ == "__main__":
    main()
