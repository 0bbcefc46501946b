"""Read a snapshot whole, verify it, and show what it holds."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from lockstep.digest import tensor_digest
from lockstep.errors import SnapshotError
from lockstep.snapshots.format import (
    MANIFEST,
    FileEntry,
    Limits,
    Manifest,
    Parent,
    TensorInfo,
    decode,
    header,
    read_manifest,
)
from lockstep.snapshots.reading.files import Folder


class Snapshot:
    """A verified snapshot in memory.

    Trees and tensors are those of the `Content` that was saved. Tensors that were the same memory are the same tensor.

    Attributes:
        path: The folder that it was read from.
        manifest: The manifest.
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
    def progress(self) -> dict[str, Any]:
        """How far the run was."""
        return self._mapping(self.manifest.progress)

    @property
    def epoch(self) -> Any:
        """The epoch in which the snapshot was written; None if the run has none."""
        return self.progress.get("epoch")

    @property
    def applied(self) -> Any:
        """The number of updates that changed the weights; None if the run did not count them."""
        return self.progress.get("applied")

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the snapshot was written."""
        return self.manifest.reasons

    @property
    def run_id(self) -> str:
        """The name of the run."""
        return self.manifest.run_id

    @property
    def parent(self) -> Parent | None:
        """The snapshot from which the run was resumed, or None."""
        return self.manifest.parent

    @property
    def recipe(self) -> dict[str, Any]:
        """The settings that define what the run computes."""
        return self._mapping(self.manifest.recipe)

    @property
    def kernel_class(self) -> dict[str, Any]:
        """What the bits of the kernels depend on."""
        return self._mapping(self.manifest.kernel_class)

    @property
    def metrics(self) -> dict[str, float]:
        """Numbers that describe the snapshot."""
        return self._mapping(self.manifest.metrics)

    @property
    def digest(self) -> str:
        """The digest of progress, models and state without that of data loaders; equal for every placement."""
        return self.manifest.training

    @property
    def run_digest(self) -> str:
        """The digest of `digest` and the surroundings; it does not cover the states of data loaders either."""
        return self.manifest.run

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors that are stored, by the names of their file and of themselves."""
        return {f"{file}/{name}": each for file, tensors in self._files.items() for name, each in tensors.items()}

    def model(self, name: str = "main") -> dict[str, torch.Tensor]:
        """Return the parameters and persistent buffers of a model by their bare names, tied ones included."""
        if name not in self.manifest.models:
            raise SnapshotError(f"The snapshot {self.path} has the models {list(self.manifest.models)}, got {name!r}.")
        return {each: self._tensor(place) for each, place in self.manifest.model_tensors(name).items()}

    def models(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the tensors of all models by the name of the model."""
        return {name: self.model(name) for name in self.manifest.models}

    def state(self) -> Any:
        """Return the tree of the state that the determinism guarantee covers."""
        return self._tree(self.manifest.state)

    def surroundings(self) -> Any:
        """Return the tree of what belongs to the run but not to its result."""
        return self._tree(self.manifest.surroundings)

    def _mapping(self, tagged: Any) -> dict[str, Any]:
        return dict(self._tree(tagged))

    def _tree(self, tagged: Any) -> Any:
        return decode(tagged, self._tensor)

    def _tensor(self, reference: list[str]) -> torch.Tensor:
        file, name = reference
        return self._files[file][name]


def load(path: str | Path, *, limits: Limits | None = None) -> Snapshot:
    """Read a snapshot into memory and verify every byte of it.

    Args:
        path: The folder of the snapshot.
        limits: Bounds on what is read.

    Raises:
        SnapshotError: If the snapshot is not whole. The message names the file, and where digests differ also the
            tensor and both digests.
    """
    bounds = limits or Limits()
    with Folder(Path(path)) as folder:
        manifest = read_manifest(folder.read(MANIFEST, at_most=bounds.manifest_bytes), bounds)
        files = {name: _read_tensors(folder, name, entry, bounds) for name, entry in manifest.files.items()}
    return Snapshot(Path(path), manifest, files)


def verify(path: str | Path, *, limits: Limits | None = None) -> Manifest:
    """Verify every byte of a snapshot, and return its manifest.

    Args:
        path: The folder of the snapshot.
        limits: Bounds on what is read.

    Raises:
        SnapshotError: If the snapshot is not whole.
    """
    return load(path, limits=limits).manifest


def _read_tensors(folder: Folder, name: str, entry: FileEntry, limits: Limits) -> dict[str, torch.Tensor]:
    """Read a tensor file whole, verify those bytes, and return tensors that were made of them."""
    infos = {each: TensorInfo(tensor.dtype, tensor.shape) for each, tensor in entry.tensors.items()}
    try:
        head = header(infos)
    except UnicodeEncodeError as error:
        raise SnapshotError(f"{folder.path / name}: a name is not text.", file=name) from error
    if "__metadata__" in infos:
        raise SnapshotError(
            f"{folder.path / name}: no tensor can have the name '__metadata__', under which the header describes the "
            "file.",
            file=name,
        )
    if len(head) > limits.header_bytes:
        raise SnapshotError(
            f"{folder.path / name}: the header must have at most {limits.header_bytes} bytes, got {len(head)}.",
            file=name,
        )
    if entry.bytes != len(head) + sum(info.bytes for info in infos.values()):
        raise SnapshotError(f"{folder.path / name}: {entry.bytes} bytes are not those of its tensors.", file=name)
    data = folder.read(name, exactly=entry.bytes)
    _compare(folder, name, None, entry.header, hashlib.sha256(data[: len(head)]).hexdigest())
    if data[: len(head)] != head:
        raise SnapshotError(f"{folder.path / name}: the header does not follow from the manifest.", file=name)
    try:
        tensors = safetensors.torch.load(data)
    except safetensors.SafetensorError as error:
        raise SnapshotError(f"{folder.path / name}: {error}", file=name) from error
    for each, expected in entry.tensors.items():
        _compare(folder, name, each, expected.sha256, tensor_digest(tensors[each]))
    return {each: tensors[each] for each in entry.tensors}


def _compare(folder: Folder, name: str, tensor: str | None, expected: str, found: str) -> None:
    if expected != found:
        what = "the header" if tensor is None else f"the tensor {tensor!r}"
        raise SnapshotError(
            f"{folder.path / name}: {what} must have the SHA-256 {expected}, got {found}.",
            file=name,
            tensor=tensor,
            expected=expected,
            found=found,
        )
