"""Copy the state of a run, and write the copy as a snapshot."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch

from lockstep._version import __version__
from lockstep.digest import blocks_of
from lockstep.errors import SnapshotError
from lockstep.snapshots.content import ABOUT, DAMAGED, MANIFEST, STATE, TEMPORARY, Content, model_file
from lockstep.snapshots.disk import Disk, create, remove, set_aside, write_file
from lockstep.snapshots.manifest import FORMAT, PLAIN, Manifest, read_manifest, seal
from lockstep.snapshots.snapshot import verify
from lockstep.snapshots.tensor_file import DTYPES, TensorInfo, file_order, header
from lockstep.snapshots.tree import Leaf, encode

PIECE: Final = 4 << 20
"""Smaller pieces are joined, because a call of the system for each of them would take longer than the copy."""
Pieces: TypeAlias = Iterator[memoryview | bytearray]
_STORED: Final = frozenset(getattr(torch, name) for name in DTYPES)


@dataclass(frozen=True, kw_only=True)
class Staged:
    """A content whose trees have been copied by value, and whose tensors are still to be copied.

    Attributes:
        update: The number of updates so far.
        document: The fields of the manifest but those of the files.
        files: The indices of the tensors of each file by their names.
        tensors: The tensors without those that are the same memory as one before.
    """

    update: int
    document: dict[str, Any]
    files: Mapping[str, Mapping[str, int]]
    tensors: Sequence[torch.Tensor]


def stage(content: Content, reasons: Iterable[str]) -> Staged:
    """Check a content and copy its trees, but not its tensors.

    Args:
        content: The content.
        reasons: Why the snapshot is written.

    Raises:
        TypeError: If the content holds something that a snapshot cannot hold. The message names its path.
        ValueError: If the number of updates is missing or the name of a model cannot name a file.
    """
    leaves: list[Leaf] = []
    trees = {name: encode(dict(getattr(content, name)), (name,), leaves) for name in PLAIN}
    if leaves:
        raise TypeError(f"{', '.join(f'`{key}`' for key in PLAIN)} must hold no tensors.")
    update = content.progress.get("update")
    if type(update) is not int or update < 0:
        raise ValueError(f'`progress` must hold the number of updates under "update", got {update!r}.')
    trees |= {name: encode(getattr(content, name), (name,), leaves) for name in ("state", "surroundings")}
    places = _Places()
    document = {
        "format": FORMAT,
        "writer": f"lockstep {__version__}",
        "run_id": content.run_id,
        "parent": content.parent,
        "reasons": tuple(reasons),
        **trees,
        "models": {name: places.add_model(name, tensors) for name, tensors in content.models.items()},
    }
    places.add_leaves(leaves)
    return Staged(update=update, document=document, files=places.files, tensors=places.tensors)


class _Places:
    """Finds out which tensors are the same memory, and gives each of them a place in a file."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.files: dict[str, dict[str, int]] = {}
        self._indices: dict[int, list[int]] = {}
        self._at: dict[int, list[str]] = {}

    def add_model(self, model: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
        """Add the file of a model, and return the names that are tied, each with the name that is stored.

        The file is complete, also if models share tensors, because it is loaded without the others.
        """
        file = model_file(model)
        named, stored, tied = self.files.setdefault(file, {}), dict[int, str](), dict[str, str]()
        for name, tensor in tensors.items():
            # Names in a file of safetensors are UTF-8, and it keeps one for itself.
            is_name = type(name) is str and name != "__metadata__" and (name.isascii() or _as_utf8(name) == name)
            if not (is_name and isinstance(tensor, torch.Tensor)):
                raise TypeError(f"`models` must hold tensors by their names, got {name!r} in {model!r}.")
            index = self._index(name, tensor)
            if index in stored:
                tied[name] = stored[index]
            else:
                stored[index], named[name] = name, index
                self._at.setdefault(index, [file, name])
        return tied

    def add_leaves(self, leaves: Iterable[Leaf]) -> None:
        """Add the file of the tensors of trees that no model has, and set the places of all of them in the trees."""
        named = self.files[STATE] = {}
        for path, tensor, tagged in leaves:
            index = self._index("/".join(map(str, path)), tensor)
            if index not in self._at:
                name = given = _as_utf8("/".join(map(str, path)))
                while name in named:
                    # The paths of {0: x, "0": y} read alike.
                    name = f"{given}#{len(named)}"
                named[name], self._at[index] = index, [STATE, name]
            tagged["$tensor"] = self._at[index]

    def _index(self, name: str, tensor: torch.Tensor) -> int:
        """Return the index of the first tensor that is the same memory."""
        if tensor.layout is not torch.strided or tensor.dtype not in _STORED or tensor.is_meta:
            raise TypeError(
                f"A snapshot holds dense tensors of {', '.join(DTYPES)}, got {name!r} of {tensor.dtype}, the layout "
                f"{tensor.layout} and the shape {list(tensor.shape)} on {tensor.device}. Hold complex128 as pairs of "
                "float64 (torch.view_as_real), and other formats as dense tensors."
            )
        at = self._indices.setdefault(tensor.data_ptr(), [])
        # Tensors without elements have no memory that they could share.
        for index in at if tensor.numel() else ():
            if _view(self.tensors[index]) == _view(tensor):
                return index
        at.append(len(self.tensors))
        self.tensors.append(tensor)
        return at[-1]


def _view(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (tensor.device, tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())


def _as_utf8(text: str) -> str:
    # Lone surrogates have no form in UTF-8.
    return text.encode(errors="replace").decode()


class Buffers:
    """Memory on the CPU that is kept between snapshots, because fresh memory costs more than the copy."""

    def __init__(self) -> None:
        self._kept: list[torch.Tensor] = []

    @torch.no_grad()
    def copy(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy tensors into the buffers, over what was there.

        Args:
            tensors: The tensors, on any devices. When this returns, they may change.
        """
        kinds = [(tensor.dtype, tensor.shape) for tensor in tensors]
        if kinds != [(kept.dtype, kept.shape) for kept in self._kept]:
            # The old buffers go first, so that there is never more than one copy of the state in a set.
            self._kept = []
            self._kept = [torch.empty(shape, dtype=dtype) for dtype, shape in kinds]
        if kinds:
            torch._foreach_copy_(self._kept, list(tensors))
        return self._kept


def write_snapshot(
    disk: Disk, final: Path, staged: Staged, copies: Sequence[torch.Tensor], about: Mapping[str, Any]
) -> Manifest:
    """Write a snapshot, and return its manifest when it is durable.

    Args:
        disk: The calls of the operating system.
        final: The folder of the snapshot, in one that exists.
        staged: The snapshot.
        copies: The copies of its tensors.
        about: JSON values about the machine and the program, which are in no digest.

    Raises:
        OSError: If a call fails. What was written is removed, and earlier snapshots are as before.
        SnapshotError: If there is another snapshot of this update with different bits, or one that cannot be judged, or
            if the manifest would be too large to be read.

    Determinism: the tensor files depend on the content alone, not on the placement or on addresses.
    """
    process = {"host": socket.gethostname(), "process": os.getpid(), "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    temporary = final.parent / f"{TEMPORARY}{final.name}-{secrets.token_hex(4)}"
    try:
        disk.create_folder(temporary)
        raw = _seal(staged, copies, lambda file, pieces: write_file(disk, temporary / file, pieces))
        write_file(disk, temporary / ABOUT, [json.dumps({**process, **about}).encode()])
        # What the reader would refuse must not become the newest snapshot.
        manifest = read_manifest(raw)
        # Last, so that a manifest vouches only for files that are durable.
        write_file(disk, temporary / MANIFEST, [raw])
        disk.sync_folder(temporary)
        try:
            disk.rename(temporary, final)
        except OSError:
            # The system replaces no folder that has files.
            if not os.path.lexists(final):
                raise
            _settle(disk, temporary, final, manifest)
    except BaseException:
        with suppress(OSError):
            remove(disk, temporary)
        raise
    disk.sync_folder(final.parent)
    return manifest


def write_now(disk: Disk, final: Path, content: Content, reasons: Iterable[str], about: Mapping[str, Any]) -> Manifest:
    """Copy a content and write it as a snapshot, and return its manifest when it is durable.

    Args:
        disk: The calls of the operating system.
        final: The folder of the snapshot. Those above it are created.
        content: The content.
        reasons: Why the snapshot is written.
        about: JSON values about the machine and the program, which are in no digest.

    Raises:
        OSError: As `write_snapshot`.
        SnapshotError: As `write_snapshot`.
        TypeError: As `stage`.
    """
    staged = stage(content, reasons)
    create(disk, final.parent)
    return write_snapshot(disk, final, staged, Buffers().copy(staged.tensors), about)


def _settle(disk: Disk, temporary: Path, final: Path, manifest: Manifest) -> None:
    """Decide between a written snapshot and what has its name already, such as that of a rank that was faster."""
    prefix = TEMPORARY
    try:
        found = verify(final)
    except SnapshotError as error:
        if not error.damaged:
            raise
        prefix = DAMAGED
    else:
        if (found.run_id, found.training) != (manifest.run_id, manifest.training):
            raise SnapshotError(
                f"{final} holds another snapshot of update {manifest.update}: of the run {found.run_id!r} with the "
                f"digest {found.training}, and this one is of {manifest.run_id!r} with {manifest.training}.",
                expected=found.training,
                found=manifest.training,
            )
        # A run that was stopped during an evaluation has not observed its values.
        if manifest.metrics.keys() <= found.metrics.keys():
            remove(disk, temporary)
            return
    # If the process ends between the two calls, the run resumes from an older snapshot.
    [aside] = set_aside(disk, [final], prefix)
    try:
        disk.rename(temporary, final)
    except OSError:
        disk.rename(aside, final)
        raise
    if prefix == TEMPORARY:
        disk.sync_folder(final.parent)
        remove(disk, aside)


def describe(staged: Staged, copies: Sequence[torch.Tensor]) -> Manifest:
    """Return the manifest that a snapshot has, without writing it.

    Args:
        staged: The snapshot.
        copies: The copies of its tensors.
    """
    return read_manifest(_seal(staged, copies, lambda _, pieces: deque(pieces, maxlen=0)))


def _seal(staged: Staged, copies: Sequence[torch.Tensor], write: Callable[[str, Pieces], object]) -> bytes:
    """Write the tensor files by a function of their names and pieces, and return the bytes of the manifest."""
    described: dict[str, Any] = {}
    for file, named in staged.files.items():
        infos = {name: TensorInfo.of(copies[index]) for name, index in named.items()}
        described[file] = {name: (infos[name].dtype, infos[name].shape, list[str]()) for name in file_order(infos)}
        write(file, _pieces(header(infos), {name: copies[index] for name, index in named.items()}, described[file]))
    return seal({**staged.document, "files": described})


def _pieces(head: bytes, tensors: Mapping[str, torch.Tensor], described: Mapping[str, Any]) -> Pieces:
    """Yield the content of a file, and add the hashes of each tensor to what is described of it."""
    small = bytearray(head)
    for name, (_, _, hashes) in described.items():
        for block in blocks_of(tensors[name]):
            hashes.append(hashlib.sha256(block).hexdigest())
            if len(small) + len(block) > PIECE:
                yield small
                small = bytearray()
            if len(block) > PIECE:
                yield block
            else:
                small += block
    yield small
