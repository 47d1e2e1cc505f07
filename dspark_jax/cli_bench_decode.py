"""`dspark-jax bench decode`: tokens a second of whole answers with the drafter and without it."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from dspark_jax.cli_bench_kernels import OutOption
from dspark_jax.cli_guard import guarded
from dspark_jax.cli_loading import ChatOption, DrafterOption, DraftTokensOption, ModelOption, conversation, loading
from dspark_jax.errors import ConfigError, RequestError, raise_all


@guarded
def decode(
    prompts: Annotated[Path, typer.Option(help='JSONL file: on each line an object with "prompt" or "turns".')],
    model: ModelOption = "nano",
    drafter: DrafterOption = None,
    draft_tokens: DraftTokensOption = None,
    chat: ChatOption = False,
    batch: Annotated[str, typer.Option(help="Prompts side by side, with commas between them.")] = "1,32",
    count: Annotated[int, typer.Option(min=1, help="Prompts for a batch smaller than this.")] = 8,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate for a prompt.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the first prompt; prompt i has seed + i.")] = 0,
    repeats: Annotated[int, typer.Option(min=1, help="Turns of the two kinds of decoding; medians are kept.")] = 5,
    out: OutOption = None,
) -> None:
    """Time whole answers with and without the drafter, in turns, on one device."""
    from dspark_jax import api
    from dspark_jax.bench import records
    from dspark_jax.bench.decode import decode_speed
    from dspark_jax.decode.sampling import SamplingParams
    from dspark_jax.evaluate import read_prompts

    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens)
    raise_all(RequestError, "sampling parameters", params.faults())
    sizes = [word.strip() for word in batch.split(",")]
    if not all(word.isascii() and word.isdigit() and int(word) > 0 for word in sizes):
        raise ConfigError(f"--batch is {batch!r}; expected positive integers with commas between them")
    records.check_out(out)
    chosen = [p.prompt for p in read_prompts(prompts)]
    if (most := max(map(int, sizes))) > len(chosen):
        raise RequestError(f"--batch is {batch!r}, and {prompts} has {len(chosen)} prompts; give {most}, or a smaller batch")
    with loading():
        lm = api.load(model, drafter=drafter, draft_tokens=draft_tokens)
    ids = chosen if not chat else [conversation(lm, words) for words in chosen]
    found, name = [], " ".join(Path(part).name for part in (model, drafter) if part)
    for size in map(int, sizes):
        given = ids[: max(size, count)]
        found.append(decode_speed(lm, given, params, size, name=name, repeats=repeats, report=_say))
        if out is not None:
            records.merge(out, found)
    print(records.table(found))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
