"""The oracle's golden file, and a tiny checkpoint folder that tests may damage."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from helpers.checkpoints import write_tiny


@dataclass(frozen=True)
class GoldenFile:
    path: Path
    cfg: dict


@pytest.fixture(scope="session")
def golden_file() -> GoldenFile:
    path = Path(__file__).parent.parent / "data" / "v4_tiny_goldens.npz"
    return GoldenFile(path, json.loads(str(np.load(path)["cfg"])))


@pytest.fixture(scope="session")
def _written(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny(folder)
    return folder


@pytest.fixture
def tiny(_written, tmp_path) -> Path:
    """A fresh copy of the tiny checkpoint, bfloat16, one file."""
    return Path(shutil.copytree(_written, tmp_path / "tiny"))
