"""The drafters of tests/data/deepspec_tiny in the layout of the speculators package, and what its models compute with them:
tests/data/speculators_tiny.

Usage: python speculators_goldens.py DEEPSPEC_TINY OUT_FOLDER, with torch and speculators, from the folder against which the
configurations shall name the target.

Writes the folders `drafter-<name>` by save_pretrained (bfloat16) and goldens.npz. README.md has the layout.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.dflash import DFlashDraftModel
from speculators.models.dspark import DSparkDraftModel
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import AutoConfig, Qwen3ForCausalLM

SOURCE, OUT = map(Path, sys.argv[1:3])
MARGIN = 1e-3  # between the two best logits wherever one is taken
TAPS = [1, 3, 5]  # inputs of layers: DeepSpec calls the same ones [0, 2, 4]
KEPT = [i for i in range(96) if i % 3]  # of a reduced vocabulary
DRAFTERS = {  # by name: model, DeepSpec's folder, configuration
    "rnn": (DSparkDraftModel, "drafter-rnn", {"markov_head_type": "rnn", "draft_vocab_size": len(KEPT)}),
    "masks": (DSparkDraftModel, "drafter-vanilla", {"draft_vocab_size": 96, "sample_from_anchor": False}),
    "dflash": (DFlashDraftModel, "drafter-parallel", {"draft_vocab_size": 96}),
}
LAYERS = """attention_bias attention_dropout head_dim hidden_act hidden_size intermediate_size layer_types model_type vocab_size
max_position_embeddings num_attention_heads num_hidden_layers num_key_value_heads rms_norm_eps rope_parameters"""


def convert(name: str) -> None:
    """The same weights, without those that the target has."""
    model_class, source, more = DRAFTERS[name]
    layers = AutoConfig.from_pretrained(SOURCE / source)
    algorithm = "dspark" if model_class is DSparkDraftModel else "dflash"
    if algorithm == "dspark":
        more = more | {"markov_rank": layers.markov_rank}
    config = model_class.config_class(
        transformer_layer_config={key: getattr(layers, key) for key in LAYERS.split()},
        block_size=layers.block_size,
        mask_token_id=layers.mask_token_id,
        aux_hidden_state_layer_ids=TAPS,
        speculators_config=SpeculatorsConfig(
            algorithm=algorithm,
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=layers.block_size)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=str(SOURCE / "target"), architectures=["Qwen3ForCausalLM"]),
        ),
        **more,
    )
    if not config.sample_from_anchor:
        config.speculators_config.proposal_methods[0].speculative_tokens -= 1
    model = model_class(config)
    weights = load_file(SOURCE / source / "model.safetensors")
    if model.use_draft_vocab:
        kept = torch.tensor(KEPT)
        model.load_vocab_mappings(torch.isin(torch.arange(96), kept), kept - torch.arange(len(KEPT)))
        for key in ("lm_head.weight", "markov_head.markov_w2.weight"):
            weights[key] = weights[key][kept]
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert set(missing) <= {"verifier_lm_head.weight", "verifier_norm.weight", "t2d", "d2t"}, missing
    assert all(key.startswith("confidence_head") for key in unexpected), unexpected
    model.bfloat16().save_pretrained(OUT / f"drafter-{name}")
    (OUT / f"drafter-{name}" / "config.py").unlink()  # a copy of the package's own source


def load(name: str) -> DFlashDraftModel:
    """Embedding, and head unless the vocabulary is reduced, are the target's."""
    model_class, *_ = DRAFTERS[name]
    config = model_class.config_class.from_pretrained(OUT / f"drafter-{name}")
    config.transformer_layer_config._attn_implementation = "eager"
    return model_class.from_pretrained(OUT / f"drafter-{name}", config=config, dtype=torch.float32).eval()


