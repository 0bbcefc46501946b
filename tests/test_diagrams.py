"""The diagrams of `docs/images` are what the generator writes, and show the layers of pyproject.toml."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

DOCS = Path(__file__).resolve().parents[1] / "docs"
IMAGES = DOCS / "images"


def generator() -> dict[str, Any]:
    folder = str(DOCS / "diagrams")
    sys.path.insert(0, folder)  # as if it were run by hand
    try:
        return runpy.run_path(f"{folder}/draw.py")
    finally:
        sys.path.remove(folder)


GENERATOR = generator()
DIAGRAMS = GENERATOR["DIAGRAMS"]
Canvas = GENERATOR["Canvas"]
PICTURES = {"contrastive.png", "digits.png", "gan.png", "report.png", "tutorial.png"}
"""Images that show a program, not a diagram."""
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", DIAGRAMS)
def test_an_image_is_what_the_generator_writes(name: str) -> None:
    written = (IMAGES / name).read_text(encoding="utf-8")
    assert written == DIAGRAMS[name](), "run `python docs/diagrams/draw.py`"


def test_there_is_no_other_image() -> None:
    assert {path.name for path in IMAGES.iterdir()} == {*DIAGRAMS, *PICTURES}


@pytest.mark.parametrize("name", DIAGRAMS)
def test_an_image_is_well_formed_and_described(name: str) -> None:
    root = ET.fromstring((IMAGES / name).read_text(encoding="utf-8"))  # noqa: S314 - our own file
    assert len(root.findtext(f"{SVG}title") or "") > 10
    assert len(root.findtext(f"{SVG}desc") or "") > 50
    assert "prefers-color-scheme: dark" in (root.findtext(f"{SVG}style") or "")


def test_the_parts_and_their_sub_packages_are_all_shown() -> None:
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", (IMAGES / "parts.svg").read_text(encoding="utf-8"))
    parts = [part for layer in GENERATOR["layers_of"]("lockstep") for part in layer]
    shown = [part for part in parts for part in (part, *GENERATOR["sub_packages"](part))]
    assert [text for text in texts if text in set(shown)] == shown
    assert "updaters" in parts
    assert GENERATOR["sub_packages"]("updaters")[-1] == "setup"


def test_arrows_between_parts_point_downwards() -> None:
    lines = re.findall(r'<polyline[^>]* points="([^"]*)"', (IMAGES / "parts.svg").read_text(encoding="utf-8"))
    ends = [[tuple(map(float, point.split(","))) for point in line.split()] for line in lines]
    assert len(ends) > 10
    assert all(x0 == x1 and y0 < y1 for (x0, y0), (x1, y1) in ends)


def test_text_that_overlaps_or_does_not_fit_is_refused() -> None:
    canvas = Canvas(200, 100, "a title", "a description")
    canvas.text(100, 50, "some words")
    with pytest.raises(ValueError, match="must not overlap 'some words'"):
        canvas.text(120, 55, "others")
    with pytest.raises(ValueError, match="must fit into 20 pixels"):
        canvas.text(100, 80, "some words", within=20)
    with pytest.raises(ValueError, match="must lie in the image"):
        canvas.text(190, 80, "some words")
