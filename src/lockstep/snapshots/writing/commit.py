"""Rename a written snapshot to the name of its update, and remove old ones."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from lockstep.errors import SnapshotError
from lockstep.snapshots.format import DAMAGED, MANIFEST, TEMPORARY, Manifest, folder_name
from lockstep.snapshots.reading import verify
from lockstep.snapshots.writing.disk import Disk
from lockstep.snapshots.writing.folder import Staged, write_folder


def write_snapshot(disk: Disk, parent: Path, staged: Staged) -> tuple[Path, Manifest]:
    """Write a snapshot, and return its folder and manifest when it is durable.

    Args:
        disk: The calls of the operating system.
        parent: The folder of the snapshots, which must exist.
        staged: The snapshot.

    Raises:
        OSError: If a call fails. What was written is removed, and earlier snapshots are as before.
        SnapshotError: If there is another snapshot of this update with different bits, or one that cannot be judged.
    """
    final = parent / folder_name(staged.frozen.update)
    temporary = parent / f"{TEMPORARY}{final.name}-{secrets.token_hex(4)}"
    try:
        manifest = write_folder(disk, temporary, staged)
        found = _found(disk, final, manifest) if final.exists() else None
        if found is None:
            _rename(disk, temporary, final, manifest)
        elif manifest.metrics.keys() <= found.metrics.keys():
            remove(disk, [temporary])
        else:
            _replace(disk, temporary, final)
    except BaseException:
        with suppress(OSError):
            remove(disk, [temporary])
        raise
    disk.sync_folder(parent)
    return final, manifest


def _rename(disk: Disk, temporary: Path, final: Path, manifest: Manifest) -> None:
    """Rename a written snapshot, unless another rank that survives was faster."""
    try:
        disk.rename(temporary, final)
    except OSError:
        if not (final.exists() and _found(disk, final, manifest)):
            raise
        remove(disk, [temporary])


def _replace(disk: Disk, temporary: Path, final: Path) -> None:
    """Replace a snapshot of a run that was stopped during an evaluation, and has not observed its values."""
    aside = temporary.with_name(f"{temporary.name}-old")
    # A folder cannot replace another one in a single call. If the process ends between the two, the run resumes from
    # an older snapshot.
    disk.rename(final, aside)
    try:
        disk.rename(temporary, final)
    except OSError:
        disk.rename(aside, final)
        raise
    disk.sync_folder(final.parent)
    remove(disk, [aside])


def _found(disk: Disk, final: Path, manifest: Manifest) -> Manifest | None:
    """Return the manifest of the same snapshot in a folder. If what it holds is damaged, rename it."""
    try:
        found = verify(final)
    except SnapshotError as error:
        if not error.damaged:
            raise
        disk.rename(final, final.with_name(f"{DAMAGED}{final.name}-{secrets.token_hex(4)}"))
        disk.sync_folder(final.parent)
        return None
    if (found.run_id, found.training) != (manifest.run_id, manifest.training):
        raise SnapshotError(
            f"{final} holds another snapshot of update {manifest.update}: of the run {found.run_id!r} with the digest "
            f"{found.training}, and this one is of {manifest.run_id!r} with {manifest.training}.",
            expected=found.training,
            found=manifest.training,
        )
    return found


def remove_durably(disk: Disk, folders: Iterable[Path]) -> None:
    """Remove snapshots so that at no time a part of one has the name of a snapshot.

    Args:
        disk: The calls of the operating system.
        folders: The folders, all in one folder.

    Raises:
        OSError: If a call fails.
    """
    renamed = []
    for folder in folders:
        renamed.append(folder.with_name(f"{TEMPORARY}{folder.name}-{secrets.token_hex(4)}"))
        disk.rename(folder, renamed[-1])
    if renamed:
        # Otherwise the files might be gone after a power failure, and the name still there.
        disk.sync_folder(renamed[0].parent)
        remove(disk, renamed)


def remove(disk: Disk, folders: Iterable[Path]) -> None:
    """Remove folders with their files, the manifest first.

    Raises:
        OSError: If a call fails.
    """
    for folder in folders:
        if folder.is_dir():
            for path in sorted(folder.iterdir(), key=lambda path: path.name != MANIFEST):
                disk.remove_file(path)
            disk.remove_folder(folder)
