"""Read and change the files of a run's snapshots, and lock the folder of a run.

What is read may be damaged or hostile: no link is followed, and nothing outside of the folder of a run is opened.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import stat
import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Final

from lockstep.errors import SnapshotError, SnapshotWarning, warn
from lockstep.side_files import kind_of, sync_folder
from lockstep.snapshots.content import FOLDER, LOCK, MANIFEST, TEMPORARY

if sys.platform != "win32":  # where the package can be imported, though not write snapshots
    import fcntl

_NOT_DAMAGE: Final = frozenset({errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Errors that say nothing about what is on the disk."""


def is_folder(path: Path, remedy: str) -> bool:
    """Return whether there is a folder.

    Args:
        path: The path.
        remedy: What to do if there is something else, for the error.

    Raises:
        SnapshotError: If there is a link or anything else that is no folder.
    """
    kind = kind_of(path)
    if kind not in {"", "a folder"}:
        raise SnapshotError(f"{path} must be a folder, got {kind}. {remedy}", damaged=False)
    return bool(kind)


def snapshots_in(out: Path) -> Path | None:
    """Return the folder of the snapshots of a run; None if there is none.

    Args:
        out: The folder of the run.

    Raises:
        SnapshotError: If it is a link or anything else that is not a folder of the run itself.
    """
    folder = out / FOLDER
    return folder if is_folder(folder, "Remove it, or use the folder of the run in which the snapshots are.") else None


