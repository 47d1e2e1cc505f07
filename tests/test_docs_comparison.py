"""The README's short table says what docs/comparison.md says."""

import re

from helpers.pages import ROOT


def rows(page: str) -> dict[str, list[str]]:
    """The cells of each row of the comparison by its name, without the numbers of sources."""
    text = re.sub(r" \[\d+\]", "", (ROOT / page).read_text())
    table = text[text.index("| | dspark-jax | vLLM |") :].partition("\n\n")[0]
    lines = [line.strip("|").split("|") for line in table.splitlines()]
    return {name.strip(): [cell.strip() for cell in cells] for name, *cells in lines}


def test_the_short_table_is_part_of_the_long_one():
    short, long = rows("README.md"), rows("docs/comparison.md")
    assert 8 < len(short) < len(long) and all(len(cells) == 5 for cells in (*short.values(), *long.values()))
    for name, cells in short.items():
        for brief, whole in zip(cells, long[name], strict=True):
            assert re.match(re.escape(brief) + r"($|[,;] | \()", whole), (name, brief, whole)


def test_every_source_is_named():
    text = (ROOT / "docs/comparison.md").read_text()
    numbered = [int(n) for n in re.findall(r"^(\d+)\. ", text, re.MULTILINE)]
    assert numbered == list(range(1, len(numbered) + 1)) == sorted({int(n) for n in re.findall(r"\[(\d+)\]", text)})
