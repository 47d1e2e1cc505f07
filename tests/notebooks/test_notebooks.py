"""Every notebook runs from top to bottom, and the committed copy is one that did."""

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
MAX_BYTES = 500_000
# In a process of its own: the client leaves sockets for the garbage collector, and here every warning is an error.
# Kernel and client talk over files in the working folder instead of ports.
EXECUTE = """
import sys, nbformat
from jupyter_client import AsyncKernelManager
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(notebook, km=AsyncKernelManager(kernel_name="python3", transport="ipc"), timeout=400).execute()
nbformat.write(notebook, sys.argv[2])
"""


def read(path: Path) -> NotebookNode:
    return nbformat.read(path, as_version=4)


def code(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def kinds(cell: NotebookNode) -> set[str]:
    """What a cell shows: "stream", "error", or the MIME types of its results."""
    return {kind for out in cell.outputs for kind in out.get("data", {out.output_type: None})}


def test_there_are_notebooks():
    assert FOLDER / "one_round.ipynb" in NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_committed_copy_was_run_and_is_small(path: Path):
    cells = code(read(path))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    shown = set().union(*map(kinds, cells))
    assert "error" not in shown and "image/png" in shown
    assert path.stat().st_size < MAX_BYTES


@pytest.mark.notebook
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path: Path, tmp_path: Path):
    out = tmp_path / "out.ipynb"
    command = [sys.executable, "-c", EXECUTE, str(path), str(out)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr  # a cell that fails ends the run, its traceback on stderr
    # What each cell shows may change in content, and not in kind.
    assert [kinds(cell) for cell in code(read(out))] == [kinds(cell) for cell in code(read(path))]
