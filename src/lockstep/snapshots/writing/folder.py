"""Write the files of a snapshot into a folder with a temporary name."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from lockstep._version import __version__
from lockstep.digest import TensorDigest, little_endian
from lockstep.errors import SnapshotError
from lockstep.snapshots.format import (
    ABOUT,
    MANIFEST,
    FileEntry,
    Limits,
    Manifest,
    TensorInfo,
    dtype_name,
    encode,
    file_order,
    header,
    read_manifest,
)
from lockstep.snapshots.writing.disk import Disk
from lockstep.snapshots.writing.plan import plan
from lockstep.snapshots.writing.staging import Frozen

PIECE: Final = 4 << 20
"""Bytes that are hashed and written at once. Both release the interpreter's lock meanwhile."""


@dataclass(frozen=True, kw_only=True)
class Staged:
    """A snapshot whose content has been copied, so that it can be written.

    Attributes:
        frozen: The content.
        copies: The copies of its tensors.
        reasons: Why the snapshot is written.
        about: JSON values about the machine, which are never read back.
    """

    frozen: Frozen
    copies: list[torch.Tensor]
    reasons: tuple[str, ...] = ()
    about: Mapping[str, Any]

    @property
    def bytes(self) -> int:
        """About how many bytes the snapshot has, without its manifest."""
        return sum({id(copy): copy.nbytes for copy in self.copies}.values())


def write_folder(disk: Disk, folder: Path, staged: Staged) -> Manifest:
    """Write a snapshot into a new folder, and return its manifest when all of it is durable but the folder's name.

    Args:
        disk: The calls of the operating system.
        folder: The folder, which must not exist.
        staged: The snapshot.

    Raises:
        OSError: If a call fails. What was written remains.
        SnapshotError: If the manifest would be too large to be read.
    """
    disk.create_folder(folder)
    frozen = staged.frozen
    planned = plan(frozen, staged.copies)
    files = {name: _write_tensors(disk, folder / name, tensors) for name, tensors in planned.files.items()}
    process = {"host": socket.gethostname(), "process": os.getpid(), "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    _write_file(disk, folder / ABOUT, json.dumps({**process, **staged.about}).encode())
    manifest = Manifest(
        writer=f"lockstep {__version__}",
        run_id=frozen.run_id,
        parent=frozen.parent,
        reasons=staged.reasons,
        **{name: encode(tree, _no_tensor) for name, tree in frozen.plain.items()},
        models=planned.models,
        state=planned.state,
        surroundings=planned.surroundings,
        files=files,
        training="",
        run="",
    )
    training, run = manifest.digests()
    manifest = replace(manifest, training=training, run=run)
    raw = manifest.to_bytes()
    # What the reader would refuse must not become the newest snapshot.
    read_manifest(raw, Limits(), expected=manifest)
    # Last, so that a manifest vouches only for files that are durable.
    _write_file(disk, folder / MANIFEST, raw)
    disk.sync_folder(folder)
    return manifest


def _no_tensor(*_: object) -> object:
    raise SnapshotError("Only the state of a snapshot holds tensors.")


def _write_file(disk: Disk, path: Path, content: bytes) -> None:
    descriptor = disk.create_file(path)
    try:
        disk.reserve(descriptor, len(content))
        disk.write(descriptor, memoryview(content))
        disk.sync(descriptor)
    finally:
        disk.close(descriptor)


def _write_tensors(disk: Disk, path: Path, tensors: Mapping[str, torch.Tensor]) -> FileEntry:
    """Write a safetensors file, and return its entry in the manifest."""
    infos = {name: TensorInfo(dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()}
    head = header(infos)
    size = len(head) + sum(info.bytes for info in infos.values())
    digests: dict[str, TensorDigest] = {}

    def content() -> Iterator[memoryview]:
        yield memoryview(head)
        for name in file_order(infos):
            sha = hashlib.sha256()
            for piece in _pieces(tensors[name]):
                sha.update(piece)
                yield piece
            digests[name] = TensorDigest(*infos[name], sha.hexdigest())

    descriptor = disk.create_file(path)
    try:
        disk.reserve(descriptor, size)
        for piece in _gathered(content()):
            disk.write(descriptor, piece)
        # By the descriptor that wrote: another one might not see an error of writing back. After an error the attempt
        # is over, because the system marks the pages as written, and a second call would succeed.
        disk.sync(descriptor)
    finally:
        disk.close(descriptor)
    return FileEntry(bytes=size, header=hashlib.sha256(head).hexdigest(), tensors=digests)


def _pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a contiguous tensor on the CPU in pieces."""
    if tensor.numel():
        whole = little_endian(tensor) if sys.byteorder == "big" else tensor
        # NumPy has no bfloat16, but it has its bytes.
        data: memoryview = whole.reshape(-1).view(torch.uint8).numpy().data.cast("B")
        for start in range(0, len(data), PIECE):
            yield data[start : start + PIECE]


def _gathered(pieces: Iterable[memoryview]) -> Iterator[memoryview]:
    """Join small pieces, because a call of the operating system for each of them would take longer than the copy."""
    small = bytearray()
    for piece in pieces:
        if small and len(small) + len(piece) > PIECE:
            yield memoryview(small)
            small = bytearray()
        if len(piece) >= PIECE:
            yield piece
        else:
            small += piece
    if small:
        yield memoryview(small)
