"""Side files: the files in the folder of a run beside its snapshots, such as its log.

All of them follow one rule. If one cannot be written, a warning names it, the run goes on, and the next write tries
again, so that nothing is missing as soon as the disk can be written. Links, FIFOs and devices are refused, so that
nothing outside of the folder is read or changed, and what is damaged is named before training.
"""

from __future__ import annotations

import csv
import errno
import hashlib
import json
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import Any, Final

from lockstep.errors import SideFileError, SideFileWarning, warn

DAMAGE: Final = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError, csv.Error)
"""What parsing a file raises that is damaged, or made with intent."""

_KINDS: Final = {
    "l": "a link",
    "p": "a FIFO",
    "s": "a socket",
    "b": "a device",
    "c": "a device",
    "d": "a folder",
    "-": "a file",
}
_SHOWN: Final = 60
"""The number of characters of a damaged line in an error."""


def kind_of(path: Path) -> str:
    """Return what a path is, such as "a folder" or "a link", which is not followed; empty if there is nothing.

    Args:
        path: The path.
    """
    try:
        return _KINDS.get(stat.filemode(path.lstat().st_mode)[0], "something else")
    except (FileNotFoundError, NotADirectoryError):
        return ""


class SideFile:
    """A file in the folder of a run, whose whole content is in memory while the run writes it.

    What is added is written behind what is on the disk. If that is not what was last written, because the file is new,
    was cut, or is gone with its folder, the file is replaced in one step by the whole content. What was written in part
    is removed again, so that lines are complete or absent.

    Args:
        folder: The folder of the run.
        name: The name of the file, relative to the folder.
        required: Whether a write that fails raises instead of warning.

    Attributes:
        folder: The folder of the run. It may be set to another one, into which the next write writes all of the file.

    Raises:
        ValueError: If the name leads out of the folder.
    """

    def __init__(self, folder: Path, name: str | Path, *, required: bool = False) -> None:
        self.folder, self._name = folder, PurePath(name)
        if not self._name.parts or self._name.is_absolute() or ".." in self._name.parts:
            raise ValueError(f"`filename` must be a path below the folder of the run, got {str(name)!r}.")
        self._required = required
        self.begin()

    @property
    def path(self) -> Path:
        """The path of the file."""
        return self.folder / self._name

    @property
    def content(self) -> bytes:
        """What the file holds, or will hold as soon as it can be written."""
        return bytes(self._content)

    @property
    def position(self) -> tuple[int, str]:
        """The size of the content and its SHA-256, by which `read_until` knows it again."""
        return len(self._content), self._hash.hexdigest()

    def check(self) -> None:
        """Check that the file, if it exists, is a regular file in folders that are no links.

        Raises:
            SideFileError: If it is not. The message names it.
        """
        folders = list(self._name.parents)[:-1]
        for name in [*folders, self._name, self._new]:
            path, wanted = self.folder / name, "a folder" if name in folders else "a file"
            try:
                kind = kind_of(path)
            except OSError as error:
                raise self._unreadable(error) from error
            if kind not in {"", wanted}:
                rule = "a regular file" if wanted == "a file" else wanted
                raise SideFileError(f"{path} must be {rule}, got {kind}. Move it away.")

    def read(self) -> bytes | None:
        """Return what is on the disk; None if there is no file.

        Raises:
            SideFileError: If it cannot be read, or is not a regular file.
        """
        self.check()
        try:
            with os.fdopen(_open(self.path, os.O_RDONLY), "rb") as file:
                return file.read()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise self._unreadable(error) from error

    def read_until(self, position: tuple[int, str]) -> bytes | None:
        """Return what the file held at a position; None if it has changed since, or if there is no file.

        Args:
            position: What `position` was.

        Raises:
            SideFileError: If it cannot be read, or is not a regular file.
        """
        size, digest = position
        found = (self.read() or b"")[:size]
        return found if hashlib.sha256(found).hexdigest() == digest else None

    def read_lines(self, take: Callable[[Any], object], *, strict: bool = True) -> int | None:
        """Read lines of JSON. What follows the last line break was not finished by a process that was killed.

        Args:
            take: Called with the value of each line. It may raise what Python raises for values of another kind.
            strict: Whether a damaged line is an error. Otherwise it is left out.

        Returns:
            The number of lines that were left out; None if there is no file.

        Raises:
            SideFileError: If the file cannot be read, or a line is damaged and `strict` is set.
        """
        data = self.read()
        if data is None:
            return None
        *lines, rest = data.split(b"\n")
        left_out = 0
        for number, line in enumerate([*lines, rest] if rest and not strict else lines, 1):
            try:
                take(json.loads(line.decode()))
            except DAMAGE as error:
                if strict:
                    raise self.damaged(f"line {number} ({line.decode(errors='replace')[:_SHOWN]!r})", error) from error
                left_out += 1
        return left_out

    def read_json(self) -> dict[str, Any]:
        """Return the JSON object in the file; an empty one if there is no file.

        Raises:
            SideFileError: If the file cannot be read, or holds anything else.
        """
        data = self.read()
        try:
            return {} if data is None else dict(json.loads(data.decode()))
        except DAMAGE as error:
            raise self.damaged("the file", error) from error

    def write_json(self, value: Mapping[str, Any]) -> None:
        """Replace the file by a JSON object."""
        self.replace(json.dumps(value, indent=1).encode() + b"\n")

    def damaged(self, where: str, error: Exception | str) -> SideFileError:
        """Return the error for content that lockstep does not write."""
        return SideFileError(
            f"{self.path} must be as lockstep has written it, but {where} is damaged: {error}. Restore it from a copy, "
            "or move it to another folder to continue without it."
        )

    def begin(self, content: bytes = b"") -> None:
        """Set the whole content. The disk is unchanged until the next write, so that a start may still be refused."""
        self._content, self._hash = bytearray(content), hashlib.sha256(content)
        self._on_disk: tuple[int, int, int] | None = None
        self._is_begun = False

    def add(self, data: bytes) -> None:
        """Add to the content without writing it."""
        self._content += data
        self._hash.update(data)
        self._is_begun = True

    def append(self, data: bytes) -> None:
        """Add to the content, and write it.

        Raises:
            SideFileError: If it cannot be written and is required. It is not part of the content then.
        """
        self.add(data)
        try:
            self.write()
        except SideFileError:
            # The caller adds it again if the run is continued.
            del self._content[len(self._content) - len(data) :]
            self._hash = hashlib.sha256(self._content)
            raise

    def replace(self, content: bytes) -> None:
        """Replace the whole content, and write it.

        Raises:
            SideFileError: If it cannot be written and is required.
        """
        self.begin(content)
        self.write()

    def write(self, *, durable: bool = False) -> None:
        """Write what is not on the disk yet.

        Args:
            durable: Whether to wait until all of the content survives a power failure.

        Raises:
            SideFileError: If it cannot be written and is required.
        """
        self._is_begun = True
        try:
            self.check()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if not self._extend(durable):
                self._replace()
        except (OSError, SideFileError) as error:
            report_unwritten(str(self.path), error, required=self._required)

    def close(self) -> None:
        """Write what could not be written before, durably. What nothing was added to stays as it is on the disk.

        Raises:
            SideFileError: If it cannot be written and is required.
        """
        if self._is_begun:
            self.write(durable=True)

    @property
    def _new(self) -> PurePath:
        """The name of the file that replaces this one."""
        return self._name.with_name(f"{self._name.name}.new")

    def _unreadable(self, error: OSError) -> SideFileError:
        return SideFileError(f"{self.path} cannot be read: {error.strerror}.")

    def _extend(self, durable: bool) -> bool:
        """Write behind what is on the disk; return False if that is not what was last written."""
        if self._on_disk is None or not self.path.exists():
            return False
        with os.fdopen(_open(self.path, os.O_WRONLY), "wb") as file:
            if _identity(file.fileno()) != self._on_disk:
                return False
            self._write_from(file.fileno(), self._on_disk[2])
            if durable:
                os.fsync(file.fileno())
        return True

    def _replace(self) -> None:
        """Replace the file in one step, so that a process that is killed leaves the old one or the new one."""
        new = self.folder / self._new
        new.unlink(missing_ok=True)
        try:
            with os.fdopen(_open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
                self._write_from(file.fileno(), 0)
                os.fsync(file.fileno())
        except OSError:
            new.unlink(missing_ok=True)
            raise
        new.replace(self.path)
        # Otherwise the name of a new file might be gone after a power failure.
        sync_folder(self.path.parent)

    def _write_from(self, descriptor: int, start: int) -> None:
        """Write the content from a position on, whole or not at all."""
        position = start
        try:
            with memoryview(self._content) as content:
                while position < len(content):
                    position += os.pwrite(descriptor, content[position:], position)
        except OSError:
            os.ftruncate(descriptor, start)
            raise
        self._on_disk = _identity(descriptor)


def _open(path: Path, flags: int) -> int:
    """Open a file that was checked. If it has just been replaced, no link is followed and no FIFO waits."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk.

    Args:
        path: The folder.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems have no such call for folders, and write names at once.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


def _identity(descriptor: int) -> tuple[int, int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino, status.st_size


def report_unwritten(name: str, error: Exception, *, required: bool) -> None:
    """Warn that something beside the snapshots could not be written.

    Args:
        name: What could not be written.
        error: The reason.
        required: Whether to raise instead.

    Raises:
        SideFileError: If `required` is set.
    """
    message = f"{name} could not be written: {str(error).rstrip('.')}."
    if required:
        raise SideFileError(f"{message} The run ends because `required=True`.") from error
    warn(f"{message} The run goes on, and the next write tries again.", SideFileWarning)
