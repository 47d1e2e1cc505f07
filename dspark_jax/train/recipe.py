"""The stages of the nano recipe, in order; a stage that an earlier run finished is read from the work folder."""

import json
import shutil
import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dspark_jax.checkpoint.reader import read_checkpoint
from dspark_jax.checkpoint.writer import write_checkpoint
from dspark_jax.config import DraftConfig, TargetConfig
from dspark_jax.errors import ConfigError
from dspark_jax.models.deepseek_v4 import DeepseekV4
from dspark_jax.models.speculative import SpeculativeLM
from dspark_jax.train.background import Background
from dspark_jax.train.balance import set_hash_tables
from dspark_jax.train.data import TokenStream, mix
from dspark_jax.train.drafter import drafter_step, init_drafter
from dspark_jax.train.judge import Judge
from dspark_jax.train.loop import train
from dspark_jax.train.optimizer import OptimizerConfig, make_optimizer
from dspark_jax.train.regenerate import regenerate, save_tokens
from dspark_jax.train.rollout import PromptSource, Rollout
from dspark_jax.train.target import TargetRules, TargetStep, TrainState, init_target, trainable
from dspark_jax.train.unlikelihood import PolishRules, PolishStep


class OutOfTime(Exception):
    """The time is up; the work folder holds everything that a later run needs to go on."""


class Progress:
    """What the runs in a work folder have done so far, in its record.json: figures, finished stages, seconds."""

    def __init__(self, folder: Path, settings: dict[str, Any]):
        self.path, self.began = folder / "record.json", time.monotonic()
        self.values: dict[str, Any] = json.loads(self.path.read_text()) if self.path.is_file() else {}
        old = self.values.setdefault("settings", settings)
        if changed := [k for k in {**old, **settings} if old.get(k) != settings.get(k)]:
            pairs = ", ".join(f"{k} {old.get(k)} and now {settings.get(k)}" for k in changed)
            raise ConfigError(f"--work {folder}: it was begun with other settings ({pairs}); use a fresh folder")
        self.before = self.values.get("seconds", 0.0)

    def seconds(self) -> float:
        """Seconds of all runs in this folder."""
        return self.before + time.monotonic() - self.began

    def done(self, stage: str) -> bool:
        return stage in self.values.get("seconds_after", {})

    def note(self, **values: Any) -> None:
        """Keeps figures at once."""
        self.values |= {**values, "seconds": round(self.seconds(), 1)}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.values, indent=1) + "\n")
        part.replace(self.path)

    def finish(self, stage: str) -> None:
        after = {**self.values.get("seconds_after", {}), stage: round(self.seconds(), 1)}
        self.note(seconds_after=after)
        print(json.dumps({"finished": stage, "seconds": after[stage]}), flush=True)


