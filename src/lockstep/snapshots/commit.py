"""Copy the state of a run, write the copy as a snapshot, and remove old ones."""

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
from lockstep.errors import SnapshotError
from lockstep.side_files import kind_of
from lockstep.snapshots.content import ABOUT, DAMAGED, MANIFEST, STATE, TEMPORARY, Content, model_file
from lockstep.snapshots.disk import Disk
from lockstep.snapshots.manifest import FORMAT, PLAIN, Manifest, read_manifest, seal
from lockstep.snapshots.snapshot import verify
from lockstep.snapshots.tensor_file import DTYPES, TensorInfo, blocks_of, file_order, header, memory_of, swapped
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
        document: The fields of the manifest but those of the files, without the places of tensors in files.
        models: The indices of the tensors of each model by their names.
        leaves: The tensors of the other trees, with their indices.
        tensors: The tensors without those that are the same memory as one before.
    """

    update: int
    document: dict[str, Any]
    models: Mapping[str, Mapping[str, int]]
    leaves: Sequence[tuple[Leaf, int]]
    tensors: Sequence[torch.Tensor]

    @property
    def bytes(self) -> int:
        """About how many bytes the snapshot has, without its manifest."""
        return sum(tensor.nbytes for tensor in self.tensors)


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
    document = {
        "format": FORMAT,
        "writer": f"lockstep {__version__}",
        "run_id": content.run_id,
        "parent": content.parent,
        "reasons": tuple(reasons),
        **trees,
    }
    places = _Places()
    models = {name: _indices(name, model, places) for name, model in content.models.items()}
    found = [(leaf, places.index(leaf.tensor)) for leaf in leaves]
    return Staged(update=update, document=document, models=models, leaves=found, tensors=places.tensors)


class _Places:
    """Finds out which tensors are the same memory."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._at: dict[int, list[int]] = {}

    def index(self, tensor: torch.Tensor) -> int:
        """Return the index of the first tensor that is the same memory."""
        if tensor.layout is not torch.strided or tensor.dtype not in _STORED or tensor.is_meta:
            raise TypeError(
                f"A snapshot holds dense tensors of {', '.join(DTYPES)}, got {tensor.dtype} of the layout "
                f"{tensor.layout} and the shape {list(tensor.shape)} on {tensor.device}."
            )
        at = self._at.setdefault(tensor.data_ptr(), [])
        # Tensors without elements have no memory that they could share.
        for index in at if tensor.numel() else ():
            if _view(self.tensors[index]) == _view(tensor):
                return index
        at.append(len(self.tensors))
        self.tensors.append(tensor)
        return at[-1]


