"""The programs on the pages of `docs/` run, from the first to the last of a page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

DOCS = Path(__file__).resolve().parents[1] / "docs"

PAGES = {"group.md": 3, "modules.md": 5}
"""How many programs each page holds."""


@pytest.mark.parametrize("page", PAGES)
def test_the_programs_of_a_page_run(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    programs = re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    assert len(programs) == PAGES[page]
    names: dict[str, Any] = {}
    with torch.random.fork_rng():
        for program in programs:
            exec(compile(program, page, "exec"), names)  # noqa: S102 - our own page
    assert capsys.readouterr().out


def test_the_pages_point_to_what_is_there() -> None:
    for page in PAGES:
        text = (DOCS / page).read_text(encoding="utf-8")
        links = re.findall(r"\]\(([^)#:]+)\)", text)
        assert [link for link in links if not (DOCS / link).exists()] == []
