"""Recorded rounds as a file (NumPy's npz): what `record` gives and `calibrate` fits on."""

import zipfile
from pathlib import Path

import numpy as np

from dspark_jax.decode.calibrate import Rounds
from dspark_jax.errors import ConfigError


def write_rounds(path: Path, rounds: Rounds) -> None:
    """Writes `logits` [N, gamma] and `accepted` [N]."""
    with path.open("wb") as file:
        np.savez_compressed(file, logits=rounds.logits.astype(np.float32), accepted=rounds.accepted.astype(np.int32))


def read_rounds(path: Path) -> Rounds:
    """The inverse of `write_rounds`.

    Raises:
      ConfigError: the file cannot be read, or its arrays contradict each other.
    """
    try:
        with path.open("rb") as file, np.load(file) as found:
            return Rounds(found["logits"].astype(np.float64), found["accepted"].astype(np.int64))
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"{path}: cannot be read ({reason}); expected recorded rounds: check the path") from None
    except (KeyError, ValueError, EOFError, AttributeError, TypeError, zipfile.BadZipFile) as error:
        if isinstance(error, ConfigError):
            raise ConfigError(f"{path}: {error}") from None
        raise ConfigError(
            f"{path}: holds no recorded rounds ({error}); expected an npz file with logits and accepted, as `dspark-jax"
            " calibrate --recorded` writes it"
        ) from None
