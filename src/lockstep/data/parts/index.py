"""What was found in a file by reading all of it once, kept in a file of its own."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lockstep.errors import StateError


def indexed(path: str | os.PathLike[str] | None, key: Mapping[str, Any], count: Callable[[], Any]) -> Any:
    """Return what is in an index file; count it and write the file if there is none.

    Args:
        path: The path of the index file; None to count whenever this is called.
        key: What the contents depend on, such as the size of the file that is indexed, as JSON values.
        count: A function that returns the contents, as JSON values.

    Raises:
        StateError: If the file holds the index of something else, or no index.
    """
    if path is None:
        return count()
    path = Path(path)
    key = json.loads(json.dumps(key))
    try:
        text = path.read_text()
    except FileNotFoundError:
        found = json.loads(json.dumps(count()))
        _write(path, json.dumps({"key": key, "index": found}))
        return found
    try:
        saved = json.loads(text)
        own, index = saved["key"], saved["index"]
    except (ValueError, TypeError, KeyError) as error:
        raise StateError(f"`index` must be the path of an index, got {path}, which holds something else.") from error
    if own != key:
        raise StateError(f"`index` must be the index of {key}, got {path}, the index of {own}. Delete it.")
    return index


def _write(path: Path, text: str) -> None:
    """Write a file so that other processes find all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(handle, "w") as file:
        file.write(text)
    Path(name).replace(path)
