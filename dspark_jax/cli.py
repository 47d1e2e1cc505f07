"""The command line. JAX is imported inside the commands, so that help and usage errors come at once."""

import io
import json
import os
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dspark_jax import __version__
from dspark_jax.cli_bench import app as bench_app
from dspark_jax.cli_calibrate import calibrate
from dspark_jax.cli_devices import EmulateOption, MeshOption, PlacementOption, WeightsOption, chosen_mesh
from dspark_jax.cli_eplb_run import app as eplb_app
from dspark_jax.cli_guard import INTERRUPTED, guarded
from dspark_jax.cli_inspect import inspect
from dspark_jax.cli_launch import launch
from dspark_jax.cli_loading import (
    ChatOption,
    DrafterOption,
    DraftTokensOption,
    ModelOption,
    NumericsOption,
    conversation,
    loading,
)
from dspark_jax.cli_mesh import plan_stages
from dspark_jax.cli_profile import profile
from dspark_jax.cli_quantise import quantise
from dspark_jax.cli_schedule import (
    ProfileOption,
    SchedulerOption,
    TemperaturesOption,
    UnsignedOption,
    VerifyOption,
    schedule_of,
)
from dspark_jax.cli_train import train
from dspark_jax.errors import ConfigError, RequestError
from dspark_jax.parallel.distributed import initialize, requested

if TYPE_CHECKING:
    from dspark_jax.cli_engine import Generator
    from dspark_jax.decode.logprobs import TokenLogprobs
    from dspark_jax.decode.sampling import SamplingParams
    from dspark_jax.requests import Prompt
    from dspark_jax.results import Completion

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain messages: one line that says what is wrong
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)
app.add_typer(eplb_app, name="eplb")
app.add_typer(bench_app, name="bench")


def main() -> None:
    """Entry point of `dspark-jax`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # generated text goes to any terminal, also one without UTF-8
    warnings.formatwarning = lambda message, *_, **__: f"dspark-jax: warning: {message}\n"
    try:
        app(prog_name="dspark-jax")
    except SystemExit as end:
        if end.code == INTERRUPTED:
            sys.stdout.flush()
            os._exit(INTERRUPTED)  # a compilation under way cannot be stopped, and an orderly exit would wait for it
        raise


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"dspark-jax {__version__}")
        raise typer.Exit


@app.callback()
@guarded
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Exact speculative decoding of DeepSeek-V4-style models with DSpark drafters."""
    if requested():
        initialize()  # one of several processes, see `dspark-jax launch`


@app.command()
@guarded
def generate(
    model: ModelOption = "nano",
    drafter: DrafterOption = None,
    draft_tokens: DraftTokensOption = None,
    prompt: Annotated[str | None, typer.Option(help="The text to continue.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Read the prompt from this UTF-8 file.")] = None,
    chat: ChatOption = False,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Sample from the k likeliest tokens; 0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens of this mass; 1 is off.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Fixes every random draw.")] = 0,
    logprobs: Annotated[
        int | None, typer.Option(help="With --json: log-probabilities of every token and of so many likeliest ones.")
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Decode without the drafter too, and compare.")] = False,
    no_draft: Annotated[bool, typer.Option("--no-draft", help="Decode without the drafter.")] = False,
    mesh: MeshOption = None,
    emulate_devices: EmulateOption = None,
    placement: PlacementOption = None,
    weights: WeightsOption = "dequantised",
    numerics: NumericsOption = "default",
    scheduler: SchedulerOption = None,
    profile: ProfileOption = None,
    temperatures: TemperaturesOption = None,
    unsigned: UnsignedOption = False,
    verify: VerifyOption = "rejection",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    no_color: Annotated[bool, typer.Option("--no-color", help="No colours.")] = False,
) -> None:
    """Continue a prompt; accepted draft tokens are shown in colour, block by block."""
    text = _prompt_text(prompt, prompt_file)
    if compare and no_draft:
        raise RequestError(
            "--compare sets the drafter against plain decoding: it cannot go with --no-draft; remove one"
        )
    if logprobs is not None and not as_json:
        raise RequestError("--logprobs has nowhere to appear in the text; add --json")
    from dspark_jax.decode.sampling import SamplingParams
    from dspark_jax.errors import raise_all

    params = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, max_tokens=max_tokens, logprobs=logprobs
    )
    raise_all(RequestError, "sampling parameters", params.faults())
    schedule = schedule_of(scheduler, profile, temperatures, unsigned, draft=not no_draft)
    from dspark_jax.cli_engine import EngineRunner, generator

    lm = generator(
        model, *chosen_mesh(mesh, emulate_devices), logprobs, placement, schedule, verify, weights,
        drafter=drafter, draft_tokens=draft_tokens, numerics=numerics,
    )  # fmt: skip
    if isinstance(lm, EngineRunner):
        with loading():
            lm.open([True, False] if compare else [not no_draft])
    if compare and lm.draft_config is None:
        raise RequestError(f"--compare needs a drafter, and the model {model!r} has none; remove --compare")
    given = conversation(lm, text) if chat else text
    if isinstance(lm, EngineRunner) and lm.follows:
        lm.follow([given], params, speculate=_modes(lm, not no_draft, compare)[1])
    elif as_json:
        _generate_json(lm, given, params, not no_draft, compare)
    else:
        _generate_shown(lm, text, given, params, not no_draft, compare, no_color)


