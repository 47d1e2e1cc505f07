"""The recipe of the shipped model `nano`: a small V4-style target with every layer kind, and its DSpark stages.

    python -m dspark_jax.train.corpus --out .corpus
    python -m dspark_jax.train.nano --corpus .corpus --work .nano --out dspark_jax/assets/nano

Runs on one GPU in about 20 minutes; both trainings resume from `--work` when they were interrupted.
"""

import argparse
import json
import shutil
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dspark_jax.config import DraftConfig, RopeConfig, TargetConfig
from dspark_jax.models.deepseek_v4 import DeepseekV4
from dspark_jax.models.speculative import SpeculativeLM
from dspark_jax.train.balance import set_hash_tables
from dspark_jax.train.data import TokenStream, load_tokens
from dspark_jax.train.drafter import drafter_step, init_drafter
from dspark_jax.train.loop import train
from dspark_jax.train.optimizer import OptimizerConfig, make_optimizer
from dspark_jax.train.target import TargetRules, evaluate_target, init_target, target_step

LENGTH = 1024


def nano_config(vocab_size: int = 4096) -> tuple[TargetConfig, DraftConfig]:
    """Window, compressed sparse and heavily compressed layers; hash and scored routing; two stages with a Markov head."""
    target = TargetConfig(
        vocab_size=vocab_size,
        hidden_size=224,
        num_hidden_layers=6,
        num_attention_heads=8,
        head_dim=64,
        q_lora_rank=64,
        o_groups=4,
        o_lora_rank=32,
        n_routed_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=32,
        compress_ratios=(0, 4, 16, 4, 16, 4),
        num_hash_layers=1,
        sliding_window=32,
        index_n_heads=8,
        index_head_dim=32,
        index_topk=16,
        max_position_embeddings=LENGTH,
        rope=RopeConfig(dim=16),
    )
    draft = DraftConfig(
        block_size=5, noise_token_id=2, target_layer_ids=(2, 4, 5), num_stages=2, markov_rank=64, head="markov"
    )
    return target, draft


