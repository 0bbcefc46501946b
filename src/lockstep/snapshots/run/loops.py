"""Save and load snapshots in training loops without a trainer."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from lockstep.errors import SnapshotError
from lockstep.program import PROGRAM, describe_program
from lockstep.snapshots.commit import Buffers, remove, stage, write_folder
from lockstep.snapshots.disk import Disk
from lockstep.snapshots.run.collect import Collector
from lockstep.snapshots.run.restoring import fitting
from lockstep.snapshots.run.resuming import Resumption, find, prepare
from lockstep.updaters import Updater


def save(updater: Updater, path: str | Path) -> None:
    """Write a snapshot of an updater, and return when it is durable. With several processes, rank 0 writes it.

    Args:
        updater: The updater, between two updates.
        path: The folder of the snapshot, which must not exist.

    Raises:
        FileExistsError: If the folder exists.
        OSError: If it cannot be written.
        SnapshotError: On the other ranks, for any error of rank 0.
        TypeError: If the state holds something that a snapshot cannot hold.

    Every rank must call this, and returns when the snapshot is there.
    """
    error = ""
    communicator = updater.communicator
    try:
        if communicator.rank == 0:
            _save(updater, Path(path))
        elif updater.shares_state:
            # Rank 0 needs the part of every rank.
            updater.live_state()
    except BaseException as raised:
        error = f"{type(raised).__name__}: {raised}"
        raise
    finally:
        # Also after an error: the other ranks are waiting, and must not take the snapshot for durable.
        errors = communicator.exchange(error.encode()) if communicator.size > 1 else [b""]
    if errors[0]:
        raise SnapshotError(f"Rank 0 could not save a snapshot: {errors[0].decode()}")


def _save(updater: Updater, target: Path) -> None:
    # First, because other ranks may wait to take part in it.
    content = Collector(updater, run_id=secrets.token_hex(8)).collect()
    if target.exists():
        raise FileExistsError(f"`path` must not exist, got {target}.")
    target.parent.mkdir(parents=True, exist_ok=True)
    staged = stage(content, ["saved by a call"])
    disk, temporary = Disk(), target.with_name(f".{target.name}-{secrets.token_hex(4)}")
    try:
        write_folder(disk, temporary, staged, Buffers().copy(staged.tensors), {PROGRAM: describe_program()})
        disk.rename(temporary, target)
    except BaseException:
        with suppress(OSError):
            remove(disk, temporary)
        raise
    disk.sync_folder(target.parent)


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
