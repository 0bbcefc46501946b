"""The calls of the operating system that change something on the disk, and no others."""

from __future__ import annotations

import errno
import os
from pathlib import Path


class Disk:
    """Changes files and folders. Tests record these calls, or have them fail."""

    def create_folder(self, path: Path) -> None:
        """Create a folder."""
        path.mkdir()

    def create_file(self, path: Path) -> int:
        """Create a file for writing and return its descriptor. It must not exist, not even as a link."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)

    def reserve(self, descriptor: int, size: int) -> None:
        """Reserve space for a file, so that a full disk shows before anything is written."""
        if not size or not hasattr(os, "posix_fallocate"):
            return
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            # Some file systems cannot; there a full disk shows when the file is written.
            if error.errno not in {errno.EINVAL, errno.EOPNOTSUPP}:
                raise

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
