"""Find the snapshots of a run."""

from __future__ import annotations

import os
import secrets
import warnings
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from lockstep.errors import SnapshotError, SnapshotWarning
from lockstep.snapshots.format import DAMAGED, FOLDER, MANIFEST, Limits, Manifest, read_manifest, update_of
from lockstep.snapshots.reading.files import Folder
from lockstep.snapshots.reading.snapshot import Snapshot, load


class Found(NamedTuple):
    """A folder with the name of a snapshot.

    Attributes:
        path: The folder.
        update: The update in its name.
        manifest: Its manifest, whose files have not been verified; None if the manifest cannot be read.
        error: Why it cannot be read; None if it can.
    """

    path: Path
    update: int
    manifest: Manifest | None
    error: SnapshotError | None


def list_snapshots(out: str | Path, *, limits: Limits | None = None) -> list[Found]:
    """List the snapshots of a run by their manifests, in ascending order of updates.

    Args:
        out: The folder of the run.
        limits: Bounds on what is read.
    """
    found = []
    for update, path in _folders(Path(out)):
        try:
            manifest = _manifest(path, limits or Limits())
            _check_name(manifest, update)
            found.append(Found(path, update, manifest, None))
        except SnapshotError as error:
            found.append(Found(path, update, None, error))
    return found


def newest_whole(out: str | Path, *, limits: Limits | None = None) -> Snapshot | None:
    """Load the newest snapshot of a run that is whole. Damaged ones are renamed to ``damaged-…``, with a warning.

    Args:
        out: The folder of the run.
        limits: Bounds on what is read.

    Returns:
        The snapshot, or None if the run has none.

    Raises:
        SnapshotError: If the run has snapshots, but none of them is whole, or if one cannot be read for a reason that
            is not in the snapshot, such as a missing permission or a format that is too new.
    """
    bounds = limits or Limits()
    problems: list[str] = []
    for update, path in reversed(_folders(Path(out))):
        try:
            snapshot = load(path, limits=bounds)
            _check_name(snapshot.manifest, update)
        except SnapshotError as error:
            if not error.damaged:
                raise
            # A link that leads nowhere is damaged; it would be listed again and again.
            if not os.path.lexists(path):
                # The run that writes here has removed it, and has written newer ones meanwhile.
                return newest_whole(out, limits=limits)
            problems.append(str(error))
            message = f"The snapshot {path.name} is damaged{_set_aside(path)}; the one before it is used. {error}"
            warnings.warn(message, SnapshotWarning, stacklevel=2)
        else:
            return snapshot
    if problems:
        raise SnapshotError(f"No snapshot in {Path(out) / FOLDER} is whole: {' '.join(problems)}")
    return None


def damaged_manifests(out: str | Path) -> list[Manifest]:
    """Read the manifests of snapshots that were found damaged and renamed, if the manifests themselves are whole.

    Args:
        out: The folder of the run.
    """
    found = []
    for path in sorted((Path(out) / FOLDER).glob(f"{DAMAGED}*")):
        with suppress(SnapshotError):
            found.append(_manifest(path, Limits()))
    return found


def _set_aside(path: Path) -> str:
    """Rename a damaged snapshot, so that it is not taken for a whole one, and return what happened for the message."""
    new = path.with_name(f"{DAMAGED}{path.name}-{secrets.token_hex(4)}")
    try:
        path.rename(new)
    except OSError as error:
        return f" and could not be renamed ({error.strerror})"
    return f" and is now named {new.name}"


def _folders(out: Path) -> list[tuple[int, Path]]:
    """List the folders with names of snapshots in ascending order of updates."""
    try:
        paths = list((out / FOLDER).iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    updates = ((update_of(path.name), path) for path in paths)
    return sorted((update, path) for update, path in updates if update is not None)


def _manifest(path: Path, limits: Limits) -> Manifest:
    with Folder(path) as folder:
        return read_manifest(folder.read(MANIFEST, at_most=limits.manifest_bytes), limits)


def _check_name(manifest: Manifest, update: int) -> None:
    if manifest.update != update:
        raise SnapshotError(f"The folder of update {update} holds the snapshot of update {manifest.update}.")
