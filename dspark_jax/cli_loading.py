"""A line about loading, on stderr, where that is a terminal and the weights are large."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

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
