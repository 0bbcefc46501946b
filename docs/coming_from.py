"""Write the pages of `docs/coming-from` from `origins.toml` and the programs beside the pages.

python docs/coming_from.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent
FOLDER = ROOT / "coming-from"
SOURCE = ROOT / "origins.toml"

Entry = Mapping[str, Any]


def read(path: Path) -> dict[str, Any]:
    """Read a TOML file."""
    return tomllib.loads(path.read_text(encoding="utf-8"))


SYSTEMS = read(FOLDER / "pages.toml")
"""The text of each page beside the list."""


def page(name: str) -> str:
    """Return the page of one system: its programs before and after."""
    system = SYSTEMS[name]
    title = system["title"]
    names = f"[{name}_names.md]({name}_names.md) lists where every name of {title} is in lockstep."
    return "\n".join(
        [
            f"# Coming from {title}",
            "",
            *wrapped(f"{system['intro']} {names}"),
            "",
            *wrapped(f"The following is specific to {title}, and kept. {system['peculiar']}"),
            "",
            *program(f"In {title}", f"{name}_before.txt", system["language"]),
            *program("With the same names", f"{name}_after.py", "python"),
            *program("With the core of lockstep", f"{name}_core.py", "python"),
        ]
    )


def names_page(name: str) -> str:
    """Return the page with all names of one system."""
    title = SYSTEMS[name]["title"]
    intro = (
        f"Everything that the documentation of {title} mentions, with a test for each (below `tests`). The programs "
        f"are in [{name}.md]({name}.md). Names without a module are in `lockstep.compat.{name}`, and those of the core "
        "in `lockstep`. This page is written by `python docs/coming_from.py`."
    )
    return "\n".join([f"# The names of {title}", "", *wrapped(intro), "", *tables(read(SOURCE)[name])])


def program(title: str, file: str, language: str) -> list[str]:
    """Return a section with a program that lies beside the page."""
    text = (FOLDER / file).read_text(encoding="utf-8").rstrip()
    return [f"## {title}", "", f"```{language}", text, "```", ""]


def tables(entries: Iterable[Entry]) -> list[str]:
    """Return a table for each document, with one row for entries of the same meaning."""
    lines = []
    for _, listed in groupby(entries, key=lambda entry: entry["document"]):
        rows: dict[tuple[str, ...], list[Entry]] = {}
        for entry in listed:
            rows.setdefault(meaning(entry), []).append(entry)
        lines += [
            "| original | meaning | here | core | difference | test |",
            "|---|---|---|---|---|---|",
        ]
        lines += [table_row(row) for row in rows.values()]
        lines += [""]
    return lines


def meaning(entry: Entry) -> tuple[str, ...]:
    """Return what has to be equal for entries to share a row."""
    return entry["kind"], entry["says"], entry.get("core", ""), entry.get("difference", ""), entry["test"]


def table_row(entries: list[Entry]) -> str:
    """Return one row of a table."""
    first = entries[0]
    names = [f"*{each['name']}*" if each["kind"] == "note" else f"`{each['name']}`" for each in entries]
    cells = [
        ", ".join(names),
        first["says"],
        ", ".join(dict.fromkeys(f"`{each['path']}`" for each in entries)),
        f"`{first['core'].removeprefix('lockstep.')}`" if "core" in first else "",
        first.get("difference", ""),
        f"`{first['test']}`",
    ]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def wrapped(text: str, width: int = 110) -> list[str]:
    """Break a paragraph into lines."""
    lines, line = [], ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > width:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}".strip()
    return [*lines, line]


PAGES = {"{}.md": page, "{}_names.md": names_page}
"""The function that returns each page of a system."""


if __name__ == "__main__":
    for each in SYSTEMS:
        for file_name, text_of in PAGES.items():
            (FOLDER / file_name.format(each)).write_text(text_of(each), encoding="utf-8")
