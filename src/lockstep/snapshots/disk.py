"""The calls of the operating system that change something on the disk, and the lock that keeps two runs apart."""

from __future__ import annotations

import errno
import os
import socket
import sys
import warnings
import weakref
from contextlib import suppress
from pathlib import Path

from lockstep.errors import SnapshotError, SnapshotWarning
from lockstep.side_files import kind_of
from lockstep.snapshots.content import LOCK

if sys.platform != "win32":  # where the package can be imported, though not write snapshots
    import fcntl


class Disk:
    """Changes files and folders. Tests record these calls, or have them fail."""

    def create_folder(self, path: Path) -> None:
        """Create a folder."""
        path.mkdir()

    def create_file(self, path: Path) -> int:
        """Create a file for writing and return its descriptor. It must not exist, not even as a link."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)

    def write(self, descriptor: int, data: memoryview) -> None:
        """Write all bytes at the end of a file."""
        while data:
            data = data[os.write(descriptor, data) :]

    def sync(self, descriptor: int) -> None:
        """Wait until the content of a file is on the disk."""
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        """Close a file."""
        os.close(descriptor)

    def sync_folder(self, path: Path) -> None:
        """Wait until the names in a folder are on the disk."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            # Some network file systems have no such call for folders, and write names at once.
            if error.errno != errno.EINVAL:
                raise
        finally:
            os.close(descriptor)

    def rename(self, path: Path, new: Path) -> None:
        """Rename a folder."""
        path.rename(new)

    def remove_file(self, path: Path) -> None:
        """Remove a file."""
        path.unlink()

    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder."""
        path.rmdir()


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
                "another `out`, or wait for the other run to end."
            ) from None
        except OSError as error:
            if error.errno not in {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}:
                self._forget()
                raise
            message = f"The file system of {folder} has no locks; make sure that no other run writes to it."
            warnings.warn(message, SnapshotWarning, stacklevel=2)
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
