"""Describe the program that runs: its script, the commit of the script's folder, and the packages that are imported."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Final

SECONDS: Final = 5.0
"""The time that git may take for an answer."""

PROGRAM: Final = "program"
"""The key under which files beside a run describe it."""

Fields = dict[str, str]


def describe_program() -> Fields:
    """Return what runs in this process, as text by name.

    These are the version of Python, the SHA-256 of the script, the commit of the repository that holds it, ``"none"``
    or the SHA-256 of the changes of its files since that commit, and the version of each package of which a module is
    imported. What is unknown is left out: a notebook has no script, and a folder need not be a repository.

    The script and its commit are read once, because its files may change while it runs.

    >>> describe_program()["package torch"] == importlib.metadata.version("torch")
    True
    """
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    imported = {name.partition(".")[0] for name in list(sys.modules)}
    names = sorted({name for module, names in _packages().items() if module in imported for name in names})
    code = {} if script is None else describe_script(str(Path(script).resolve()))
    return {"Python": platform.python_version(), **code, **{f"package {name}": _version(name) for name in names}}


@cache
def describe_script(script: str) -> Fields:
    """Return the fields of a script and of the commit of its folder.

    Args:
        script: The path of the file.
    """
    path = Path(script)
    if not path.is_file():
        return {}
    found = {"script": hashlib.sha256(path.read_bytes()).hexdigest()}
    if any((folder / ".git").exists() for folder in path.parents):
        commit = _git(path.parent, "rev-parse", "HEAD")
        # Only of files that git knows, since a run writes others.
        changes = _git(path.parent, "diff", "HEAD", "--binary", "--no-ext-diff", "--no-textconv")
        if commit is not None and changes is not None:
            found["git commit"] = commit.decode().strip()
            found["uncommitted changes"] = hashlib.sha256(changes).hexdigest() if changes else "none"
    return found


def _git(folder: Path, *words: str) -> bytes | None:
    """Return what git prints; None if it cannot say, as without git, without a commit or on a disk that hangs."""
    command = ["git", "-C", str(folder), "--no-optional-locks", *words]
    try:
        return subprocess.run(  # noqa: S603 - a fixed command
            command, stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=SECONDS
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None


@cache
def _packages() -> Mapping[str, list[str]]:
    """Return the names of the installed packages by the modules that they have."""
    return importlib.metadata.packages_distributions()


@cache
def _version(name: str) -> str:
    return importlib.metadata.version(name)
