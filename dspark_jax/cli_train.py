"""`dspark-jax train`: a DSpark or DFlash drafter for a dense model, from conversations that the model writes itself."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from dspark_jax.cli_devices import EmulateOption, MeshOption, chosen_mesh
from dspark_jax.cli_guard import guarded
from dspark_jax.errors import ConfigError

_HEADS = {"vanilla": "markov", "gated": "gated", "rnn": "rnn", "none": "none"}


@guarded
def train(
    model: Annotated[str, typer.Option("--model", "--target", help="Folder of a dense model, or a GGUF file.")],
    out: Annotated[Path, typer.Option(help="Folder of the finished drafter, in DeepSpec's layout.")],
    work: Annotated[Path, typer.Option(help="Conversations, checkpoints and logs; the same command goes on from here.")],
    prompts: Annotated[
        Path | None, typer.Option(help='JSONL file with a "prompt" on each line; by default the model makes them up.')
    ] = None,
    openings: Annotated[
        Path | None,
        typer.Option(help="JSON list of texts with which made-up prompts begin, in turn; with --prompts half are made up."),
    ] = None,
    head: Annotated[str, typer.Option(help="Sequential head: vanilla, gated, rnn, or none (DFlash).")] = "vanilla",
    block_size: Annotated[int, typer.Option(help="Drafts of a round.")] = 7,
    layers: Annotated[int, typer.Option(help="The drafter's own layers.")] = 2,
    intermediate: Annotated[int | None, typer.Option(help="Width of their MLPs; by default the target's.")] = None,
    taps: Annotated[
        str, typer.Option(help="Target layers that it reads, as in 1,7,14,20,27; by default five, evenly spread.")
    ] = "",
    markov_rank: Annotated[int, typer.Option(help="Rank of the sequential head.")] = 64,
    mask_token: Annotated[
        int | None, typer.Option(help="Id that fills the rows behind the anchor; by default the vocabulary's last.")
    ] = None,
    conversations: Annotated[int, typer.Option(help="Conversations that the target writes.")] = 50_000,
    prompt_tokens: Annotated[int, typer.Option(help="Most tokens of a prompt; longer ones are left out.")] = 128,
    answer_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 384,
    temperatures: Annotated[str, typer.Option(help="Of the answers, in turn.")] = "0,1",
    steps: Annotated[int, typer.Option(help="Optimiser steps.")] = 10_000,
    batch: Annotated[int, typer.Option(help="Conversations of a step.")] = 32,
    anchors: Annotated[int, typer.Option(help="Blocks of a conversation.")] = 64,
    learning_rate: Annotated[float, typer.Option(help="The highest; warmed up, then a cosine.")] = 2e-3,
    slots: Annotated[int, typer.Option(help="Conversations that are written side by side.")] = 512,
    seed: Annotated[int, typer.Option(help="Of everything drawn.")] = 0,
    seconds: Annotated[
        float | None, typer.Option(help="Stop at the first checkpoint behind so many seconds, with exit code 3.")
    ] = None,
    mesh: MeshOption = None,
    emulate_devices: EmulateOption = None,
) -> None:
    """Train a drafter for a dense model; `evaluate --drafter` then measures it."""
    if head not in _HEADS:
        raise ConfigError(f"--head is {head!r}; expected one of {', '.join(_HEADS)}")
    from dspark_jax.evaluate import read_prompts
    from dspark_jax.train.separate import DrafterRecipe, train_drafter

    recipe = DrafterRecipe(
        block_size=block_size, layers=layers, taps=tuple(_numbers("--taps", taps, int)), head=_HEADS[head],  # type: ignore[arg-type]
        markov_rank=markov_rank, mask_token_id=mask_token, conversations=conversations, prompt_tokens=prompt_tokens,
        answer_tokens=answer_tokens, temperatures=tuple(_numbers("--temperatures", temperatures, float)), steps=steps,
        batch=batch, anchors=anchors, peak=learning_rate, slots=slots, seed=seed, openings=_openings(openings),
        intermediate=intermediate,
    )  # fmt: skip
    words = None if prompts is None else [p.prompt for p in read_prompts(prompts)]
    chosen = chosen_mesh(mesh, emulate_devices)[1]
    invent = openings is not None
    if not train_drafter(
        model, out, work, recipe, prompts=words, invent=invent, mesh=chosen, seconds=seconds, report=_say
    ):
        print(f"time is up; the same command goes on from {work}", file=sys.stderr)
        raise typer.Exit(3)
    print(json.dumps({"out": str(out), "bytes": sum(file.stat().st_size for file in out.iterdir())}))


def _openings(path: Path | None) -> tuple[str, ...]:
    if path is None:
        return ("",)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--openings: {str(path)!r} cannot be read ({error.strerror}); check the path") from None
    except ValueError as error:
        raise ConfigError(f"--openings: {str(path)!r} is not JSON ({error}); expected a list of texts") from None
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise ConfigError(f'--openings: {str(path)!r} holds {found!r:.80}; expected a list of texts, as in ["", "How many"]')
    return tuple(found)


def _numbers(name: str, text: str, kind: type) -> list[Any]:
    try:
        return [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ConfigError(f"{name} is {text!r}; expected numbers, separated by commas") from None


def _say(record: dict[str, Any]) -> None:
    if "conversations" in record:
        text = f"{record['conversations']} conversations written, {record['left_out']} prompts were too long"
    else:
        tau, greedy = record["tau"], record["greedy_tau"]
        text = f"step {record['step']}: loss {record['loss']:.4f}, tau {tau:.2f}, greedy {greedy:.2f} (teacher-forced)"
        text += f", {record['seconds']:.0f} s"
    print(text, file=sys.stderr, flush=True)
