"""Save and load snapshots in training loops without a trainer."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Collection
from pathlib import Path

from lockstep.errors import SnapshotError
from lockstep.snapshots.disk import Disk
from lockstep.snapshots.run.collect import Collector
from lockstep.snapshots.run.restoring import fitting
from lockstep.snapshots.run.resuming import Resumption, find, prepare
from lockstep.snapshots.writer import SnapshotWriter
from lockstep.updaters import Updater


def save(updater: Updater, path: str | Path) -> None:
    """Write a snapshot of an updater, and return when it is durable. With several processes, rank 0 writes it.

    Args:
        updater: The updater, between two updates.
        path: The folder of the snapshot, which must not exist.

    Raises:
        FileExistsError: If the folder exists.
        OSError: If its parent cannot be created, or it cannot be renamed.
        SnapshotError: If it cannot be written; a warning before it has the reason. On the other ranks, for any error
            of rank 0.
        TypeError: If the state holds something that a snapshot cannot hold.

    Every rank must call this, and returns when the snapshot is there.
    """
    error = ""
    communicator = updater.communicator
    try:
        if communicator.rank == 0:
            _save(updater, Path(path))
    except BaseException as raised:
        error = f"{type(raised).__name__}: {raised}"
        raise
    finally:
        # Also after an error: the other ranks are waiting, and must not take the snapshot for durable.
        errors = communicator.exchange(error.encode()) if communicator.size > 1 else [b""]
    if errors[0]:
        raise SnapshotError(f"Rank 0 could not save a snapshot: {errors[0].decode()}")


def _save(updater: Updater, target: Path) -> None:
    if target.exists():
        raise FileExistsError(f"`path` must not exist, got {target}.")
    target.parent.mkdir(parents=True, exist_ok=True)
    # In a folder of its own, because the name is the caller's and not that of the update.
    holder = target.parent / f".{target.name}-{secrets.token_hex(4)}"
    run_id = secrets.token_hex(8)
    try:
        with SnapshotWriter(holder, run_id=run_id, required=True) as writer:
            writer.save(Collector(updater, run_id=run_id).collect(), reasons=("saved by a call",), must=True)
        if writer.newest is None:
            raise SnapshotError(f"The snapshot could not be written to {target.parent}.")
        disk = Disk()
        disk.rename(writer.newest, target)
        disk.sync_folder(target.parent)
    finally:
        shutil.rmtree(holder, ignore_errors=True)


def restore(updater: Updater, path: str | Path, accept: Collection[str] = ()) -> Resumption:
    """Load a snapshot into an updater, so that its next update is the one that followed the snapshot.

    The models, optimizers, iterators and schedulers of the updater must be set up as in the run that was saved;
    devices and processes may differ. With several processes, every rank must call this; one that lacks the snapshot
    receives it from one that has it.

    Args:
        updater: The updater. After an error it is unchanged.
        path: The folder of a snapshot, or of a run, of which the newest whole snapshot is used.
        accept: The names of fields of the recipe that may differ from those of the snapshot.

    Returns:
        What was loaded.

    Raises:
        SnapshotError: If the snapshot is not whole.
        StateError: If the recipe differs in a field that `accept` does not name.
    """
    snapshot = find(updater, path, Path(path), argument="path")
    if snapshot is None:
        raise SnapshotError(f"`path` must be a snapshot, got {path}.")
    resumption = prepare(updater, snapshot, accept)
    with fitting(resumption.path):
        updater.load_state_dict(resumption.updater)
    return resumption
