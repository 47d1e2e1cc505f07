"""The tiny target and its drafters that DeepSpec and the speculators library wrote, with what they computed."""

from pathlib import Path
from typing import Any

import numpy as np

DATA = Path(__file__).parents[1] / "data"
TARGET = DATA / "deepspec_tiny/target"
DEEPSPEC = ("deepspec_tiny/vanilla", "deepspec_tiny/gated", "deepspec_tiny/rnn", "deepspec_tiny/parallel")
SPECULATORS = ("speculators_tiny/rnn", "speculators_tiny/masks", "speculators_tiny/dflash")


def open_pair(name: str) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """A drafter's folder, its golden arrays, and those of the texts."""
    group, _, drafter = name.partition("/")
    return DATA / group / f"drafter-{drafter}", _arrays(group), _arrays("deepspec_tiny")


def _arrays(group: str) -> dict[str, Any]:
    with np.load(DATA / group / "goldens.npz") as arrays:
        return dict(arrays)
