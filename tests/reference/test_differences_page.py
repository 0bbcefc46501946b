"""The pages of differences show the list that the tests check."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
GENERATOR: dict[str, Any] = runpy.run_path(str(DOCS / "differences.py"))


@pytest.mark.parametrize("name", GENERATOR["PAGES"])
def test_a_page_is_made_of_the_list(name: str) -> None:
    made = GENERATOR["page"](name)
    assert (DOCS / name).read_text(encoding="utf-8") == made, "run `python docs/differences.py`"


def test_every_trace_file_is_on_a_page() -> None:
    pages = "".join(map(GENERATOR["page"], GENERATOR["PAGES"]))
    files = {entry["file"] for entry in GENERATOR["tomllib"].loads(GENERATOR["SOURCE"].read_text())["difference"]}
    assert {file for file in files if f"## `{file}`" not in pages} == set()
