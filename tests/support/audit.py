"""What Python is asked to open and to unpickle, from its own audit events."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

_CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod"}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_ACTIVE: list[Audit] = []
_INSTALLED: list[bool] = []


class Audit:
    """Records events while it is entered. Python has no way to remove a hook, so one hook serves all tests."""

    def __init__(self) -> None:
        self.unpickled: list[Any] = []
        self._written: list[str] = []

    def written_outside(self, folder: Path) -> list[str]:
        """List what was written outside of a folder."""
        return [path for path in self._written if not path.startswith(str(folder))]

    def __enter__(self) -> Audit:
        if not _INSTALLED:
            sys.addaudithook(_hook)
            _INSTALLED.append(True)
        _ACTIVE.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _ACTIVE.remove(self)

    def record(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "pickle.find_class":
            self.unpickled.append(args)
        elif (event in _CHANGES or (event == "open" and args[2] & _WRITING)) and not isinstance(args[0], int):
            self._written.append(os.fsdecode(args[0]))


def _hook(event: str, args: tuple[Any, ...]) -> None:
    for audit in _ACTIVE:
        audit.record(event, args)
