"""Documentation that runs: the Python blocks of a Markdown page."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def python_blocks(page: str) -> list[str]:
    """Each of the blocks with as many empty lines in front that an error names the page's own line."""
    text = (ROOT / page).read_text()
    return ["\n" * text[: found.start(1)].count("\n") + found[1] for found in _BLOCK.finditer(text)]


def run_page(page: str) -> dict:
    """Runs all Python blocks of the page in order, in one namespace, which it returns."""
    namespace: dict = {"__name__": page}
    for block in python_blocks(page):
        exec(compile(block, page, "exec"), namespace)
    return namespace
