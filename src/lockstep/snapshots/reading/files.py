"""Read files of a folder that may be damaged or hostile."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from types import TracebackType
from typing import Final

from lockstep.errors import SnapshotError

_PIECE: Final = 4 << 20


_NOT_DAMAGE: Final = frozenset({errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Errors that say nothing about what is on the disk."""


class Folder:
    """An open folder, whose files are opened relative to it, so that renaming it meanwhile does not matter.

    Args:
        path: The folder.

    Raises:
        SnapshotError: If it cannot be opened or is not a folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            message = f"{path} must be the folder of a snapshot: {error.strerror}."
            raise SnapshotError(message, damaged=error.errno not in _NOT_DAMAGE) from error

    def __enter__(self) -> Folder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def read(self, name: str, *, exactly: int | None = None, at_most: int | None = None) -> bytes:
        """Read a file whole.

        Args:
            name: The name of the file.
            exactly: The size that the file must have.
            at_most: The largest size that the file may have.

        Raises:
            SnapshotError: If it cannot be read, is not a regular file, or has another size.
        """
        try:
            # Without O_NONBLOCK, opening a pipe would wait for a writer.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(name, flags, dir_fd=self._descriptor)
            try:
                return self._read(descriptor, name, exactly, at_most)
            finally:
                os.close(descriptor)
        except OSError as error:
            message = f"{self.path / name} cannot be read: {error.strerror}."
            raise SnapshotError(message, file=name, damaged=error.errno not in _NOT_DAMAGE) from error

    def _read(self, descriptor: int, name: str, exactly: int | None, at_most: int | None) -> bytes:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise SnapshotError(f"{self.path / name} must be a regular file.", file=name)
        size = status.st_size
        if exactly is not None and size != exactly:
            raise SnapshotError(f"{self.path / name} must have {exactly} bytes, got {size}.", file=name)
        if at_most is not None and size > at_most:
            raise SnapshotError(f"{self.path / name} must have at most {at_most} bytes, got {size}.", file=name)
        # The size is that of the file, not one that the manifest claims.
        data = bytearray(size)
        view, end = memoryview(data), 0
        while end < size:
            count = os.readv(descriptor, [view[end : end + _PIECE]])
            if not count:
                raise SnapshotError(f"{self.path / name} ends after {end} of {size} bytes.", file=name)
            end += count
        view.release()
        return bytes(data)