class DrafterTraining:
    """The drafter's training. Its program compiles from construction on, beside whatever runs before it."""

    def __init__(self, target: DeepseekV4, model: SpeculativeLM, args: Namespace, length: int):
        assert model.draft is not None
        self.steps = args.draft_steps
        config = OptimizerConfig(peak=args.draft_peak, steps=self.steps, warmup=min(200, self.steps // 4))
        optimizer, _ = make_optimizer(config)
        graph, frozen = nnx.split(target)
        self.graph, self.state = init_drafter(model.draft, optimizer)
        step = drafter_step(graph, self.graph, optimizer, anchors=args.anchors, bos=target.config.bos_token_id, seed=3)
        shape = jax.ShapeDtypeStruct((args.draft_batch, length + 1), jnp.int32)
        self.step = Background(step, self.state, frozen, shape)

    def run(self, target: DeepseekV4, stream: Any, **options: Any) -> TrainState:
        """Trains the stages against the frozen target."""
        frozen = nnx.split(target)[1]
        return train(lambda state, x, _: self.step(state, frozen, x), self.state, stream, self.steps, **options)

    def stages(self, state: TrainState) -> Any:
        return nnx.merge(self.graph, state.params, state.fixed)


class Recipe:
    """Runs the stages on one device.

    `length`, `prompt`, `new`, `shortest`: tokens of a training sequence, of a rollout's longest prompt and
    continuation, and of its shortest prompt.
    """

    def __init__(
        self,
        args: Namespace,
        config: TargetConfig,
        draft: DraftConfig,
        tokens: np.ndarray,
        progress: Progress,
        *,
        length: int,
        prompt: int,
        new: int,
        shortest: int,
    ):
        self.args, self.config, self.draft, self.tokens, self.progress = args, config, draft, tokens, progress
        self.length, self.shortest = length, shortest
        self.trained = False  # whether this run has trained something yet: every run gets on by a stage or a checkpoint
        self.model = SpeculativeLM(config, draft, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        graph = nnx.split(self.model.target, trainable, ...)[0]
        self.rollout = Rollout(graph, args.slots, prompt, new, config.eos_token_id)
        sizes = {"target": self.model.target, "draft": self.model.draft}
        progress.note(
            device=jax.devices()[0].device_kind,
            parameters={k: sum(x.size for x in jax.tree.leaves(nnx.state(m))) for k, m in sizes.items()},
            tokens=len(tokens),
        )

    def run(self) -> None:
        """All stages. Raises OutOfTime where `--seconds` are over."""
        args, work, done = self.args, self.args.work, self.progress.done
        if not args.target and not done("target"):
            self._pretrain()
        target = read_target(args.target or work / "target-only", self.config, self.draft)
        drafter = DrafterTraining(target, self.model, args, self.length)
        if args.polish_steps:
            if not done("polish"):
                self._polish(target)
            target = read_target(work / "polished", self.config, self.draft)
        elif "target_quality" not in self.progress.values:
            self.progress.note(target_quality=self._judge(target)(target))
        self._draft(drafter, target, self._own_text(target))

    def _pretrain(self) -> None:
        args, target = self.args, self.model.target
        set_hash_tables(target.layers, np.bincount(self.tokens[:20_000_000], minlength=self.config.vocab_size))
        steps = args.target_steps
        transform, _ = make_optimizer(OptimizerConfig(peak=args.peak, steps=steps, warmup=min(200, steps // 4)))
        graph, state = init_target(target, transform)
        stream = TokenStream(self.tokens, self.length, args.batch, seed=1)
        step = TargetStep(graph, transform, TargetRules(dense_steps=steps // 4))
        step.sparse = Background(step.sparse, state, stream.at(0))  # compiles while the dense steps run
        state = self._train("target", step, state, stream, steps, save_every=250, log_every=50)
        write_target(args.work / "target-only", self.config, nnx.merge(graph, state.params, state.fixed))
        self.progress.finish("target")

    def _polish(self, target: DeepseekV4) -> None:
        args, steps, bos = self.args, self.args.polish_steps, self.config.bos_token_id
        config = OptimizerConfig(args.polish_peak, steps, min(20, steps // 4), weight_decay=0.0, kind="adamw")
        transform, _ = make_optimizer(config)
        graph, state = init_target(target, transform)
        before = jax.device_get((state.params, state.fixed))
        source = PromptSource(self.tokens, self.shortest, self.rollout.prompt, bos, seed=5)
        rules = PolishRules(weight=args.polish_weight, goal=args.distinct_goal, batch=args.batch)
        step = PolishStep(graph, transform, self.rollout, source, rules)
        stream = TokenStream(self.tokens, self.length, args.batch, seed=4)
        step.compile(state, stream.at(0))
        judge = self._judge(target)
        if "target_quality" not in self.progress.values:
            self.progress.note(target_quality=judge(target))
        # Checkpoints lie where a pool is drawn anew, so that a resumed run sees the same pools.
        state = self._train("polish", step, state, stream, steps, save_every=4 * step.refresh, log_every=20)
        mixed = jax.tree.map(partial(_between, share=args.polish_share), before, (state.params, state.fixed))
        write_target(args.work / "polished", self.config, nnx.merge(graph, *mixed))
        polished = read_target(args.work / "polished", self.config, self.draft)
        self.progress.note(polished_quality=judge(polished))
        self.progress.finish("polish")

    def _own_text(self, target: DeepseekV4) -> np.ndarray:
        """The target's own text, none of it if none is wanted."""
        args, path = self.args, self.args.work / "regenerated.npy"
        if not args.regenerate_tokens or not args.regenerated_share:
            return self.tokens[:0]
        if self.progress.done("regenerate"):
            return np.load(path)
        if self._late() and self.trained:
            raise OutOfTime
        source = PromptSource(self.tokens, self.shortest, self.rollout.prompt, self.config.bos_token_id, seed=6)
        _, *states = nnx.split(target, trainable, ...)
        own = regenerate(
            self.rollout, tuple(states), source, args.regenerate_tokens, report=lambda n: _print({"regenerated": n})
        )
        save_tokens(path, own)
        self.progress.note(regenerated_tokens=len(own))
        self.progress.finish("regenerate")
        return own

    def _draft(self, drafter: DrafterTraining, target: DeepseekV4, own: np.ndarray) -> None:
        args = self.args
        share = args.regenerated_share if len(own) else 0.0
        stream = mix(self.tokens, own, share, self.length, args.draft_batch, seed=2)
        state = drafter.run(target, stream, **self._options("draft", 500, 50))
        self._in_time(state, args.draft_steps)
        model = self.model
        model.target, model.draft = target, drafter.stages(state)
        write_checkpoint(args.out, self.config, self.draft, nnx.split(model)[1])
        shutil.copy(args.corpus / "tokenizer.json", args.out / "tokenizer.json")
        for part in ("target", "polish", "draft"):
            if (log := args.work / part / "log.jsonl").exists():
                self.progress.note(**{part: json.loads(log.read_text().splitlines()[-1])})
        self.progress.finish("draft")
        (args.out / "training.json").write_text(json.dumps(self.progress.values, indent=1) + "\n")
        _print({"seconds": self.progress.values["seconds"], "bytes": sum(f.stat().st_size for f in args.out.iterdir())})

    def _train(
        self, part: str, step: Callable, state: TrainState, stream: Any, steps: int, save_every: int, log_every: int
    ) -> TrainState:
        state = train(step, state, stream, steps, **self._options(part, save_every, log_every))
        self.trained = True
        self._in_time(state, steps)
        return state

    def _options(self, part: str, save_every: int, log_every: int) -> dict[str, Any]:
        return {
            "folder": self.args.work / part,
            "save_every": save_every,
            "log_every": log_every,
            "report": _print,
            "stop": self._late,
        }

    def _judge(self, target: DeepseekV4) -> Judge:
        return Judge(target, self.args.corpus, self.rollout, self.length, self.shortest)

    def _late(self) -> bool:
        limit = self.args.seconds
        return limit is not None and time.monotonic() - self.progress.began > limit

    def _in_time(self, state: TrainState, steps: int) -> None:
        if int(state.step) < steps:
            self.progress.note()
            raise OutOfTime


def write_target(folder: Path, config: TargetConfig, target: DeepseekV4) -> None:
    """Writes the target as a checkpoint of its own."""
    alone = SpeculativeLM(config, None, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    alone.target = target
    write_checkpoint(folder, config, None, nnx.split(alone)[1])


def read_target(folder: Path, config: TargetConfig, draft: DraftConfig) -> DeepseekV4:
    """A checkpoint's target as trainings use it: fp32 parameters, bf16 activations, `draft`'s taps, no mesh."""
    loaded = read_checkpoint(folder, dtype=jnp.float32)
    if loaded.config != config:
        raise ConfigError(f"--target {folder}: its config.json is not that of nano_config(); train a target instead")
    target = nnx.merge(loaded.graph, loaded.params).target
    graph, _ = nnx.split(
        nnx.eval_shape(lambda: DeepseekV4(config, taps=draft.target_layer_ids, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    )
    return nnx.merge(graph, nnx.split(target)[1])


def _between(before: np.ndarray, after: jax.Array, share: float) -> jax.typing.ArrayLike:
    """The point at `share` of the way between two weights; integer tables stay as they are.

    Half-way weights keep most of what a fine-tuning gains and lose less of what was there (Wortsman et al. 2022).
    """
    if not jnp.issubdtype(after.dtype, jnp.floating):
        return after
    return (1 - share) * before + share * after


def _print(record: dict[str, Any]) -> None:
    print(json.dumps({k: v for k, v in record.items() if k != "total"}), flush=True)
