"""Errors that users meet: each message names the field, its value, what was expected and the remedy."""

from collections.abc import Sequence


class DSparkError(ValueError):
    """Base of every error that dspark_jax raises on bad input."""


class ConfigError(DSparkError):
    """A model, draft, mesh or training configuration is impossible."""


class CheckpointError(DSparkError):
    """A checkpoint folder is missing, damaged, or contradicts its configuration."""


class RequestError(DSparkError):
    """A prompt or its sampling parameters cannot be served."""


def raise_all(kind: type[DSparkError], subject: str, faults: Sequence[str]) -> None:
    """Raises one `kind` that lists every fault about `subject`; does nothing when there is none."""
    if not faults:
        return
    if len(faults) == 1:
        raise kind(f"{subject}: {faults[0]}")
    raise kind(f"{subject}: {len(faults)} faults\n" + "\n".join(f"  - {fault}" for fault in faults))
