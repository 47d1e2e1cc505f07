"""docs/troubleshooting.md quotes messages that the package has."""

import re

from helpers.messages import occurs
from helpers.pages import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
QUOTED = re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE)


def test_every_row_quotes_one_message():
    rows = [line for line in PAGE.splitlines() if line.startswith("|") and not line.startswith(("| the message says", "|---"))]
    assert len(QUOTED) == len(rows) > 50 and len(set(QUOTED)) == len(QUOTED)


def test_every_quoted_message_is_in_the_source():
    assert [quoted for quoted in QUOTED if not occurs(quoted)] == []


def test_what_no_message_says_would_be_found():
    assert occurs("max_len is …; expected 2") and not occurs("max_len is …; expected 3")
    assert not occurs("expected 2 … max_len is")
