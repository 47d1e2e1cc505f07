"""The recipe of the shipped model `nano`: a small V4-style target with every layer kind, and its DSpark stages.

    python -m dspark_jax.train.corpus --out .corpus
    python -m dspark_jax.train.nano --corpus .corpus --work .nano --out dspark_jax/assets/nano

Runs on one GPU in about 20 minutes; both trainings resume from `--work` when they were interrupted.
"""

import argparse
import json
import shutil
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dspark_jax.checkpoint.reader import read_checkpoint
from dspark_jax.checkpoint.writer import write_checkpoint
from dspark_jax.config import DraftConfig, RopeConfig, TargetConfig
from dspark_jax.drafters.dspark import DSpark
from dspark_jax.models.attention import Select
from dspark_jax.models.deepseek_v4 import DeepseekV4
from dspark_jax.models.speculative import SpeculativeLM
from dspark_jax.train.balance import set_hash_tables
from dspark_jax.train.data import TokenStream, load_tokens
from dspark_jax.train.drafter import drafter_step, init_drafter
from dspark_jax.train.loop import train
from dspark_jax.train.optimizer import OptimizerConfig, make_optimizer
from dspark_jax.train.target import TargetRules, TargetStep, evaluate_target, init_target

LENGTH = 1024


def nano_config(vocab_size: int = 4096) -> tuple[TargetConfig, DraftConfig]:
    """Window, compressed sparse and heavily compressed layers; hash and scored routing; two stages with a Markov
    head.
    """
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


