"""Who looks on while a checkpoint's weights are read, one parameter after the other."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Watcher = Callable[[str, int], None]  # name of the layer that is read, number of layers

watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)


@contextmanager
def watched(by: Watcher) -> Iterator[None]:
    """Every parameter that this thread reads in the block is told to `by` first, by its layer ("layers.7", "mtp.0")."""
    token = watcher.set(by)
    try:
        yield
    finally:
        watcher.reset(token)