def block(model: DFlashDraftModel, ids: torch.Tensor, taps: torch.Tensor, anchor: int) -> dict[str, torch.Tensor]:
    """One block [γ, ...] behind position `anchor`, with the tokens of `ids` [n], as the package's training makes it."""
    size = anchor + 2 * model.block_size
    ids = torch.nn.functional.pad(ids[:size], (0, size - len(ids[:size])))[None]
    taps = torch.nn.functional.pad(taps[:anchor], (0, 0, 0, size - anchor), value=1e3)[None]  # unseen behind the anchor
    here = torch.arange(size)[None] == anchor
    last = torch.zeros(1, size, model.hidden_size)
    hidden, logits, *_ = model._backbone_forward(taps, ids, here, last, torch.zeros_like(ids), max_anchors=1)
    found = {"hidden": hidden, "base_logits": logits, "logits": logits}
    if isinstance(model, DSparkDraftModel):
        tokens = ids[:, anchor : anchor + model.block_size]
        if not model.config.sample_from_anchor:
            tokens = torch.cat([tokens[:, :1], tokens[:, :-1]], 1)
        found["logits"] = logits + model.markov_head.block_bias(prev_token_ids=tokens, hidden_states=hidden)
        found["confidence_logits"] = model.confidence_head(torch.cat([hidden, model.markov_head.prev_embeddings(tokens)], -1))
    return {key: value[0] for key, value in found.items()}


def draft(model: DFlashDraftModel, text: torch.Tensor, taps: torch.Tensor, anchor: int) -> dict[str, torch.Tensor]:
    """The greedy chain: a forward for every token, which the next one reads. Rows that draft nothing are left out."""
    first = 0 if model.config.sample_from_anchor else 1
    ids = text[: anchor + 1]
    for row in range(first, model.block_size):
        found = block(model, ids, taps, anchor)
        best = found["logits"][row].topk(2)
        if float(best.values[0] - best.values[1]) < MARGIN:
            raise SystemExit(f"near-tie in row {row} behind {anchor}: take another vocabulary")
        token = best.indices[:1]
        ids = torch.cat([ids, token + model.d2t[token] if model.use_draft_vocab else token])
    return {key: value[first:] for key, value in block(model, ids, taps, anchor).items()} | {"tokens": ids[anchor + 1 :]}


@torch.no_grad()
def main() -> None:
    torch.set_num_threads(1)
    target = Qwen3ForCausalLM.from_pretrained(SOURCE / "target", dtype=torch.float32, attn_implementation="eager").eval()
    with np.load(SOURCE / "goldens.npz") as archive:
        texts = [(archive[f"text{i}/prompt"], archive[f"text{i}/greedy"]) for i in (0, 1)]
    arrays: dict[str, np.ndarray] = {}
    for name in DRAFTERS:
        convert(name)
        model = load(name)
        for i, (prompt, greedy) in enumerate(texts):
            text = torch.tensor(np.concatenate([prompt, greedy]))
            layers = target(text[None], output_hidden_states=True).hidden_states
            taps = torch.cat([layers[j][0] for j in TAPS], -1)
            at, accepted, rounds = len(prompt), [], []
            while at + model.block_size < len(text):
                rounds.append(draft(model, text, taps, at))
                right = rounds[-1]["tokens"] == text[at + 1 : at + 1 + len(rounds[-1]["tokens"])]
                accepted.append(int(right.int().cumprod(0).sum()))
                at += accepted[-1] + 1
            print(name, i, "accepted", accepted)
            every = {key: torch.stack([found[key] for found in rounds]).numpy() for key in rounds[0]}
            for key in ("hidden", "base_logits", "logits"):
                every[key] = every[key][0]
            every |= {"tokens": every["tokens"].astype(np.int32), "accepted": np.array(accepted, np.int32)}
            arrays |= {f"text{i}/{name}/{key}": value for key, value in every.items()}
    np.savez_compressed(OUT / "goldens.npz", **arrays)


if __name__ == "__main__":
    main()