def train_target(model: DeepseekV4, stream: TokenStream, steps: int, work: Path, optimizer: OptimizerConfig):
    """Pre-trains the target; returns (graph, state)."""
    transform, _ = make_optimizer(optimizer)
    graph, state = init_target(model, transform)
    step = TargetStep(graph, transform, TargetRules(dense_steps=steps // 4))
    precompile(step.sparse, state, stream.at(0))
    state = train(step, state, stream, steps, folder=work / "target", save_every=max(steps // 4, 1), report=_print)
    return graph, state


def train_drafter(
    target: DeepseekV4,
    stages: DSpark,
    stream: TokenStream,
    steps: int,
    anchors: int,
    work: Path,
    optimizer: OptimizerConfig,
):
    """Trains the stages against the frozen target; returns (graph, state)."""
    transform, _ = make_optimizer(optimizer)
    target_graph, frozen = nnx.split(target)
    graph, state = init_drafter(stages, transform)
    step = drafter_step(target_graph, graph, transform, anchors=anchors, bos=target.config.bos_token_id, seed=3)
    state = train(
        lambda s, tokens, _: step(s, frozen, tokens), state, stream, steps,
        folder=work / "draft", save_every=max(steps // 4, 1), report=_print,
    )  # fmt: skip
    return graph, state


def precompile(program, *arguments) -> None:
    """Compiles in the background into the persistent cache, where the first real call finds it."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
    threading.Thread(target=lambda: program.lower(*shapes).compile(), daemon=True).start()


def bits_per_byte(
    graph, state, tokens: np.ndarray, num_bytes: int, bos: int, select: Select = "indexer", batch: int = 16
) -> float:
    """Held-out bits per byte of a whole stream, cut into sequences of LENGTH tokens that each begin with no context.

    Every token is scored but the first of the stream and the separators `bos`, which stand for no bytes.
    """
    run = evaluate_target(graph, select)
    span = LENGTH * batch
    tokens = tokens.astype(np.int32)
    padded = np.zeros(-(-(len(tokens) - 1) // span) * span, np.int32)
    labels = np.full_like(padded, -1)
    padded[: len(tokens) - 1] = tokens[:-1]
    labels[: len(tokens) - 1] = np.where(tokens[1:] == bos, -1, tokens[1:])
    total = sum(
        float(
            run(
                state.params,
                state.fixed,
                padded[i : i + span].reshape(batch, LENGTH),
                labels[i : i + span].reshape(batch, LENGTH),
            )
        )
        for i in range(0, len(padded), span)
    )
    return total / np.log(2) / num_bytes


def _print(record: dict) -> None:
    print(json.dumps({k: v for k, v in record.items() if k != "total"}), flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--corpus", type=Path, default=Path(".corpus"))
    parser.add_argument(
        "--work", type=Path, default=Path(".nano"), help="checkpoints and logs; an interrupted run resumes here"
    )
    parser.add_argument("--out", type=Path, default=Path("dspark_jax/assets/nano"))
    parser.add_argument(
        "--target", type=Path, help="take the target from this checkpoint folder and train the stages alone"
    )
    parser.add_argument("--target-steps", type=int, default=10_000)
    parser.add_argument("--draft-steps", type=int, default=10_000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--draft-batch", type=int, default=32)
    parser.add_argument("--anchors", type=int, default=256)
    parser.add_argument(
        "--peak", type=float, default=4e-3, help="peak learning rate of the target; the stages take half of it"
    )
    return parser.parse_args()


def main() -> None:
    args = _arguments()
    began = time.perf_counter()
    config, draft = nano_config()
    tokens = np.ascontiguousarray(load_tokens(args.corpus / "train.npy", config.vocab_size))
    model = SpeculativeLM(config, draft, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    sizes = {
        k: sum(x.size for x in jax.tree.leaves(nnx.state(m)))
        for k, m in (("target", model.target), ("draft", model.draft))
    }
    record: dict = {"device": jax.devices()[0].device_kind, "parameters": sizes, "tokens": len(tokens)}
    record["arguments"] = {k: str(v) for k, v in vars(args).items() if k not in ("corpus", "work", "out")}
    print(json.dumps(record), flush=True)

    if args.target:
        loaded = read_checkpoint(args.target, dtype=jnp.float32)
        model.target = _with_dtype(config, draft, nnx.merge(loaded.graph, loaded.params).target)
    else:
        set_hash_tables(model.target.layers, np.bincount(tokens[:20_000_000], minlength=config.vocab_size))
        steps = args.target_steps
        optimizer = OptimizerConfig(peak=args.peak, steps=steps, warmup=min(200, steps // 4))
        graph, state = train_target(
            model.target, TokenStream(tokens, LENGTH, args.batch, seed=1), steps, args.work, optimizer
        )
        model.target = nnx.merge(graph, state.params, state.fixed)
        alone = SpeculativeLM(config, None, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        alone.target = model.target
        write_checkpoint(args.work / "target-only", config, None, nnx.split(alone)[1])
        record["target_seconds"] = round(time.perf_counter() - began, 1)
        record["bits_per_byte"] = {}
        for kind in ("code", "prose"):
            valid = np.load(args.corpus / f"valid_{kind}.npy")
            size = (args.corpus / f"valid_{kind}.txt").stat().st_size
            record["bits_per_byte"][kind] = {
                s: round(bits_per_byte(graph, state, valid, size, config.bos_token_id, s), 4)
                for s in ("indexer", "random", "all")
            }
        print(json.dumps(record["bits_per_byte"]), flush=True)

    steps = args.draft_steps
    optimizer = OptimizerConfig(peak=args.peak / 2, steps=steps, warmup=min(200, steps // 4))
    stream = TokenStream(tokens, LENGTH, args.draft_batch, seed=2)
    draft_graph, draft_state = train_drafter(
        model.target, model.draft, stream, steps, args.anchors, args.work, optimizer
    )
    model.draft = nnx.merge(draft_graph, draft_state.params, draft_state.fixed)
    write_checkpoint(args.out, config, draft, nnx.split(model)[1])
    shutil.copy(args.corpus / "tokenizer.json", args.out / "tokenizer.json")
    record["seconds"] = round(time.perf_counter() - began, 1)
    for part in ("target", "draft"):
        if (log := args.work / part / "log.jsonl").exists():
            record[part] = json.loads(log.read_text().splitlines()[-1])
    (args.out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    print(
        json.dumps({"seconds": record["seconds"], "bytes": sum(f.stat().st_size for f in args.out.iterdir())}),
        flush=True,
    )


def _with_dtype(config: TargetConfig, draft: DraftConfig, target: DeepseekV4) -> DeepseekV4:
    """The same parameters in a module that taps for `draft`, computes in bf16, and runs outside a mesh."""
    graph, _ = nnx.split(
        nnx.eval_shape(lambda: DeepseekV4(config, taps=draft.target_layer_ids, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    )
    return nnx.merge(graph, nnx.split(target)[1])


if __name__ == "__main__":
    main()
