"""Write a snapshot into the folder of a run that other processes may be writing to."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lockstep.snapshots.format import FOLDER, Content, folder_name
from lockstep.snapshots.writing.commit import write_snapshot
from lockstep.snapshots.writing.disk import Disk
from lockstep.snapshots.writing.folder import Staged
from lockstep.snapshots.writing.staging import Buffers, freeze_content


def write_beside(
    out: str | Path,
    content: Content,
    *,
    reasons: Iterable[str],
    about: Mapping[str, Any] | None = None,
    disk: Disk | None = None,
) -> Path:
    """Write one snapshot without the lock of the folder, and return when it is durable.

    The ranks that survive the loss of another one call this at the same time, and rank 0 may be writing as well. That
    is safe because each of them writes a temporary folder, and the first to rename it wins; the bits of an update are
    equal. No older snapshot is removed: the run that resumes does that.

    Args:
        out: The folder of the run.
        content: The content.
        reasons: Why the snapshot is written.
        about: JSON values about the machine, which are never read back.
        disk: The calls of the operating system.

    Returns:
        The folder of the snapshot, which may be that of another rank.

    Raises:
        OSError: If a call of the operating system fails.
        SnapshotError: If another rank has written a snapshot of this update with other bits meanwhile. One that was
            there before is returned without being read, because a rank that is ending may have no time for that.
        TypeError: If the content holds something that a snapshot cannot hold.
    """
    frozen = freeze_content(content)
    folder = Path(out) / FOLDER
    final = folder / folder_name(frozen.update)
    # It was renamed when it was durable, so there is nothing left to do.
    if final.exists():
        return final
    folder.mkdir(parents=True, exist_ok=True)
    own = {"host": socket.gethostname(), "process": os.getpid(), "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    copies = Buffers().copy(frozen.tensors)
    staged = Staged(frozen=frozen, copies=copies, reasons=tuple(reasons), about={**own, **(about or {})})
    path, _ = write_snapshot(disk or Disk(), folder, staged, previous=None)
    return path
