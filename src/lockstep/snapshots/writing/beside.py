"""Write a snapshot into the folder of a run that other processes may be writing to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lockstep.digest import digest
from lockstep.errors import SnapshotError
from lockstep.snapshots.format import FOLDER, Content, folder_name, training_of
from lockstep.snapshots.reading import verify
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
        SnapshotError: If there is a snapshot of this update with other bits or of another run.
        TypeError: If the content holds something that a snapshot cannot hold.
    """
    frozen = freeze_content(content)
    folder = Path(out) / FOLDER
    final = folder / folder_name(frozen.update)
    # One that is whole was renamed when it was durable, so that there is nothing left to do.
    if final.exists() and _is_same(final, content):
        return final
    folder.mkdir(parents=True, exist_ok=True)
    copies = Buffers().copy(frozen.memory)
    staged = Staged(frozen=frozen, copies=copies, reasons=tuple(reasons), about=about or {})
    path, _ = write_snapshot(disk or Disk(), folder, staged)
    return path


def _is_same(folder: Path, content: Content) -> bool:
    """Return whether a folder has a whole snapshot of a content. Whatever else it has, writing the content decides."""
    try:
        found = verify(folder)
    except SnapshotError:
        return False
    return (found.run_id, found.training) == (content.run_id, digest(training_of(content)))
