"""Training a DSpark or DFlash drafter for a dense model: the target writes conversations, the drafter learns them, and is
exported in DeepSpec's layout (`dspark-jax train`).

An interrupted run goes on where it was when it is started again with the same settings and work folder.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dspark_jax.api import is_gguf, model_folder
from dspark_jax.chat import ChatTemplate, read_chat
from dspark_jax.checkpoint.reader import open_checkpoint, read_tokenizer
from dspark_jax.checkpoint.writer import write_drafter
from dspark_jax.config import HeadKind
from dspark_jax.config_dense import DenseConfig
from dspark_jax.config_drafter import StandaloneConfig
from dspark_jax.drafters.standalone import Standalone
from dspark_jax.errors import ConfigError, RequestError, raise_all
from dspark_jax.models.qwen3 import Qwen3
from dspark_jax.parallel.mesh import checked_mesh
from dspark_jax.train.conversations import Conversations, ConversationStream, answers
from dspark_jax.train.loop import train
from dspark_jax.train.optimizer import OptimizerConfig, make_optimizer
from dspark_jax.train.recipe import Progress
from dspark_jax.train.rollout import Prompts, Rollout
from dspark_jax.train.standalone import init_training, training_step

_PATIENCE = 4  # batches without one question
_MARK = "\x02"  # stands for a user's words while the template's opening is looked for


@dataclass(frozen=True)
class DrafterRecipe:
    """What is trained, and on what.

    Attributes:
      block_size: drafts of a round, gamma.
      layers: the drafter's own.
      intermediate: width of their MLPs; None: as wide as the target's.
      taps: target layers that it reads; empty: five, spread as DeepSpec does.
      head, markov_rank: the sequential head; "none" for DFlash, which has no confidence head either.
      mask_token_id: fills the rows behind the anchor; None: the vocabulary's last id.
      conversations: how many the target writes.
      prompt_tokens, answer_tokens: most of a conversation's two parts.
      temperatures: of the answers, in turn.
      openings: how questions that the model makes up begin, in turn; "": as it likes. They steer what it asks about.
      steps, batch, anchors, peak: optimiser steps, conversations a step, blocks of a conversation, highest learning rate.
      slots: conversations that are written side by side.
      seed: of everything drawn.
    """

    block_size: int = 7
    layers: int = 2
    intermediate: int | None = None
    taps: tuple[int, ...] = ()
    head: HeadKind = "markov"
    markov_rank: int = 64
    mask_token_id: int | None = None
    conversations: int = 50_000
    prompt_tokens: int = 128
    answer_tokens: int = 384
    temperatures: tuple[float, ...] = (0.0, 1.0)
    openings: tuple[str, ...] = ("",)
    steps: int = 10_000
    batch: int = 32
    anchors: int = 64
    peak: float = 2e-3
    slots: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"block_size": 1, "layers": 1, "conversations": 1, "prompt_tokens": 2, "answer_tokens": 2, "steps": 4}
        least |= {"batch": 1, "anchors": 1, "slots": 1, "markov_rank": 1, "seed": 0}
        faults = [f"{n} is {getattr(self, n)}; expected at least {low}" for n, low in least.items() if getattr(self, n) < low]
        if self.intermediate is not None and self.intermediate < 1:
            faults.append(f"intermediate is {self.intermediate}; expected at least 1, or None for the target's width")
        if not self.peak > 0:
            faults.append(f"peak is {self.peak}; expected more than 0")
        if not self.temperatures or not all(0 <= t < 100 for t in self.temperatures):
            faults.append(f"temperatures is {self.temperatures}; expected some, each at least 0")
        if not self.openings:
            faults.append("openings is empty; expected at least one, of which one may be an empty text")
        raise_all(ConfigError, "train", faults)

    def drafter(self, target: DenseConfig) -> StandaloneConfig:
        """Its configuration on `target`. Raises ConfigError for an impossible one."""
        count = target.num_hidden_layers
        spread = np.linspace(1, max(count - 3, 1), 5).round().astype(int).tolist()
        taps = self.taps or tuple(dict.fromkeys(min(t, count - 2) for t in spread))
        found = StandaloneConfig(
            layers=replace(
                target,
                num_hidden_layers=self.layers,
                intermediate_size=self.intermediate or target.intermediate_size,
                qk_norm=True,
                tie_word_embeddings=False,
            ),
            block_size=self.block_size,
            mask_token_id=target.vocab_size - 1 if self.mask_token_id is None else self.mask_token_id,
            target_layer_ids=taps,
            head=self.head,
            markov_rank=0 if self.head == "none" else self.markov_rank,
            confidence="none" if self.head == "none" else "markov",
            draft_vocab_size=target.vocab_size,
            own_embedding=False,
            own_head=False,
            num_target_layers=count,
        )
        raise_all(ConfigError, "train", found.faults(target))
        return found


@dataclass
class Target:
    """The frozen target as training uses it: parameters on all devices of the mesh."""

    config: DenseConfig
    model: Qwen3
    tokenizer: Any
    chat: ChatTemplate | None

    @classmethod
    def read(cls, model: str | Path, taps: Sequence[int], mesh: Mesh, dtype: Any) -> "Target":
        """Reads a folder or GGUF file. Raises ConfigError for a model that is not dense."""
        if is_gguf(model):
            from dspark_jax.checkpoint.gguf_file import open_gguf

            loaded, tokenizer, chat = open_gguf(Path(model), dtype=dtype)
        else:
            folder = model_folder(model)
            loaded, tokenizer = open_checkpoint(folder, dtype=dtype), read_tokenizer(folder)
            chat = read_chat(folder, tokenizer)
        if not isinstance(loaded.config, DenseConfig):
            raise ConfigError(
                f"train: target {str(model)!r} is a DeepSeek-V4-style model, whose drafter is part of its checkpoint; expected"
                " a dense model (`python -m dspark_jax.train.nano` shows the training of embedded stages)"
            )
        everywhere = NamedSharding(mesh, PartitionSpec())
        params = jax.tree.map(lambda p: jax.device_put(np.asarray(p), everywhere), loaded.params)
        found = nnx.merge(loaded.graph, params).target
        found.taps = tuple(taps)
        return cls(loaded.config, found, tokenizer, chat)

    def prompt(self, words: str) -> list[int]:
        """Ids of a user's words in the chat template, or as they are where the model has none."""
        if self.chat is not None:
            return self.chat.encode([{"role": "user", "content": words}])
        begin = [] if self.config.bos_token_id is None else [self.config.bos_token_id]
        return [*begin, *self.tokenizer.encode(words, add_special_tokens=False).ids]


