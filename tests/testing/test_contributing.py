"""The worked example of CONTRIBUTING.md runs, and the files and names that the page sends its reader to exist."""

import re

from helpers.pages import ROOT, run_page

PAGE = "CONTRIBUTING.md"


def test_the_toy_drafter_has_the_targets_law():
    made = run_page(PAGE)  # its assertions are the page's
    assert made["drafter"].block_size == 3


def test_files_and_names_exist():
    quoted = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", (ROOT / PAGE).read_text(), flags=re.MULTILINE | re.DOTALL))
    paths = [name for name in quoted if re.fullmatch(r"[\w./]+/[\w.]*", name)]
    assert len(paths) > 30 and not [path for path in paths if not (ROOT / path).exists()]
    files = [*(ROOT / "dspark_jax").rglob("*.py"), *(ROOT / "kernels").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    source = "\n".join(file.read_text() for file in files)
    names = {part for name in quoted if re.fullmatch(r"[\w.]+", name) for part in name.split(".")} - {"py", "md", "json"}
    assert len(names) > 40 and not [name for name in names if name not in source and not (ROOT / name).exists()]
