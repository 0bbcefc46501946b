"""Read files of a folder that may be damaged or hostile. Nothing outside of the folder is opened."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from lockstep.errors import SnapshotError
from lockstep.side_files import kind_of
from lockstep.snapshots.content import FOLDER

_NOT_DAMAGE: Final = frozenset({errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Errors that say nothing about what is on the disk."""


def snapshots_in(out: Path) -> Path | None:
    """Return the folder of the snapshots of a run; None if there is none.

    Args:
        out: The folder of the run.

    Raises:
        SnapshotError: If it is a link or anything else that is not a folder of the run itself.
    """
    folder = out / FOLDER
    kind = kind_of(folder)
    if kind not in {"", "a folder"}:
        raise SnapshotError(
            f"{folder} must be a folder, got {kind}. Remove it, or use the folder of the run in which the snapshots "
            "are.",
            damaged=False,
        )
    return folder if kind else None


@contextmanager
def opened(path: Path, name: str) -> Iterator[int]:
    """Open a file for reading.

    Args:
        path: The folder of the file, which must be neither a link nor anything else.
        name: The name of the file, which must be a regular one.

    Yields:
        The descriptor of the file.

    Raises:
        SnapshotError: If one of them is something else or cannot be read.
    """
    folder, file = -1, -1
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        folder = os.open(path, flags | os.O_DIRECTORY)
        # Without O_NONBLOCK, opening a pipe would wait for a writer.
        file = os.open(name, flags | os.O_NONBLOCK, dir_fd=folder)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise SnapshotError(f"{path / name} must be a regular file, got {kind_of(path / name)}.", file=name)
        yield file
    except OSError as error:
        at, must = (path, "the folder of a snapshot") if folder < 0 else (path / name, "a regular file")
        raise SnapshotError(
            f"{at} cannot be read: {error.strerror}. It must be {must}, got {kind_of(at) or 'nothing'}.",
            file=name if folder >= 0 else None,
            damaged=error.errno not in _NOT_DAMAGE,
        ) from error
    finally:
        for descriptor in (file, folder):
            if descriptor >= 0:
                os.close(descriptor)


def read_into(descriptor: int, data: memoryview | bytearray, what: str) -> None:
    """Read bytes until memory is full.

    Args:
        descriptor: The file.
        data: The memory.
        what: The path of the file, for the error.

    Raises:
        SnapshotError: If the file ends before.
    """
    view = memoryview(data).cast("B")
    while view:
        count = os.readv(descriptor, [view])
        if not count:
            raise SnapshotError(f"{what} ends {len(view)} bytes too early.")
        view = view[count:]


def read_file(path: Path, name: str, at_most: int) -> bytes:
    """Read a small file whole.

    Args:
        path: The folder of the file.
        name: The name of the file.
        at_most: The largest size that it may have.

    Raises:
        SnapshotError: If it is larger, is no regular file, or cannot be read.
    """
    with opened(path, name) as descriptor:
        # The size is that of the file, not one that a manifest claims.
        size = os.fstat(descriptor).st_size
        if size > at_most:
            raise SnapshotError(f"{path / name} must have at most {at_most} bytes, got {size}.", file=name)
        data = bytearray(size)
        read_into(descriptor, data, str(path / name))
        return bytes(data)
