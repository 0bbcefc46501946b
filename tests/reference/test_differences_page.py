"""The page of differences says what the tests check."""

from __future__ import annotations

import runpy
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_page_is_made_of_the_list() -> None:
    made = runpy.run_path(str(DOCS / "differences.py"))["page"]()
    assert (DOCS / "differences.md").read_text(encoding="utf-8") == made, "run `python docs/differences.py`"
