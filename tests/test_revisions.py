"""What each revision makes of the others' bytes: docs/revisions.md says what happens, and so does the crate."""

from __future__ import annotations

from pathlib import Path

import pytest
from revision_table import PAIRS, ROWS, table

PAGE = Path(__file__).parents[1] / "docs" / "revisions.md"


def test_the_page_has_the_table():
    assert table() in PAGE.read_text(encoding="utf-8"), "python tests/revision_table.py prints it"


@pytest.mark.parametrize(("sender", "reader"), PAIRS)
def test_nothing_changes_its_meaning(sender, reader):
    """What is read is what was sent, but for fields that are told apart by name; the rest is refused."""
    for row in ROWS:
        outcome = row.outcome(sender, reader)
        assert outcome == "read" or outcome == "cannot be sent" or outcome.endswith("Error") or (
            outcome.startswith("read without `") and sender > reader
        )