def train_drafter(
    model: str | Path,
    out: Path,
    work: Path,
    recipe: DrafterRecipe,
    *,
    prompts: Sequence[str] | None = None,
    invent: bool = False,
    mesh: Mesh | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    seconds: float | None = None,
    report: Callable[[dict[str, Any]], None] = lambda record: None,
) -> bool:
    """Writes the drafter to `out`; False where `seconds` were over before, and the same call goes on from `work`.

    Args:
      model: a dense model's folder or GGUF file.
      out: folder of the finished drafter in DeepSpec's layout, with its model card.
      work: conversations, checkpoints and logs.
      recipe: what is trained.
      prompts: users' words; None: the target makes them up itself, from the opening of a user's turn.
      invent: beside `prompts`, every second conversation has a prompt that the target makes up.
      mesh: the conversations of a step are split over all its devices.
      dtype: of the target and of activations; the drafter's parameters are float32 while it is trained.
      report: gets records of progress.

    Raises ConfigError for impossible settings, or for a work folder of others; `TrainingDiverged` at a step that is not finite.
    """
    mesh = checked_mesh(mesh)
    default = jnp.float32 if mesh.devices.flat[0].platform == "cpu" else jnp.bfloat16
    dtype = default if dtype is None else dtype
    if recipe.batch % mesh.size or recipe.slots % mesh.size:
        raise ConfigError(f"train: batch is {recipe.batch}, slots is {recipe.slots}; expected multiples of {mesh.size} devices")
    target = Target.read(model, (), mesh, dtype)
    draft = recipe.drafter(target.config)
    target.model.taps = draft.target_layer_ids
    _check(target.config, recipe, out, work, prompts, invent)
    written = hashlib.sha256(json.dumps(prompts).encode()).hexdigest() if prompts is not None else ""
    if prompts is not None and invent:
        written += " and invented ones"
    settings = {"model": Path(model).name, "dtype": jnp.dtype(dtype).name, "prompts": written}
    progress = Progress(work, {**settings, **{k: _plain(v) for k, v in asdict(recipe).items()}})
    began = time.monotonic()

    def late() -> bool:
        return seconds is not None and time.monotonic() - began > seconds

    data = _conversations(target, recipe, work, prompts, invent, progress, report)
    progress.note(conversations=len(data.token), tokens=int((data.count - data.prompt).sum()))
    steps = recipe.steps
    optimizer, _ = make_optimizer(OptimizerConfig(recipe.peak, steps, min(200, steps // 4), weight_decay=0.0))
    everywhere, by_row = (NamedSharding(mesh, spec) for spec in (PartitionSpec(), PartitionSpec(mesh.axis_names)))
    graph, state = init_training(Standalone(draft, rngs=nnx.Rngs(recipe.seed)), optimizer)
    state = jax.device_put(state, everywhere)
    target_graph, frozen = nnx.split(target.model)
    step = training_step(target_graph, graph, optimizer, anchors=recipe.anchors, seed=recipe.seed)
    state = train(
        lambda state, data, _: step(state, frozen, jax.device_put(data, by_row)),
        state, ConversationStream(data, recipe.batch, recipe.seed), steps,
        folder=work / "drafter", save_every=min(500, max(steps // 4, 1)), log_every=min(50, max(steps // 10, 1)),
        report=report, stop=late,
    )  # fmt: skip
    progress.note()
    if int(state.step) < steps:
        return False
    write_drafter(out, draft, nnx.State({"draft": nnx.merge_state(state.params, state.fixed)}), max_shard_bytes=2**24)
    last = json.loads((work / "drafter/log.jsonl").read_text().splitlines()[-1])
    progress.note(device=mesh.devices.flat[0].device_kind, devices=mesh.size, last=last)
    (out / "training.json").write_text(json.dumps(progress.values, indent=1) + "\n")
    (out / "README.md").write_text(_card(draft, recipe, progress.values))
    return True


def _check(
    target: DenseConfig, recipe: DrafterRecipe, out: Path, work: Path, prompts: Sequence[str] | None, invent: bool
) -> None:
    """Raises ConfigError for what would otherwise be found after hours."""
    faults, limit = [], target.max_position_embeddings
    if (tokens := recipe.prompt_tokens + recipe.answer_tokens) > limit:
        faults.append(f"prompt_tokens and answer_tokens are {tokens} together; expected at most the target's {limit} positions")
    if recipe.layers > target.num_hidden_layers:
        faults.append(f"layers is {recipe.layers}; expected at most the target's {target.num_hidden_layers}")
    count = recipe.conversations if prompts is None else min(recipe.conversations, len(prompts) * (1 + invent))
    if count < recipe.batch:
        faults.append(f"batch is {recipe.batch}, and there can be {count} conversations; expected at most as many")
    for name, folder in (("out", out), ("work", work)):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            faults.append(f"{name} is {str(folder)!r}, which cannot be made a folder ({error.strerror}); choose another")
    raise_all(ConfigError, "train", faults)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _conversations(
    target: Target,
    recipe: DrafterRecipe,
    work: Path,
    prompts: Sequence[str] | None,
    invent: bool,
    progress: Progress,
    report: Callable[[dict[str, Any]], None],
) -> Conversations:
    """The target's answers, kept in `work`."""
    path = work / "conversations.npz"
    if path.is_file():
        return Conversations.read(path)
    graph, states = nnx.split(target.model)
    rollout = Rollout(graph, recipe.slots, recipe.prompt_tokens, recipe.answer_tokens, target.config.eos_token_ids)
    began = time.monotonic()
    data = answers(
        rollout, (states,), map(target.prompt, _words(target, recipe, prompts, invent)), values=recipe.temperatures,
        seed=recipe.seed, wanted=recipe.conversations, report=report,
    )  # fmt: skip
    data.save(path)
    progress.note(writing_seconds=round(time.monotonic() - began, 1))
    return data


def _words(target: Target, recipe: DrafterRecipe, prompts: Sequence[str] | None, invent: bool) -> Iterator[str]:
    """What users say: `prompts`, what the target makes up, or both in turn as long as there are prompts."""
    if prompts is None:
        return _questions(target, recipe)
    return chain.from_iterable(zip(prompts, _questions(target, recipe), strict=False)) if invent else iter(prompts)


def _questions(target: Target, recipe: DrafterRecipe) -> Iterator[str]:
    """What the model itself says in a user's turn that the template has only opened; without end."""
    if target.chat is None:
        raise ConfigError("train: the model has no chat template whose user turn it could fill; give prompts")
    text = target.chat.render([{"role": "user", "content": _MARK}], add_generation_prompt=False).partition(_MARK)[0]
    begun = [target.tokenizer.encode(text + opening, add_special_tokens=False).ids for opening in recipe.openings]
    graph, states = nnx.split(target.model)
    rollout = Rollout(graph, recipe.slots, max(map(len, begun)), recipe.prompt_tokens, target.config.eos_token_ids)
    prompts = Prompts(
        np.zeros((recipe.slots, rollout.prompt), np.int32),
        np.asarray([len(begun[i % len(begun)]) for i in range(recipe.slots)], np.int32),
    )
    for i, count in enumerate(prompts.length):
        prompts.token[i, :count] = begun[i % len(begun)]
    index = barren = 0
    while barren < _PATIENCE:
        seeds = np.random.default_rng([recipe.seed, index, 2]).integers(0, 2**32, recipe.slots, dtype=np.uint32)
        new = jax.device_get(rollout((states,), prompts, np.ones(recipe.slots, np.float32), seeds))
        index, barren = index + 1, barren + 1
        for i, (token, count) in enumerate(zip(new.token, new.count, strict=True)):
            if token[count - 1] not in target.config.eos_token_ids:
                continue  # the turn was cut off
            opening = recipe.openings[i % len(recipe.openings)]
            words = (opening + target.tokenizer.decode(token[: count - 1].tolist())).strip()
            try:
                if words and target.prompt(words):
                    barren = 0
                    yield words
            except RequestError:
                continue  # it spells a control token
    raise ConfigError(
        f"train: in {_PATIENCE * recipe.slots} user turns in a row the model did not come to an end within prompt_tokens ="
        f" {recipe.prompt_tokens}; allow longer prompts, or give some"
    )


def _prompts_of(recipe: DrafterRecipe, record: dict[str, Any]) -> str:
    given = record["settings"]["prompts"]
    if given and " " not in given:
        return "given prompts"
    begun = f", begun in turn by {json.dumps(recipe.openings)}" if any(recipe.openings) else ""
    return ("given prompts, in turn with " if given else "") + "prompts that it made up" + begun


def _card(draft: StandaloneConfig, recipe: DrafterRecipe, record: dict[str, Any]) -> str:
    """The model card."""
    last, writing = record["last"], record.get("writing_seconds")
    written = "the conversations were there before" if writing is None else f"{writing:.0f} s before it for the conversations"
    rows = {
        "target": record["settings"]["model"],
        "drafter": f"{draft.summary}; {draft.layers.num_hidden_layers} layers",
        "data": f"{record['conversations']} conversations of the target's own ({record['tokens']} tokens of answers,"
        f" temperatures {list(recipe.temperatures)}), to {_prompts_of(recipe, record)}",
        "recipe": f"{recipe.steps} steps of {recipe.batch} conversations and {recipe.anchors} blocks each, Muon at"
        f" {recipe.peak}; losses .1 CE + .9 L1 + 1 confidence, weights exp(-k/4) (DSpark paper, section 4)",
        "time": f"{last['seconds']:.0f} s of training on {record['devices']} × {record['device']}; {written}",
        "last step": f"tau {last['tau']:.2f} at temperature 1, {last['greedy_tau']:.2f} greedy: teacher-forced, training data",
    }
    lines = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return (
        "# A speculative-decoding drafter\n\nMade by `dspark-jax train`, in DeepSpec's layout; it borrows the target's"
        f" embedding and output head.\n\n| | |\n|---|---|\n{lines}\n"
    )