@app.command()
@guarded
def evaluate(
    prompts: Annotated[Path, typer.Option(help='JSONL file: on each line an object with "prompt" and maybe "kind".')],
    model: ModelOption = "nano",
    drafter: DrafterOption = None,
    draft_tokens: DraftTokensOption = None,
    kind: Annotated[str | None, typer.Option(help="Only the prompts of this kind.")] = None,
    chat: ChatOption = False,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate for a prompt.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy, and compared with plain decoding.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Sample from the k likeliest tokens; 0 is off.")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens of this mass; 1 is off.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the first prompt; prompt i has seed + i.")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Prompts decoded side by side.")] = 8,
    mesh: MeshOption = None,
    emulate_devices: EmulateOption = None,
    weights: WeightsOption = "dequantised",
    numerics: NumericsOption = "default",
    scheduler: SchedulerOption = None,
    profile: ProfileOption = None,
    temperatures: TemperaturesOption = None,
    unsigned: UnsignedOption = False,
    verify: VerifyOption = "rejection",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Measure the drafter: tokens a round and acceptance, with and without its sequential head; compare the texts."""
    from dspark_jax import evaluate as evaluation
    from dspark_jax.cli_display import Display
    from dspark_jax.cli_engine import EngineRunner, generator
    from dspark_jax.decode.sampling import SamplingParams
    from dspark_jax.errors import raise_all

    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, max_tokens=max_tokens)
    raise_all(RequestError, "sampling parameters", params.faults())
    chosen = evaluation.read_prompts(prompts, kind)
    if requested():
        raise ConfigError(
            "evaluate works in one process, where it also recomputes what differs from plain decoding; run it without"
            " `dspark-jax launch`, or `dspark-jax bench serve`, which reports tokens a round, with it"
        )
    schedule = schedule_of(scheduler, profile, temperatures, unsigned)
    lm = generator(
        model, *chosen_mesh(mesh, emulate_devices), scheduler=schedule, verify=verify, weights=weights, slots=batch,
        drafter=drafter, draft_tokens=draft_tokens, numerics=numerics,
    )  # fmt: skip
    if isinstance(lm, EngineRunner):
        with loading():
            lm.open([True, False] if temperature == 0 else [True])
    if chat:
        chosen = [replace(p, ids=tuple(conversation(lm, p.prompt))) for p in chosen]
    display = Display()
    with display.waiting("evaluating"):
        found = evaluation.evaluate(lm, chosen, params, batch=batch)
    if as_json:
        settings = {"model": model, "drafter": _drafter(lm), "temperature": temperature, "top_k": top_k, "top_p": top_p}
        settings |= {"seed": seed, "max_tokens": max_tokens, "batch": batch, "chat": chat}
        settings |= {"scheduler": scheduler, "verify": verify, "weights": weights, "numerics": numerics}
        print(json.dumps({**settings, "results": [e.as_dict() for e in found]}))
    else:
        display.evaluation(found)


def _prompt_text(prompt: str | None, path: Path | None) -> str:
    if (prompt is None) == (path is None):
        given = "neither" if prompt is None else "both"
        raise RequestError(f"expected exactly one of --prompt and --prompt-file, got {given}")
    if path is None:
        assert prompt is not None
        return prompt
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        problem = f"is not UTF-8 text ({error.reason} at byte {error.start}); convert it"
        raise RequestError(f"--prompt-file {str(path)!r} {problem}") from None
    except OSError as error:
        raise RequestError(f"--prompt-file {str(path)!r} cannot be read: {error.strerror}; check the path") from None


def _modes(lm: "Generator", draft: bool, compare: bool) -> tuple[bool, list[bool]]:
    """Whether the main run drafts, and every mode that will run."""
    draft = draft and lm.draft_config is not None
    return draft, [draft, False] if compare else [draft]


def _generate_json(lm: "Generator", prompt: "Prompt", params: "SamplingParams", draft: bool, compare: bool) -> None:
    draft, modes = _modes(lm, draft, compare)
    compile_seconds = lm.compile([prompt], params, speculate=modes)
    result = lm.generate([prompt], params, speculate=draft)[0]
    plain = lm.generate([prompt], params, speculate=False)[0] if compare else None
    found = summary(result, plain, draft, _comparable(lm, params), compile_seconds)
    print(json.dumps({"drafter": _drafter(lm) if draft else None, **found}))


def _drafter(lm: "Generator") -> str | None:
    """What drafts; None: nothing does."""
    return lm.draft_config.summary if lm.draft_config else None


def _comparable(lm: "Generator", params: "SamplingParams") -> bool:
    """Whether one text is right, with and without the drafter."""
    return params.temperature == 0 or lm.verify == "coupled"


def summary(
    result: "Completion", plain: "Completion | None", draft: bool, comparable: bool, compile_seconds: float
) -> dict[str, Any]:
    """The JSON object of one run; `plain` is the run of --compare.

    Every key is always there. `identical` is null without --compare, and where the texts are not `comparable`: at a
    temperature above 0 without coupled verification, both runs are samples of one law and not one text.
    `plain_tokens_per_second` is null where plain decoding did not run. `logprobs` is null without --logprobs, else one
    object a token: its logprob, and the likeliest ids with theirs.
    """
    plain_run = plain if draft else result
    found: dict[str, Any] = {
        "text": result.text,
        "tokens": len(result.tokens),
        "token_ids": list(result.tokens),
        "drafted": list(result.drafted),
        "finish_reason": result.finish_reason,
        "logprobs": None if result.logprobs is None else [_logprobs(one) for one in result.logprobs],
        "rounds": result.rounds,
        "tokens_per_round": result.tokens_per_round,
        "acceptance_by_position": list(result.acceptance_by_position),
        "verify_lengths": list(result.verify_lengths),
        "wasted_drafts": result.wasted,
        "rested_rounds": result.rested_rounds,
        "identical": None,
        "tokens_per_second": result.tokens_per_second,
        "plain_tokens_per_second": plain_run.tokens_per_second if plain_run else None,
        "prefill_seconds": result.prefill_seconds,
        "compile_seconds": compile_seconds,
    }
    if plain is not None and comparable:
        found["identical"] = result.tokens == plain.tokens
    elif plain is not None:
        found["note"] = "sampled texts differ by design: with and without the drafter the law is equal, not the sample"
    return found


def _logprobs(one: "TokenLogprobs") -> dict[str, Any]:
    return {"logprob": one.logprob, "top": [{"token_id": token, "logprob": value} for token, value in one.top]}


def _generate_shown(
    lm: "Generator", text: str, prompt: "Prompt", params: "SamplingParams", draft: bool, compare: bool, no_color: bool
) -> None:
    from dspark_jax.cli_display import Display

    draft, modes = _modes(lm, draft, compare)
    display = Display(no_color=no_color)
    with display.waiting("compiling"):
        compile_seconds = lm.compile([prompt], params, speculate=modes)
    display.begin(text, draft)
    result = lm.generate([prompt], params, speculate=draft, on_round=display.round)[0]
    display.end()
    plain = None
    if compare:
        with display.waiting("decoding without the drafter"):
            plain = lm.generate([prompt], params, speculate=False)[0]
    display.summary(result, plain, _drafter(lm) if draft else None, compile_seconds)
    if plain is not None:
        display.verdict(result, plain, _comparable(lm, params), lm.decode)


app.command("plan-stages")(plan_stages)
app.command("inspect")(inspect)
app.command("quantise")(quantise)
app.command("calibrate")(calibrate)
app.command("train")(train)
app.command("profile")(profile)
app.command("launch")(launch)

if __name__ == "__main__":
    main()