def _view(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (tensor.device, tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())


def _indices(model: str, tensors: Mapping[str, torch.Tensor], places: _Places) -> dict[str, int]:
    model_file(model)
    for name, tensor in tensors.items():
        # Names in a file of safetensors are UTF-8, and it keeps one for itself.
        is_name = type(name) is str and name != "__metadata__" and (name.isascii() or _as_utf8(name) == name)
        if not (is_name and isinstance(tensor, torch.Tensor)):
            raise TypeError(f"`models` must hold tensors by their names, got {name!r} in {model!r}.")
    return {name: places.index(tensor) for name, tensor in tensors.items()}


def _as_utf8(text: str) -> str:
    # Lone surrogates have no form in UTF-8.
    return text.encode(errors="replace").decode()


class Buffers:
    """Memory on the CPU that is kept between snapshots, because fresh memory costs more than the copy."""

    def __init__(self) -> None:
        self._kinds: list[tuple[torch.dtype, torch.Size]] = []
        self._kept: list[torch.Tensor] = []

    @torch.no_grad()
    def copy(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy tensors into the buffers, over what was there.

        Args:
            tensors: The tensors, on any devices. When this returns, they may change.
        """
        kinds = [(tensor.dtype, tensor.shape) for tensor in tensors]
        if kinds != self._kinds:
            # The old buffers go first, so that there is never more than one copy of the state in a set.
            self._kinds, self._kept = [], []
            self._kept = [torch.empty(shape, dtype=dtype) for dtype, shape in kinds]
            self._kinds = kinds
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
        SnapshotError: If there is another snapshot of this update with different bits, or one that cannot be judged.
    """
    temporary = final.parent / f"{TEMPORARY}{final.name}-{secrets.token_hex(4)}"
    try:
        manifest = write_folder(disk, temporary, staged, copies, about)
        found = _found(disk, final, manifest) if os.path.lexists(final) else None
        if found is None:
            _rename(disk, temporary, final, manifest)
        elif manifest.metrics.keys() <= found.metrics.keys():
            remove(disk, temporary)
        else:
            _replace(disk, temporary, final)
    except BaseException:
        with suppress(OSError):
            remove(disk, temporary)
        raise
    disk.sync_folder(final.parent)
    return manifest


def write_folder(
    disk: Disk, folder: Path, staged: Staged, copies: Sequence[torch.Tensor], about: Mapping[str, Any]
) -> Manifest:
    """Write a snapshot into a new folder, and return its manifest when all of it is durable but the folder's name.

    Args:
        disk: The calls of the operating system.
        folder: The folder, which must not exist.
        staged: The snapshot.
        copies: The copies of its tensors.
        about: JSON values about the machine and the program, which are in no digest.

    Raises:
        OSError: If a call fails. What was written remains.
        SnapshotError: If the manifest would be too large to be read.

    Determinism: the tensor files depend on the content alone, not on the placement or on addresses.
    """
    disk.create_folder(folder)
    raw = _seal(staged, copies, lambda file, pieces: write_file(disk, folder / file, pieces))
    process = {"host": socket.gethostname(), "process": os.getpid(), "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    write_file(disk, folder / ABOUT, [json.dumps({**process, **about}).encode()])
    # What the reader would refuse must not become the newest snapshot.
    manifest = read_manifest(raw)
    # Last, so that a manifest vouches only for files that are durable.
    write_file(disk, folder / MANIFEST, [raw])
    disk.sync_folder(folder)
    return manifest


def describe(staged: Staged, copies: Sequence[torch.Tensor]) -> Manifest:
    """Return the manifest that a snapshot has, without writing it.

    Args:
        staged: The snapshot.
        copies: The copies of its tensors.
    """
    return read_manifest(_seal(staged, copies, lambda _, pieces: deque(pieces, maxlen=0)))


def _seal(staged: Staged, copies: Sequence[torch.Tensor], write: Callable[[str, Pieces], object]) -> bytes:
    """Write the tensor files by a function of their names and pieces, and return the bytes of the manifest."""
    aliases, files = _names(staged)
    described: dict[str, Any] = {}
    for file, named in files.items():
        tensors = {name: copies[index] for name, index in named.items()}
        infos = {name: TensorInfo.of(tensor) for name, tensor in tensors.items()}
        described[file] = {name: (*infos[name], list[str]()) for name in file_order(infos)}
        write(file, _pieces(header(infos), tensors, described[file]))
    return seal({**staged.document, "models": aliases, "files": described})


def _pieces(head: bytes, tensors: Mapping[str, torch.Tensor], described: Mapping[str, Any]) -> Pieces:
    """Yield the content of a file, and add the hashes of each tensor to what is described of it."""
    small = bytearray(head)
    for name, (_, _, hashes) in described.items():
        for block in blocks_of(memory_of(swapped(tensors[name]))):
            hashes.append(hashlib.sha256(block).hexdigest())
            if len(small) + len(block) > PIECE:
                yield small
                small = bytearray()
            if len(block) > PIECE:
                yield block
            else:
                small += block
    yield small


def _names(staged: Staged) -> tuple[dict[str, dict[str, str]], dict[str, dict[str, int]]]:
    """Return the tied names of each model, and the tensors of each file; tell the leaves where their tensors are."""
    places: dict[int, list[str]] = {}
    aliases: dict[str, dict[str, str]] = {}
    files: dict[str, dict[str, int]] = {}
    for model, indices in staged.models.items():
        # Each file is complete, also if models share tensors, because it is loaded without the others.
        file, stored = model_file(model), dict[int, str]()
        aliases[model], files[file] = {}, {}
        for name, index in indices.items():
            if index in stored:
                aliases[model][name] = stored[index]
            else:
                stored[index] = name
                files[file][name] = index
                places.setdefault(index, [file, name])
    rest = files[STATE] = {}
    for leaf, index in staged.leaves:
        if index not in places:
            name = path = _as_utf8("/".join(map(str, leaf.path)))
            while name in rest:
                # The paths of {0: x, "0": y} read alike.
                name = f"{path}#{len(rest)}"
            rest[name] = index
            places[index] = [STATE, name]
        leaf.tagged["$tensor"] = places[index]
    return aliases, files


def write_file(disk: Disk, path: Path, pieces: Iterable[bytes | bytearray | memoryview]) -> None:
    """Write a file, and return when its content is durable.

    Args:
        disk: The calls of the operating system.
        path: The file, which must not exist.
        pieces: The content.
    """
    descriptor = disk.create_file(path)
    try:
        for piece in pieces:
            disk.write(descriptor, memoryview(piece))
        # By the descriptor that wrote: another one might not see an error of writing back. After an error the attempt
        # is over, because the system marks the pages as written, and a second call would succeed.
        disk.sync(descriptor)
    finally:
        disk.close(descriptor)


def _rename(disk: Disk, temporary: Path, final: Path, manifest: Manifest) -> None:
    """Rename a written snapshot, unless another rank that survives was faster."""
    try:
        disk.rename(temporary, final)
    except OSError:
        if not (os.path.lexists(final) and _found(disk, final, manifest)):
            raise
        remove(disk, temporary)


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
    remove(disk, aside)


def _found(disk: Disk, final: Path, manifest: Manifest) -> Manifest | None:
    """Return the manifest of the same snapshot in a folder. If what it holds is damaged, rename it."""
    try:
        found = verify(final)
    except SnapshotError as error:
        if not error.damaged:
            raise
        set_aside(disk, [final], DAMAGED)
        return None
    if (found.run_id, found.training) != (manifest.run_id, manifest.training):
        raise SnapshotError(
            f"{final} holds another snapshot of update {manifest.update}: of the run {found.run_id!r} with the digest "
            f"{found.training}, and this one is of {manifest.run_id!r} with {manifest.training}.",
            expected=found.training,
            found=manifest.training,
        )
    return found


def set_aside(disk: Disk, folders: Iterable[Path], prefix: str) -> list[Path]:
    """Rename snapshots durably, and return their new names.

    Args:
        disk: The calls of the operating system.
        folders: The folders, all in one folder.
        prefix: What the new names begin with.

    Raises:
        OSError: If a call fails.
    """
    renamed = []
    for folder in folders:
        renamed.append(folder.with_name(f"{prefix}{folder.name}-{secrets.token_hex(4)}"))
        disk.rename(folder, renamed[-1])
    if renamed:
        disk.sync_folder(renamed[0].parent)
    return renamed


def remove_durably(disk: Disk, folder: Path) -> None:
    """Remove a snapshot so that at no time a part of it has the name of a snapshot.

    Args:
        disk: The calls of the operating system.
        folder: The folder.

    Raises:
        OSError: If a call fails.
        SnapshotError: If it is a link or anything else that is no folder.
    """
    if _is_folder(folder):
        # Files that are removed from a folder with its name might be gone after a power failure, and the name not.
        for renamed in set_aside(disk, [folder], TEMPORARY):
            remove(disk, renamed)


def remove(disk: Disk, folder: Path) -> None:
    """Remove a folder with its files, the manifest first.

    Raises:
        OSError: If a call fails.
        SnapshotError: If it is a link, which may lead to files of others, or anything else that is no folder.
    """
    if _is_folder(folder):
        for path in sorted(folder.iterdir(), key=lambda path: path.name != MANIFEST):
            disk.remove_file(path)
        disk.remove_folder(folder)


def _is_folder(path: Path) -> bool:
    """Return whether there is a folder.

    Raises:
        SnapshotError: If there is a link or anything else that is no folder.
    """
    kind = kind_of(path)
    if kind not in {"", "a folder"}:
        raise SnapshotError(f"{path} must be a folder, got {kind}. It is left as it is; remove it yourself.")
    return bool(kind)
