"""What DeepSpec's evaluator does with the weights of tests/data/deepspec_tiny: its goldens.npz.

Usage: python deepspec_goldens.py DEEPSPEC_CHECKOUT FOLDER OUT.npz

FOLDER is deepspec_weights.py's. README.md has the layout of the file.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from transformers import DynamicCache, Qwen3ForCausalLM

CHECKOUT, FOLDER, OUT = sys.argv[1:4]
sys.path.insert(0, CHECKOUT)
from deepspec.eval.dspark.evaluator import Qwen3DSparkEvaluator  # noqa: E402
from deepspec.modeling.dspark.common import extract_context_feature  # noqa: E402
from deepspec.modeling.dspark.qwen3 import Qwen3DSparkModel  # noqa: E402

NAMES = ("vanilla", "gated", "rnn", "parallel")
PROMPTS, NEW = (9, 22), 40  # tokens
THRESHOLD = 0.5  # of the confidence
MARGIN = 1e-3  # between the two best logits wherever one is taken, and between a confidence and the threshold


def crop_to_length(cache: DynamicCache, length: int, crop=DynamicCache.crop) -> None:
    """What DeepSpec means by crop: newer transformers take the number of tokens to remove, as a negative number."""
    if length < cache.get_seq_length():
        crop(cache, length - cache.get_seq_length())


DynamicCache.crop = crop_to_length  # type: ignore[method-assign]


class RecordedModel(Qwen3DSparkModel):
    """Keeps what each round's draft was made of."""

    def sample_draft_tokens(self, base_logits, **more):
        tokens, logits = super().sample_draft_tokens(base_logits, **more)
        self.rounds.append({"hidden": more["hidden_states"], "base_logits": base_logits, "logits": logits, "tokens": tokens})
        return tokens, logits

    def predict_confidence_step(self, hidden_states, prev_token_ids=None):
        logits = super().predict_confidence_step(hidden_states, prev_token_ids)
        self.rounds[-1]["confidence_logits"] = logits
        return logits


def load(kind: type, name: str):
    return kind.from_pretrained(Path(FOLDER) / name, dtype=torch.float32, attn_implementation="eager").eval()


def require_margin(best: torch.Tensor, what: str) -> None:
    """`best`: pairs in the last axis, the larger value first."""
    if (margin := float((best[..., 0] - best[..., 1]).min())) < MARGIN:
        raise SystemExit(f"near-tie of {margin:.1e} in {what}: take other weights")


@torch.no_grad()
def greedy(target: Qwen3ForCausalLM, prompt: list[int], taps: list[int]) -> tuple[list[int], np.ndarray]:
    """The target's own continuation without a cache, and the prompt's hidden rows that drafters read."""
    ids = torch.tensor([prompt])
    context = extract_context_feature(target(ids, output_hidden_states=True).hidden_states, taps)
    for _ in range(NEW):
        best = target(ids).logits[0, -1].topk(2)
        require_margin(best.values, "the target's text")
        ids = torch.cat([ids, best.indices[:1, None]], 1)
    return ids[0, len(prompt) :].tolist(), context[0].numpy()


def speculate(target: Qwen3ForCausalLM, drafter: RecordedModel, prompt: list[int], threshold: float) -> SimpleNamespace:
    """DeepSpec's greedy loop. Its evaluator is made without __init__, which would start torch.distributed."""
    evaluator = object.__new__(Qwen3DSparkEvaluator)
    evaluator.args = SimpleNamespace(temperature=0.0, confidence_threshold=threshold, max_new_tokens=NEW)
    evaluator.device, evaluator.target_model, evaluator.draft_model = torch.device("cpu"), target, drafter
    evaluator.confidence_head_recorder = None
    drafter.rounds = []
    return evaluator.generate_one_sample(input_ids=torch.tensor([prompt]), stop_token_ids=None)


def drafted(drafter: RecordedModel) -> dict[str, torch.Tensor]:
    """All rounds of the last run, [rounds, γ, ...] by name."""
    found = {key: torch.cat([made[key] for made in drafter.rounds]) for key in drafter.rounds[0]}
    found["confidence"] = found["confidence_logits"].sigmoid()
    require_margin(found["logits"].topk(2).values, "the drafts")
    if float((found["confidence"] - THRESHOLD).abs().min()) < MARGIN:
        raise SystemExit("a confidence is near to the threshold: take other weights")
    return found


def answers(target: Qwen3ForCausalLM, drafter: RecordedModel, prompt: list[int], text: list[int]) -> dict[str, np.ndarray]:
    """The first draft in full, and of every round the drafts, their confidence and how many of them were accepted; and a
    second run, which verifies only the drafts in front of the first one of little confidence.
    """
    run = speculate(target, drafter, prompt, 0.0)
    rounds = drafted(drafter)
    made = {key: rounds.pop(key)[0] for key in ("hidden", "base_logits", "logits")} | rounds
    cut = speculate(target, drafter, prompt, THRESHOLD)
    drafted(drafter)
    for found in (run, cut):
        if found.output_ids[0, len(prompt) :].tolist() != text:
            raise SystemExit("another text with the drafter than without")
    counts = {"accepted": run.accepted_draft_lengths}
    counts |= {"cut_proposed": cut.proposal_lengths, "cut_accepted": cut.accepted_draft_lengths}
    return {key: value.numpy() for key, value in made.items()} | {key: np.array(value) for key, value in counts.items()}


def main() -> None:
    torch.set_num_threads(1)
    target = load(Qwen3ForCausalLM, "target")
    drafters = {name: load(RecordedModel, f"drafter-{name}") for name in NAMES}
    arrays: dict[str, np.ndarray] = {"threshold": np.array(THRESHOLD)}
    for i, size in enumerate(PROMPTS):
        prompt = torch.randint(target.config.vocab_size - 1, (size,), generator=torch.Generator().manual_seed(size)).tolist()
        text, context = greedy(target, prompt, drafters[NAMES[0]].target_layer_ids)
        arrays |= {f"text{i}/prompt": np.array(prompt), f"text{i}/greedy": np.array(text), f"text{i}/taps": context}
        for name, drafter in drafters.items():
            found = answers(target, drafter, prompt, text)
            print(i, name, "accepted", found["accepted"].tolist(), "with threshold", found["cut_proposed"].tolist())
            arrays |= {f"text{i}/{name}/{key}": value for key, value in found.items()}
    arrays = {key: value.astype(np.int32) if value.dtype.kind == "i" else value for key, value in arrays.items()}
    np.savez_compressed(OUT, **arrays)


if __name__ == "__main__":
    main()
