"""Files that are replaced in one step, and JSON in them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def replace_file(path: Path, content: bytes) -> None:
    """Write a file so that a process that is killed leaves the old content or the new one.

    Args:
        path: The file.
        content: The new content.
    """
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(content)
    new.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; an empty one if there is no file.

    Args:
        path: The file.
    """
    return dict(json.loads(path.read_bytes())) if path.exists() else {}


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace a JSON file.

    Args:
        path: The file.
        value: The object to write.
    """
    replace_file(path, json.dumps(value, indent=1).encode() + b"\n")
