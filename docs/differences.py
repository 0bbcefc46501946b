"""Write `docs/differences.md` from the list that the replays of the originals' traces are checked against.

python docs/differences.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "tests" / "reference" / "differences.toml"
PAGE = ROOT / "docs" / "differences.md"

HEAD = """# Where lockstep differs from the originals on purpose

`tests/reference` replays traces recorded by running Chainer 7.8.1, Torch7's cunn, MXNet and NNabla.
Everything agrees within the stated tolerances, except what stands here. The tests check each entry: our
value must be the one listed, and must differ from the original's. This page is made by
`python docs/differences.py`.
"""

THROUGH = {"core": "but not through `lockstep.compat`", "compat": "through `lockstep.compat` only"}
"""An entry may be for one of two replays of a trace."""


def page(source: Path = SOURCE) -> str:
    """Give the page: for each trace file the reasons, and the cases and fields they are about."""
    entries: list[dict[str, Any]] = tomllib.loads(source.read_text(encoding="utf-8"))["difference"]
    lines = [HEAD]
    for file in sorted({entry["file"] for entry in entries}):
        lines += [f"## `{file}`", ""]
        reasons: dict[str, list[str]] = {}
        for entry in entries:
            if entry["file"] == file:
                only = f", {THROUGH[entry['through']]}" if "through" in entry else ""
                place = f"{cases_of(entry)}: `{entry['field']}`{only}"
                reasons.setdefault(entry["reason"].strip(), []).append(place)
        for reason, places in reasons.items():
            shown = "; ".join(dict.fromkeys(places))
            lines += [f"* {reason} ({shown})"]
        lines += [""]
    return "\n".join(lines)


def cases_of(entry: dict[str, Any]) -> str:
    """Say which cases an entry is for: their name, or what they hold."""
    held = [f"`{place} = {value}`" for place, value in entry.get("where", {}).items()]
    return " and ".join([f"`{entry['case']}`", *held] if "case" in entry else held)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