@contextmanager
def opened(path: Path, name: str) -> Iterator[BufferedReader]:
    """Open a file for reading.

    Args:
        path: The folder of the file, which must be neither a link nor anything else.
        name: The name of the file, which must be a regular one.

    Yields:
        The file.

    Raises:
        SnapshotError: If one of them is something else or cannot be read.
    """
    folder = -1
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        folder = os.open(path, flags | os.O_DIRECTORY)
        # Without O_NONBLOCK, opening a pipe would wait for a writer.
        with open(name, "rb", opener=lambda name, _: os.open(name, flags | os.O_NONBLOCK, dir_fd=folder)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
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
        if folder >= 0:
            os.close(folder)


def read_file(path: Path, name: str, at_most: int) -> bytes:
    """Read a small file whole.

    Args:
        path: The folder of the file.
        name: The name of the file.
        at_most: The largest size that it may have.

    Raises:
        SnapshotError: If it is larger, is no regular file, or cannot be read.
    """
    with opened(path, name) as file:
        # The size is that of the file, not one that a manifest claims.
        size = os.fstat(file.fileno()).st_size
        if size > at_most:
            raise SnapshotError(f"{path / name} must have at most {at_most} bytes, got {size}.", file=name)
        return file.read(size)


class Disk:
    """Changes files and folders. Tests record these calls, or have them fail."""

    create_folder = staticmethod(os.mkdir)
    rename = staticmethod(os.rename)
    remove_file = staticmethod(os.unlink)
    remove_folder = staticmethod(os.rmdir)
    sync_folder = staticmethod(sync_folder)
    sync = staticmethod(os.fsync)
    close = staticmethod(os.close)

    def create_file(self, path: Path) -> int:
        """Create a file for writing and return its descriptor. It must not exist, not even as a link."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)

    def write(self, descriptor: int, data: memoryview) -> None:
        """Write all bytes at the end of a file."""
        while data:
            data = data[os.write(descriptor, data) :]


def create(disk: Disk, folder: Path) -> None:
    """Create a folder with its parents, durably."""
    if not folder.is_dir():
        create(disk, folder.parent)
        try:
            disk.create_folder(folder)
        except FileExistsError:
            # Another rank was faster.
            if not folder.is_dir():
                raise
        disk.sync_folder(folder.parent)


def write_file(disk: Disk, path: Path, pieces: Iterable[bytes | bytearray | memoryview]) -> None:
    """Write a file, and return when its content is durable.

    Args:
        disk: The calls of the operating system.
        path: The file, which must not exist.
        pieces: The content.
    """
    descriptor = disk.create_file(path)
    try:
        for piece in pieces:
            disk.write(descriptor, memoryview(piece))
        # By the descriptor that wrote: another one might not see an error of writing back. After an error the attempt
        # is over, because the system marks the pages as written, and a second call would succeed.
        disk.sync(descriptor)
    finally:
        disk.close(descriptor)


def set_aside(disk: Disk, folders: Iterable[Path], prefix: str) -> list[Path]:
    """Rename snapshots durably, and return their new names.

    Args:
        disk: The calls of the operating system.
        folders: The folders, all in one folder.
        prefix: What the new names begin with.

    Raises:
        OSError: If a call fails.
    """
    renamed = []
    for folder in folders:
        renamed.append(folder.with_name(f"{prefix}{folder.name}-{secrets.token_hex(4)}"))
        disk.rename(folder, renamed[-1])
    if renamed:
        disk.sync_folder(renamed[0].parent)
    return renamed


_LEFT: Final = "It is left as it is; remove it yourself."


def discard(disk: Disk, folder: Path) -> None:
    """Remove a snapshot so that at no time a part of it has the name of a snapshot.

    Args:
        disk: The calls of the operating system.
        folder: The folder.

    Raises:
        OSError: If a call fails.
        SnapshotError: If it is a link or anything else that is no folder.
    """
    if is_folder(folder, _LEFT):
        # Files that are removed from a folder with its name might be gone after a power failure, and the name not.
        for renamed in set_aside(disk, [folder], TEMPORARY):
            remove(disk, renamed)


def remove(disk: Disk, folder: Path) -> None:
    """Remove a folder with its files, the manifest first.

    Raises:
        OSError: If a call fails.
        SnapshotError: If it is a link, which may lead to files of others, or anything else that is no folder.
    """
    if is_folder(folder, _LEFT):
        for path in sorted(folder.iterdir(), key=lambda path: path.name != MANIFEST):
            disk.remove_file(path)
        disk.remove_folder(folder)


class FolderLock:
    """A lock on a folder, held until it is closed or the process ends in any way.

    Args:
        folder: The folder.

    Raises:
        SnapshotError: If another run holds it. The message names its host and process.
    """

    def __init__(self, folder: Path) -> None:
        self._path = path = folder / LOCK
        kind = kind_of(path)
        # Opening a device may already do something, and what is written into a second name changes the file elsewhere.
        if kind not in {"", "a file"} or (kind and path.lstat().st_nlink > 1):
            raise SnapshotError(f"{path} must be a file with this name alone, got {kind}. Remove it.")
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._descriptor, 1000, 0).decode(errors="replace").strip()
            self._forget()
            raise SnapshotError(
                f"{folder} is in use by {holder or 'another process'}. Two runs must not write to one folder; choose "
                "another `out`, or wait for the other run to end. A trainer takes one Snapshot, which keeps the newest "
                "by `keep` and the best one by `best`."
            ) from None
        except OSError as error:
            if error.errno not in {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}:
                self._forget()
                raise
            message = f"The file system of {folder} has no locks; make sure that no other run writes to it."
            warn(message, SnapshotWarning)
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        # A forked process, such as a worker that loads data, shares the lock and may outlive this process.
        forget = weakref.WeakMethod(self._forget)
        os.register_at_fork(after_in_child=lambda: (method := forget()) and method())

    @property
    def is_in_place(self) -> bool:
        """Whether the folder has still the file that is locked, and was neither removed nor moved."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.lstat(self._path))
        except OSError:
            return False

    def close(self) -> None:
        """Release the lock. Further calls do nothing."""
        if self._descriptor >= 0:
            with suppress(OSError):
                # Closing alone does not release it while a process that was just forked has the descriptor as well.
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            self._forget()

    def _forget(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
