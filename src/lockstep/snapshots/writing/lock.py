"""Keep two runs from writing snapshots into one folder."""

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
from lockstep.snapshots.format.content import LOCK
from lockstep.snapshots.reading.files import kind_of

if sys.platform != "win32":  # where the package can be imported, though not write snapshots
    import fcntl


class FolderLock:
    """A lock on a folder, held until it is closed or the process ends in any way.

    Args:
        folder: The folder.

    Raises:
        SnapshotError: If another run holds it. The message names its host and process.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / LOCK
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