def train_target(model: DeepseekV4, tokens: np.ndarray, steps: int, batch: int, work: Path, optimizer: OptimizerConfig, stop_at=None):
    """Pre-trains the target; returns (graph, state)."""
    transform, _ = make_optimizer(optimizer)
    graph, state = init_target(model, transform)
    step = target_step(graph, transform, TargetRules(dense_steps=steps // 4))
    stream = TokenStream(tokens, LENGTH, batch, seed=1)
    state = train(step, state, stream, steps, folder=work / "target", save_every=max(steps // 4, 1), report=_print, stop_at=stop_at)
    return graph, state


def train_drafter(
    target: DeepseekV4, model: SpeculativeLM, tokens: np.ndarray, steps: int, batch: int, anchors: int, work: Path, optimizer: OptimizerConfig
):
    """Trains the stages against the frozen target; returns (graph, state)."""
    transform, _ = make_optimizer(optimizer)
    target_graph, frozen = nnx.split(target)
    assert model.draft is not None
    graph, state = init_drafter(model.draft, transform)
    step = drafter_step(target_graph, graph, transform, anchors=anchors, bos=target.config.bos_token_id, seed=3)
    stream = TokenStream(tokens, LENGTH, batch, seed=2)
    state = train(
        lambda s, t, _: step(s, frozen, t), state, stream, steps, folder=work / "draft", save_every=max(steps // 4, 1), report=_print
    )
    return graph, state


def bits_per_byte(graph, state, tokens: np.ndarray, num_bytes: int, select="indexer", batch: int = 16) -> float:
    """Held-out bits per byte: sequences of LENGTH tokens, each from an empty context; a last partial one is left out.

    The bytes are scaled by the share of tokens that is scored.
    """
    run = evaluate_target(graph, select)
    count = (len(tokens) - 1) // LENGTH
    total, scored = 0.0, 0
    for i in range(0, count - count % batch, batch):
        rows = np.stack([tokens[(i + j) * LENGTH : (i + j + 1) * LENGTH + 1] for j in range(batch)]).astype(np.int32)
        total += float(run(state.params, state.fixed, jnp.asarray(rows)))
        scored += batch * LENGTH
    return total / np.log(2) / (num_bytes * scored / (len(tokens) - 1))


def _print(record: dict) -> None:
    short = {k: v for k, v in record.items() if k != "total"}
    print(json.dumps(short), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--corpus", type=Path, default=Path(".corpus"))
    parser.add_argument("--work", type=Path, default=Path(".nano"), help="checkpoints and logs; an interrupted run resumes here")
    parser.add_argument("--out", type=Path, default=Path("dspark_jax/assets/nano"))
    parser.add_argument("--target-steps", type=int, default=6000)
    parser.add_argument("--draft-steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--draft-batch", type=int, default=32)
    parser.add_argument("--anchors", type=int, default=128)
    parser.add_argument("--optimizer", default="muon")
    parser.add_argument("--peak", type=float, default=4e-3)
    parser.add_argument("--stop-at", type=int, default=None, help="end the target's training early (for a trial)")
    args = parser.parse_args()

    began = time.perf_counter()
    config, draft = nano_config()
    tokens = load_tokens(args.corpus / "train.npy", config.vocab_size)
    tokens = np.ascontiguousarray(tokens)
    model = SpeculativeLM(config, draft, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    sizes = {k: sum(x.size for x in jax.tree.leaves(nnx.state(m))) for k, m in (("target", model.target), ("draft", model.draft))}
    print(json.dumps({"parameters": sizes, "tokens": len(tokens), "device": jax.devices()[0].device_kind}), flush=True)
    set_hash_tables(model.target.layers, np.bincount(tokens[:20_000_000], minlength=config.vocab_size))

    steps = args.target_steps
    graph, state = train_target(
        model.target, tokens, steps, args.batch, args.work,
        OptimizerConfig(peak=args.peak, steps=steps, warmup=min(200, steps // 4), kind=args.optimizer), args.stop_at,
    )  # fmt: skip
    seconds = {"target": time.perf_counter() - began}
    results: dict = {"bits_per_byte": {}}
    meta = json.loads((args.corpus / "meta.json").read_text())
    for kind in ("code", "prose"):
        valid = np.load(args.corpus / f"valid_{kind}.npy")
        size = (args.corpus / f"valid_{kind}.txt").stat().st_size
        results["bits_per_byte"][kind] = {s: bits_per_byte(graph, state, valid, size, s) for s in ("indexer", "random", "all")}
    print(json.dumps(results), flush=True)
    if args.draft_steps == 0:
        return

    target = nnx.merge(graph, state.params, state.fixed)
    steps = args.draft_steps
    draft_graph, draft_state = train_drafter(
        target, model, tokens, steps, args.draft_batch, args.anchors, args.work,
        OptimizerConfig(peak=args.peak / 2, steps=steps, warmup=min(200, steps // 4), kind=args.optimizer),
    )  # fmt: skip
    seconds["all"] = time.perf_counter() - began
    model.target = target
    model.draft = nnx.merge(draft_graph, draft_state.params, draft_state.fixed)
    from dspark_jax.checkpoint.writer import write_checkpoint

    write_checkpoint(args.out, config, draft, nnx.split(model)[1])
    shutil.copy(args.corpus / "tokenizer.json", args.out / "tokenizer.json")
    logs = {k: (args.work / k / "log.jsonl").read_text().splitlines()[-1] for k in ("target", "draft")}
    record = {
        "seconds": seconds, "device": jax.devices()[0].device_kind, "corpus": meta, "parameters": sizes,
        "arguments": {k: str(v) for k, v in vars(args).items()}, **results, "last": {k: json.loads(v) for k, v in logs.items()},
    }  # fmt: skip
    (args.out / "training.json").write_text(json.dumps(record, indent=1))
    print(json.dumps({"seconds": seconds, "bytes": sum(f.stat().st_size for f in args.out.iterdir())}), flush=True)


if __name__ == "__main__":
    main()
