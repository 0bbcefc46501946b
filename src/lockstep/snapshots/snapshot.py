"""Find the snapshots of a run, read them whole, verify them, and show what they hold."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from lockstep.digest import BLOCK, blocks_of
from lockstep.errors import SnapshotError, SnapshotWarning, printable, warn
from lockstep.program import PROGRAM
from lockstep.side_files import DAMAGE, kind_of
from lockstep.snapshots.content import ABOUT, DAMAGED, MANIFEST, UNVERIFIED, VERIFIED, model_file, update_of
from lockstep.snapshots.disk import Disk, opened, read_file, set_aside, snapshots_in
from lockstep.snapshots.manifest import DEPTH, MANIFEST_BYTES, Manifest, read_manifest
from lockstep.snapshots.tensor_file import TensorInfo, file_order, header, memory_of, swapped
from lockstep.snapshots.tree import decode

_MARK_BYTES: Final = 1000


class Snapshot:
    """A verified snapshot in memory.

    Trees and tensors are those of the `Content` that was saved. Tensors that were the same memory are the same tensor.

    Attributes:
        path: The folder that it was read from.
        manifest: Everything but the tensors: progress, metrics, the name of the run, and more.
    """

    def __init__(self, path: Path, manifest: Manifest, files: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        self.path = path
        self.manifest = manifest
        self._files = files

    def __repr__(self) -> str:
        return f"Snapshot({str(self.path)!r}, update={self.update}, digest={self.digest[:12]!r})"

    @property
    def update(self) -> int:
        """The number of updates after which the snapshot was written."""
        return self.manifest.update

    @property
    def epoch(self) -> Any:
        """The epoch in which the snapshot was written; None if the run has none."""
        return self.manifest.progress.get("epoch")

    @property
    def recipe(self) -> dict[str, Any]:
        """The settings that define what the run computes."""
        return dict(self.manifest.recipe)

    @property
    def digest(self) -> str:
        """The digest of progress, models and state without that of data loaders; equal for every placement."""
        return self.manifest.training

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors that are stored, by the names of their file and of themselves."""
        return {f"{file}/{name}": each for file, tensors in self._files.items() for name, each in tensors.items()}

    def model(self, name: str = "main") -> dict[str, torch.Tensor]:
        """Return the parameters and persistent buffers of a model by their bare names, tied ones included."""
        if name not in self.manifest.models:
            raise SnapshotError(f"The snapshot {self.path} has the models {list(self.manifest.models)}, got {name!r}.")
        stored = self._files[model_file(name)]
        return {**stored, **{tied: stored[each] for tied, each in self.manifest.tied[name].items()}}

    def models(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the tensors of all models by the name of the model."""
        return {name: self.model(name) for name in self.manifest.models}

    def state(self) -> Any:
        """Return the tree of the state that the determinism guarantee covers."""
        return self._tree("state")

    def surroundings(self) -> Any:
        """Return the tree of what belongs to the run but not to its result."""
        return self._tree("surroundings")

    def check(self) -> None:
        """Check that the tensors are those of the manifest.

        Raises:
            SnapshotError: If a tensor has other bytes. The message names the tensor and both digests.
        """
        for file, named in self.manifest.files.items():
            for name, stored in named.items():
                # Format 1 has one hash for any size.
                size = BLOCK if len(stored.hashes) > 1 else max(BLOCK, stored.bytes)
                for block, expected in zip(blocks_of(self._files[file][name], size), stored.hashes, strict=True):
                    _compare(self.path, file, name, expected, hashlib.sha256(block).hexdigest())

    @cached_property
    def _document(self) -> dict[str, Any]:
        return dict(json.loads(self.manifest.raw))

    def _tree(self, name: str) -> Any:
        return decode(self._document[name], lambda place: self._files[place[0]][place[1]], DEPTH)


class Found(NamedTuple):
    """A folder with the name of a snapshot.

    Attributes:
        path: The folder.
        update: The update in its name.
        manifest: Its manifest, whose files have not been verified; None if the manifest cannot be read.
        error: Why it cannot be read; None if it can.
        ranks: The number of ranks that had the same bits; 0 if they have not compared them.
    """

    path: Path
    update: int
    manifest: Manifest | None
    error: SnapshotError | None
    ranks: int = 0


def load(path: str | Path) -> Snapshot:
    """Read a snapshot into memory and verify every byte of it.

    Args:
        path: The folder of the snapshot, which must not be a link.

    Raises:
        SnapshotError: If the snapshot is not whole. The message names the file, and where digests differ also the
            tensor and both digests.
    """
    folder = Path(path)
    manifest = _manifest(folder)
    files = {name: _read_tensors(folder, name, entries) for name, entries in manifest.files.items()}
    snapshot = Snapshot(folder, manifest, files)
    snapshot.check()
    return snapshot


def read_program(path: Path) -> dict[str, Any]:
    """Return the description of the program that wrote a snapshot; empty if the snapshot has none.

    Args:
        path: The folder of the snapshot.
    """
    if not kind_of(path / ABOUT):
        return {}
    try:
        return dict(json.loads(read_file(path, ABOUT, MANIFEST_BYTES)).get(PROGRAM, {}))
    except (SnapshotError, *DAMAGE) as error:
        # The snapshot is whole without this file.
        message = f"{path / ABOUT} does not say which program wrote the snapshot: {printable(str(error))}"
        warn(message, SnapshotWarning)
        return {}


def verify(path: str | Path) -> Manifest:
    """Verify every byte of a snapshot, and return its manifest.

    Args:
        path: The folder of the snapshot, which must not be a link.

    Raises:
        SnapshotError: If the snapshot is not whole.
    """
    return load(path).manifest


def list_snapshots(out: str | Path) -> list[Found]:
    """List the snapshots of a run by their manifests, in ascending order of updates.

    Args:
        out: The folder of the run.

    Raises:
        SnapshotError: If the folder of the snapshots is a link.
    """
    found = []
    for update, path in _folders(Path(out)):
        try:
            manifest = _manifest(path)
            _check_name(manifest, update)
            found.append(Found(path, update, manifest, None, _ranks(path, manifest)))
        except SnapshotError as error:
            found.append(Found(path, update, None, error))
    return found


def best(out: str | Path) -> Found:
    """Return the best snapshot of a run, by the value that `lockstep.extensions.Snapshot` has as `best`.

    Args:
        out: The folder of the run.

    Raises:
        SnapshotError: If no snapshot is marked as the best one.
    """
    # A snapshot is marked if it is better than all before it, so that the last mark counts.
    for found in reversed(list_snapshots(out)):
        if found.manifest is not None and any(each.startswith("best: ") for each in found.manifest.reasons):
            return found
    raise SnapshotError(
        f"`out` must be a run that has a best snapshot, got {out}. Pass best= to the extension Snapshot."
    )


def newest_whole(out: str | Path) -> Snapshot | None:
    """Load the newest snapshot of a run that is whole. Damaged ones are renamed to ``damaged-…``, with a warning.

    Args:
        out: The folder of the run.

    Returns:
        The snapshot, or None if the run has none.

    Raises:
        SnapshotError: If the run has snapshots, but none of them is whole, or if one cannot be read for a reason that
            is not in the snapshot, such as a missing permission or a format that is too new.
    """
    problems: list[str] = []
    for update, path in reversed(_folders(Path(out))):
        try:
            snapshot = load(path)
            _check_name(snapshot.manifest, update)
        except SnapshotError as error:
            if not error.damaged:
                raise
            # A link that leads nowhere is damaged; it would be listed again and again.
            if not os.path.lexists(path):
                # The run that writes here has removed it, and has written newer ones meanwhile.
                return newest_whole(out)
            problems.append(str(error))
            message = f"The snapshot {path.name} is damaged{_set_aside(path)}; the one before it is used. {error}"
            warn(message, SnapshotWarning)
        else:
            return snapshot
    if problems:
        raise SnapshotError(f"No snapshot in {Path(out)} is whole: {' '.join(problems)}")
    folder = snapshots_in(Path(out))
    names = sorted(path.name for path in folder.iterdir()) if folder else []
    aside = [name for name in names if name.startswith((DAMAGED, UNVERIFIED))]
    if aside:
        # They were renamed by an earlier attempt, which must not make the next one start anew.
        raise SnapshotError(f"No snapshot in {folder} is whole: {', '.join(aside)}. Remove them to start anew.")
    return None


def load_from(source: str | Path) -> Snapshot | None:
    """Load a snapshot, or the newest whole one of a run.

    Args:
        source: The folder of the snapshot or of the run.

    Returns:
        The snapshot, or None if the folder is neither.

    Raises:
        SnapshotError: As `load` and `newest_whole`.
    """
    folder = Path(source)
    is_snapshot = snapshots_in(folder) is None and (folder.is_symlink() or (folder / MANIFEST).exists())
    return load(folder) if is_snapshot else newest_whole(folder)


def _set_aside(path: Path) -> str:
    """Rename a damaged snapshot, so that it is not taken for a whole one, and return what happened for the message."""
    try:
        [renamed] = set_aside(Disk(), [path], DAMAGED)
    except OSError as error:
        return f" and could not be renamed ({error.strerror})"
    return f" and is now named {renamed.name}"


def _folders(out: Path) -> list[tuple[int, Path]]:
    """List the folders with names of snapshots in ascending order of updates."""
    folder = snapshots_in(out)
    updates = [] if folder is None else [(update_of(path.name), path) for path in folder.iterdir()]
    return sorted((update, path) for update, path in updates if update is not None)


def _manifest(path: Path) -> Manifest:
    return read_manifest(read_file(path, MANIFEST, MANIFEST_BYTES))


def _check_name(manifest: Manifest, update: int) -> None:
    if manifest.update != update:
        raise SnapshotError(f"The folder of update {update} holds the snapshot of update {manifest.update}.")


def _ranks(path: Path, manifest: Manifest) -> int:
    """Return how many ranks have compared a snapshot and agreed. A mark that cannot be read marks nothing."""
    try:
        mark = json.loads(read_file(path, VERIFIED, _MARK_BYTES))
        return mark["ranks"] if mark["digest"] == manifest.training and type(mark["ranks"]) is int else 0
    except (SnapshotError, *DAMAGE):
        return 0


def _read_tensors(folder: Path, name: str, entries: Mapping[str, TensorInfo]) -> dict[str, torch.Tensor]:
    """Read a tensor file into tensors, whose bytes are still to be verified."""
    head = header(entries)
    size = len(head) + sum(info.bytes for info in entries.values())
    with opened(folder, name) as file:
        # Before anything is allocated by the word of the manifest.
        got = os.fstat(file.fileno()).st_size
        if got != size:
            raise SnapshotError(f"{folder / name} must have {size} bytes, got {got}.", file=name)
        found = file.read(len(head))
        _compare(folder, name, None, hashlib.sha256(head).hexdigest(), hashlib.sha256(found).hexdigest())
        # A file that is cut meanwhile leaves other bytes than those that the manifest has hashes of.
        tensors = {each: stored.empty() for each, stored in entries.items()}
        for each in file_order(entries):
            file.readinto(memory_of(tensors[each]))
    return {each: swapped(tensor) for each, tensor in tensors.items()}


def _compare(path: Path, name: str, tensor: str | None, expected: str, found: str) -> None:
    if expected != found:
        what = "the header" if tensor is None else f"the tensor {tensor!r}"
        raise SnapshotError(
            f"{path / name}: {what} must have the SHA-256 {expected}, got {found}.",
            file=name,
            tensor=tensor,
            expected=expected,
            found=found,
        )
