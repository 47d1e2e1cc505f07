"""Errors that users meet: each message names the field, its value, what was expected and the remedy."""

import reprlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


class DSparkError(ValueError):
    """Base of every error that dspark_jax raises on bad input."""


class ConfigError(DSparkError):
    """A model, draft, mesh or training configuration is impossible."""


class CheckpointError(DSparkError):
    """A checkpoint folder is missing, damaged, or contradicts its configuration."""


class RequestError(DSparkError):
    """A prompt or its sampling parameters cannot be served."""


class DeviceMemoryError(DSparkError):
    """Weights, state or a program need more memory than there is."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether Python, or JAX on any device, ran out of memory."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" in str(error))


@contextmanager
def memory_for(what: str) -> Iterator[None]:
    """Raises DeviceMemoryError where the block runs out of memory."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        reason = " ".join(str(error).split())[:200]
        raise DeviceMemoryError(
            f"out of memory {what} ({reason}); use more devices, fewer slots or requests side by side, a shorter max_len, or"
            " quantised weights; `dspark-jax inspect` shows what a model takes"
        ) from error


def raise_all(kind: type[DSparkError], subject: str, faults: Sequence[str]) -> None:
    """Raises one `kind` that lists every fault about `subject`; does nothing when there is none."""
    if not faults:
        return
    if len(faults) == 1:
        raise kind(f"{subject}: {faults[0]}")
    raise kind(f"{subject}: {len(faults)} faults\n" + "\n".join(f"  - {fault}" for fault in faults))


def described(value: Any) -> str:
    """A value of a wrong type, for messages, with the type's name: "3 (int)"."""
    return "None" if value is None else f"{reprlib.repr(value)} ({type(value).__name__})"
