"""Find the snapshot to resume from, the same one on all ranks, and save and restore for a loop of your own."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch

from lockstep.arguments import check_instance
from lockstep.communicators import Communicator
from lockstep.errors import SnapshotError
from lockstep.program import PROGRAM, describe_program
from lockstep.snapshots.commit import write_now
from lockstep.snapshots.disk import Disk
from lockstep.snapshots.manifest import read_manifest
from lockstep.snapshots.snapshot import Snapshot, load_from, newest_whole
from lockstep.snapshots.updater_state import Collector, Resumption, fitting, prepare
from lockstep.updaters import Updater


def find(updater: Updater, source: str | Path, out: Path, *, argument: str = "resume") -> Snapshot | None:
    """Find the snapshot to resume from, the same one on all ranks. Every rank must call this.

    Args:
        updater: The updater of the run.
        source: ``"auto"`` for the newest whole snapshot in `out`, if there is one; or the folder of a snapshot, or of
            a run of which the newest one is used.
        out: The folder of the run.
        argument: The name of the argument that `source` is, for the error.

    Raises:
        SnapshotError: If there is no whole snapshot although there should be one.
    """
    found = _agree(updater.communicator, lambda: newest_whole(out) if source == "auto" else load_from(source))
    if found is None and source != "auto":
        remedy = ' Pass "auto" for the newest one in `out`.' if argument == "resume" else ""
        raise SnapshotError(f"`{argument}` must name a snapshot or a run that has one, got {source}.{remedy}")
    return found


def _agree(communicator: Communicator, read: Callable[[], Snapshot | None]) -> Snapshot | None:
    """Read a snapshot on every rank, and return the newest of them on all ranks.

    The lowest rank that has it sends it to the ranks that have an older one or none.

    Args:
        communicator: The communicator of the run.
        read: Returns the newest snapshot that this rank finds, or None.

    Raises:
        SnapshotError: On every rank, if no rank has a snapshot that is whole although one has found some.
    """
    if communicator.size == 1:
        return read()
    own, report = None, list[Any]()
    # Rank 0 first, because the ranks of a machine see one folder, and the first to read it renames what is damaged.
    if communicator.rank == 0:
        own, report = _try(read)
    communicator.exchange(b"")
    if communicator.rank != 0:
        own, report = _try(read)
    found = communicator.exchange_json(report)
    newest = max(update for update, _, _ in found)
    errors = [f"Rank {rank}: {error}" for rank, (_, _, error) in enumerate(found) if error is not None]
    if newest < 0:
        if errors:
            raise SnapshotError(" ".join(errors))
        return None
    owner = next(rank for rank, (update, _, _) in enumerate(found) if update == newest)
    return own if all(digest == found[owner][1] for _, digest, _ in found) else _send(communicator, own, owner)


def _try(read: Callable[[], Snapshot | None]) -> tuple[Snapshot | None, list[Any]]:
    """Read a snapshot, and describe it for the other ranks by its update, its digest and the error."""
    snapshot, error = None, None
    try:
        snapshot = read()
    except (SnapshotError, OSError) as raised:
        # The other ranks are waiting for this rank's report, and raise if none of them has a snapshot.
        error = str(raised)
    known = (-1, "") if snapshot is None else (snapshot.update, snapshot.manifest.run)
    return snapshot, [*known, error]


def _send(communicator: Communicator, own: Snapshot | None, owner: int) -> Snapshot:
    """Send the snapshot of one rank to all, and verify what arrives."""
    payload, tensors = b"", dict[str, torch.Tensor]()
    if communicator.rank == owner and own is not None:
        payload = json.dumps(str(own.path)).encode() + b"\n" + own.manifest.raw
        tensors = own.tensors()
    path, _, raw = communicator.exchange(payload)[owner].partition(b"\n")
    manifest = read_manifest(raw)
    files = {
        file: {name: tensors[f"{file}/{name}"] if tensors else stored.empty() for name, stored in named.items()}
        for file, named in manifest.files.items()
    }
    # As bytes, which every transport can send for every dtype; in the order of the manifest, which all ranks have.
    sent = [each.reshape(-1).view(torch.uint8) for named in files.values() for each in named.values() if each.numel()]
    communicator.broadcast(sent, source=owner)
    snapshot = Snapshot(Path(json.loads(path)), manifest, files)
    snapshot.check()
    return snapshot


def first_rank_in_folder(communicator: Communicator, out: Path) -> list[int]:
    """Return for each rank the lowest rank that has the same folder. Every rank must call this.

    Args:
        communicator: The communicator of the run.
        out: The folder on this rank, which must exist.
    """
    if communicator.size == 1:
        return [0]
    # A random name, because a file of an earlier run would look like a shared folder.
    name = f".rank-{communicator.rank}-{secrets.token_hex(8)}"
    path = out / name
    path.touch(exist_ok=False)
    try:
        names = communicator.exchange_json(name)
        seen = min(rank for rank, each in enumerate(names) if each == name or (out / each).exists())
        # An exchange before the file is removed: the others must have looked for it.
        return communicator.exchange_json(seen)
    finally:
        path.unlink(missing_ok=True)


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
    check_instance("updater", updater, Updater, "an updater")
    check_instance("path", path, str | os.PathLike, "a path")
    error, communicator = "", updater.communicator
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
        errors = communicator.exchange_json(error)
    if errors[0]:
        raise SnapshotError(f"Rank 0 could not save a snapshot: {errors[0]}")


def _save(updater: Updater, target: Path) -> None:
    # First, because other ranks may wait to take part in it.
    content = Collector(updater, run_id=secrets.token_hex(8)).collect()
    if target.exists():
        cure = "Choose another path, remove it, or continue from it by lockstep.snapshots.restore(updater, path)."
        raise FileExistsError(f"`path` must not exist, got {target}. {cure}")
    write_now(Disk(), target, content, ["saved by a call"], {PROGRAM: describe_program()})


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
    check_instance("updater", updater, Updater, "an updater")
    check_instance("path", path, str | os.PathLike, "a path")
    snapshot = find(updater, path, Path(path), argument="path")
    if snapshot is None:
        raise SnapshotError(f"`path` must be a snapshot, got {path}.")
    resumption = prepare(updater, snapshot, accept)
    with fitting(resumption.path):
        updater.load_state_dict(resumption.updater)
    return resumption
