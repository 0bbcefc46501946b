"""Write the pages of `docs/coming-from` from `origins.toml` and the programs beside the pages.

python docs/coming_from.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
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
    """Read a file of this kind."""
    return tomllib.loads(path.read_text(encoding="utf-8"))


SYSTEMS = read(FOLDER / "pages.toml")
"""What each page says beside the list."""


def page(name: str) -> str:
    """Give the page of one system."""
    system = SYSTEMS[name]
    title = system["title"]
    checked = (
        f"Names without a module are in `lockstep.compat.{name}`. Each line is checked by a test, and "
        "names one that shows it (below `tests/`). This page is made by `python docs/coming_from.py`."
    )
    return "\n".join(
        [
            f"# Coming from {title}",
            "",
            *wrapped(system["intro"]),
            "",
            *wrapped(f"Peculiar to {title}, and kept: {system['peculiar']}"),
            "",
            *program("Before", f"{name}_before.txt", system["language"]),
            *program("After, by the same names", f"{name}_after.py", "python"),
            *program("After, in lockstep's own words", f"{name}_core.py", "python"),
            "## Where everything went",
            "",
            *wrapped(checked),
            "",
            *tables(read(SOURCE)[name]),
        ]
    )


def program(title: str, file: str, language: str) -> list[str]:
    """Show a program that lies beside the page."""
    text = (FOLDER / file).read_text(encoding="utf-8").rstrip()
    return [f"## {title}", "", f"```{language}", text, "```", ""]


def tables(entries: Iterable[Entry]) -> list[str]:
    """Give a table for each document, with a line for each thing it speaks of."""
    lines = []
    documents = dict.fromkeys(entry["document"] for entry in entries)
    for document in documents:
        lines += [
            "| there | what it is | here | in the core | different | shown by |",
            "|---|---|---|---|---|---|",
        ]
        lines += [table_row(entry) for entry in entries if entry["document"] == document]
        lines += [""]
    return lines


def table_row(entry: Entry) -> str:
    """Give one line of a table."""
    name = f"*{entry['name']}*" if entry["kind"] == "note" else f"`{entry['name']}`"
    core = f"`{entry['core'].removeprefix('lockstep.')}`" if "core" in entry else ""
    cells = [
        name,
        entry["says"],
        f"`{entry['path']}`",
        core,
        entry.get("difference", ""),
        f"`{entry['test']}`",
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


if __name__ == "__main__":
    for each in SYSTEMS:
        (FOLDER / f"{each}.md").write_text(page(each), encoding="utf-8")
