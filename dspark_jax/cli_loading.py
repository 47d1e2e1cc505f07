"""Options that say which model is loaded, and a line about loading, on stderr, where that is a terminal and it takes long."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from dspark_jax.errors import RequestError

ModelOption = Annotated[
    str, typer.Option("--model", "--target", help="A shipped model's name, a checkpoint folder, or a GGUF file.")
]
DrafterOption = Annotated[
    Path | None,
    typer.Option(help="For a dense target: folder of a DSpark, DFlash or PARD drafter; or a smaller model, folder or GGUF."),
]
ChatOption = Annotated[
    bool, typer.Option("--chat", help="A prompt is a user's message: it is put into the model's chat template.")
]
DraftTokensOption = Annotated[
    int | None, typer.Option(help="Drafts a round of a PARD or smaller model; 5 by default. Other drafters' blocks say theirs.")
]
NumericsOption = Annotated[
    Literal["default", "reference"],
    typer.Option("--numerics", help="reference: activations are rounded as in DeepSeek's inference code, which is slower."),
]

PATIENCE = 1.0  # seconds until the line appears


@contextmanager
def loading() -> Iterator[None]:
    """Shows how many layers have been read in the block; nothing if that takes less than a second."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    from dspark_jax.checkpoint.watch import watched

    begin, seen, shown = time.perf_counter(), set[str](), False
    status = Console(stderr=True, highlight=False).status("loading …")

    def tell(layer: str, layers: int) -> None:
        nonlocal shown
        seen.add(layer)
        if not shown and time.perf_counter() - begin > PATIENCE:
            shown = True
            status.start()
        if shown:
            status.update(f"loading layer {len(seen)} of {layers} …")

    try:
        with watched(tell):
            yield
    finally:
        if shown:
            status.stop()


def conversation(lm: Any, words: str) -> list[int]:
    """Ids of a user's words in the model's chat template."""
    template = getattr(lm, "chat", None)
    if template is None:
        raise RequestError("--chat needs a model with a chat template, and there is none; leave it out")
    return template.encode([{"role": "user", "content": words}])
