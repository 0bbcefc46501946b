"""Choose the snapshot to resume from, and send it to the ranks that lack it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch

from lockstep.communicators import Communicator
from lockstep.digest import TensorDigest, tensor_digest
from lockstep.errors import SnapshotError
from lockstep.snapshots.format import Limits, read_manifest
from lockstep.snapshots.reading import Snapshot


def agree(communicator: Communicator, read: Callable[[], Snapshot | None]) -> Snapshot | None:
    """Read a snapshot on every rank, and return the newest of them on all ranks.

    The lowest rank that has it sends it to the ranks that have an older one or none. Every rank must call this.

    Args:
        communicator: The communicator of the run.
        read: Returns the newest snapshot that this rank finds, or None.

    Returns:
        The snapshot, equal on all ranks; None if no rank has one.

    Raises:
        SnapshotError: On every rank, if no rank has a snapshot that is whole although one has found some.
    """
    if communicator.size == 1:
        return read()
    own, report = None, ""
    # Rank 0 first, because the ranks of a machine see one folder, and the first to read it renames what is damaged.
    if communicator.rank == 0:
        own, report = _try(read)
    communicator.exchange(b"")
    if communicator.rank != 0:
        own, report = _try(read)
    found = [json.loads(each) for each in communicator.exchange(report.encode())]
    newest = max((each["update"] for each in found if each["error"] is None), default=-1)
    errors = [f"Rank {rank}: {each['error']}" for rank, each in enumerate(found) if each["error"] is not None]
    if newest < 0:
        if errors:
            raise SnapshotError(" ".join(errors))
        return None
    owner = next(rank for rank, each in enumerate(found) if each["update"] == newest)
    if all(each["digest"] == found[owner]["digest"] for each in found):
        return own
    return _send(communicator, own, owner)


def _try(read: Callable[[], Snapshot | None]) -> tuple[Snapshot | None, str]:
    """Read a snapshot, and describe it for the other ranks."""
    error = None
    snapshot = None
    try:
        snapshot = read()
    except (SnapshotError, OSError) as raised:
        # The other ranks are waiting for this rank's report, and raise if none of them has a snapshot.
        error = str(raised)
    described = {
        "update": -1 if snapshot is None else snapshot.update,
        "digest": "" if snapshot is None else snapshot.run_digest,
        "error": error,
    }
    return snapshot, json.dumps(described)


def _send(communicator: Communicator, own: Snapshot | None, owner: int) -> Snapshot:
    """Send the snapshot of one rank to all, and verify what arrives."""
    payload, tensors = b"", dict[str, torch.Tensor]()
    if communicator.rank == owner and own is not None:
        payload = json.dumps(str(own.path)).encode() + b"\n" + own.manifest.to_bytes()
        tensors = own.tensors()
    path, _, manifest_bytes = communicator.exchange(payload)[owner].partition(b"\n")
    manifest = read_manifest(manifest_bytes, Limits())
    files: dict[str, dict[str, torch.Tensor]] = {}
    for file, entry in manifest.files.items():
        files[file] = {
            name: tensors[f"{file}/{name}"] if tensors else _empty(each) for name, each in entry.tensors.items()
        }
    # As bytes, which every transport can send for every dtype; in the order of the manifest, which all ranks have.
    sent = [each.reshape(-1).view(torch.uint8) for named in files.values() for each in named.values() if each.numel()]
    communicator.broadcast(sent, source=owner)
    for file, entry in manifest.files.items():
        for name, expected in entry.tensors.items():
            if tensor_digest(files[file][name]) != expected.sha256:
                raise SnapshotError(f"The tensor {name!r} of {file} was damaged on its way from rank {owner}.")
    return Snapshot(Path(json.loads(path)), manifest, files)


def _empty(like: TensorDigest) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, like.dtype)
    return torch.empty(like.shape, dtype=dtype)
