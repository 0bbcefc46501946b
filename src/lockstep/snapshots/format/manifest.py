"""The manifest of a snapshot: everything but the bytes of the tensors, for which it has digests."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from lockstep.digest import TensorDigest, digest
from lockstep.errors import SnapshotError
from lockstep.snapshots.format.canonical_json import Limits, dumps, loads
from lockstep.snapshots.format.content import Parent, without_sources
from lockstep.snapshots.format.layout import STATE, model_file
from lockstep.snapshots.format.tensor_file import DTYPES, TensorInfo
from lockstep.snapshots.format.tree import decode, is_list

FORMAT: Final = 1
"""The number of the format. Readers refuse a higher one and read every lower one."""

_HEX: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """What the manifest says about a tensor file.

    Attributes:
        bytes: The size of the file.
        header: The SHA-256 of its header, with the length before it.
        tensors: The tensors by name, in the order of their bytes.
    """

    bytes: int
    header: str
    tensors: Mapping[str, TensorDigest]


@dataclass(frozen=True, kw_only=True)
class ModelEntry:
    """What the manifest says about a model.

    Attributes:
        file: The name of its file.
        aliases: For each name that is not in the file, the name of the same tensor in the file.
    """

    file: str
    aliases: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The fields of a manifest. Trees are as `encode` returns them; see `Content` for their meaning.

    Attributes:
        format: The number of the format.
        writer: The name and the version of the library that wrote it.
        run_id: The name of the run.
        parent: The snapshot from which the run was resumed.
        reasons: Why the snapshot was written.
        progress: How far the run is.
        metrics: Numbers that describe the snapshot.
        recipe: The settings that define what the run computes.
        kernel_class: What the bits of the kernels depend on.
        models: The models by name.
        state: The state that the determinism guarantee covers.
        surroundings: The rest of the state.
        files: The tensor files by name.
        training: The digest of progress, models and state, without the own states of data loaders.
        run: The digest of `training` and surroundings.
    """

    format: int = FORMAT
    writer: str
    run_id: str
    parent: Parent | None
    reasons: tuple[str, ...]
    progress: Any
    metrics: Any
    recipe: Any
    kernel_class: Any
    models: Mapping[str, ModelEntry]
    state: Any
    surroundings: Any
    files: Mapping[str, FileEntry]
    training: str
    run: str

    @property
    def update(self) -> int:
        """The number of updates after which the snapshot was written."""
        update: int = self.progress["update"]
        return update

    @property
    def metric_values(self) -> dict[str, float]:
        """The metrics as numbers, also those that are not finite."""
        return dict(decode(self.metrics, _no_tensor))

    @property
    def recipe_values(self) -> dict[str, Any]:
        """The recipe as plain values."""
        return dict(decode(self.recipe, _no_tensor))

    def tensor_digest(self, reference: Any) -> TensorDigest:
        """Return what stands for a tensor of a tree.

        Args:
            reference: The name of the file and that of the tensor.

        Raises:
            SnapshotError: If there is no such tensor.
        """
        if is_list(reference, 2) and all(isinstance(part, str) for part in reference):
            file, name = reference
            if file in self.files and name in self.files[file].tensors:
                return self.files[file].tensors[name]
        raise SnapshotError(f"The manifest names a tensor that no file holds: {reference!r}.")

    def model_tensors(self, name: str) -> dict[str, list[str]]:
        """Return the references of the tensors of a model by their names, tied ones included."""
        model = self.models[name]
        found = {each: [model.file, each] for each in self.files[model.file].tensors}
        return found | {alias: [model.file, each] for alias, each in model.aliases.items()}

    def digests(self) -> tuple[str, str]:
        """Compute the digests `training` and `run` from those of the tensors.

        They are `lockstep.digest` of `covered`, and of a dict with the keys training and surroundings.
        """
        training = digest(self.covered())
        surroundings = decode(self.surroundings, self.tensor_digest)
        return training, digest({"training": training, "surroundings": surroundings})

    def covered(self) -> dict[str, Any]:
        """Return what the digest `training` covers, with digests that stand for tensors.

        It is a dict with the keys progress, models and state; the state is that of `without_sources`.
        """
        read = self.tensor_digest
        models = {name: {each: read(place) for each, place in self.model_tensors(name).items()} for name in self.models}
        state = without_sources(decode(self.state, read), decode(self.recipe, read))
        return {"progress": decode(self.progress, read), "models": models, "state": state}

    def to_bytes(self) -> bytes:
        """Return the bytes of the file, in which the SHA-256 of everything else is the last field."""
        body = {each.name: getattr(self, each.name) for each in fields(self)}
        body["models"] = {name: vars(model) for name, model in self.models.items()}
        body["files"] = {name: vars(file) for name, file in self.files.items()}
        return dumps({**body, "sha256": hashlib.sha256(dumps(body)).hexdigest()})


def read_manifest(raw: bytes, limits: Limits, *, expected: Manifest | None = None) -> Manifest:
    """Read a manifest and check everything in it that can be checked without the tensor files.

    Args:
        raw: The bytes of the file.
        limits: Bounds on what is read.
        expected: A manifest whose digests are right. One that is equal to it has the right digests, too, which takes
            less time to find out than to compute them.

    Raises:
        SnapshotError: If it is not whole, was not written by this library, or has a format that is too new.
    """
    document = loads(raw, limits)
    if not isinstance(document, dict):
        raise SnapshotError("The manifest must be a JSON object.")
    written = document.get("format")
    if isinstance(written, int) and written > FORMAT:
        raise SnapshotError(
            f"The snapshot has format {written}, written by {document.get('writer')!r}, and this version of lockstep "
            f"reads formats up to {FORMAT}. Use a newer version.",
            damaged=False,
        )
    claimed = document.pop("sha256", None)
    found = hashlib.sha256(dumps(document)).hexdigest()
    if found != claimed:
        raise SnapshotError(
            f"The manifest says that its SHA-256 is {claimed!r}, but it is {found}.",
            expected=claimed if isinstance(claimed, str) else None,
            found=found,
        )
    manifest = _manifest(document, limits)
    if manifest == expected:
        return manifest
    try:
        digests = manifest.digests()
    except (TypeError, ValueError) as error:
        raise SnapshotError(f"The state in the manifest has no digest: {error}") from error
    if digests != (manifest.training, manifest.run):
        raise SnapshotError("The digests of the whole state in the manifest do not follow from those of its tensors.")
    return manifest


def _check(condition: object, rule: str) -> None:
    if not condition:
        raise SnapshotError(f"The manifest does not have the form of format {FORMAT}: {rule}.")


def _object(value: Any, part: Callable[[str, Any], Any], of: str) -> dict[str, Any]:
    _check(isinstance(value, dict), f"{of} must be an object")
    return {name: part(name, each) for name, each in value.items()}


def _keys(value: Any, keys: set[str], of: str) -> Any:
    _check(isinstance(value, dict) and set(value) == keys, f"{of} must have the keys {', '.join(sorted(keys))}")
    return value


def _manifest(document: dict[str, Any], limits: Limits) -> Manifest:
    _keys(document, {each.name for each in fields(Manifest)}, "a manifest")
    _check(document["format"] == FORMAT and type(document["format"]) is int, f"`format` must be {FORMAT}")
    for key in ("writer", "run_id"):
        _check(isinstance(document[key], str), f"`{key}` must be text")
    for key in ("training", "run"):
        _check(_is_hash(document[key]), f"`{key}` must be a SHA-256")
    reasons = document["reasons"]
    _check(isinstance(reasons, list) and all(isinstance(each, str) for each in reasons), "`reasons` must be texts")
    _check(isinstance(document["progress"], dict), "`progress` must be an object")
    _check(_is_count(document["progress"].get("update")), "`progress` must have the number of updates")
    files = _object(document["files"], lambda name, each: _file(name, each, limits), "`files`")
    models = _object(document["models"], lambda name, each: _model(name, each, files), "`models`")
    named = {STATE, *(model.file for model in models.values())}
    _check(set(files) == named, "`files` must be those of the models and of the state")
    manifest = Manifest(
        **{
            **document,
            "parent": _parent(document["parent"]),
            "reasons": tuple(reasons),
            "files": files,
            "models": models,
        }
    )
    for key in ("progress", "recipe", "kernel_class", "metrics"):
        _check(isinstance(decode(document[key], _no_tensor), dict), f"`{key}` must be a mapping")
    return manifest


def _no_tensor(reference: Any) -> Any:
    raise SnapshotError(f"The manifest names a tensor outside of the state: {reference!r}.")


def _parent(value: Any) -> Parent | None:
    if value is None:
        return None
    _check(is_list(value, 2), "`parent` must be a run and an update")
    _check(isinstance(value[0], str) and _is_count(value[1]), "`parent` must be a run and an update")
    return Parent(*value)


def _model(name: str, value: Any, files: Mapping[str, FileEntry]) -> ModelEntry:
    _keys(value, {"file", "aliases"}, "a model")
    try:
        file = model_file(name)
    except ValueError as error:
        raise SnapshotError(str(error)) from None
    _check(value["file"] == file and file in files, "the file of a model must be named after it")
    tensors = files[file].tensors
    aliases = _object(value["aliases"], lambda _, each: each, "`aliases`")
    for alias, each in aliases.items():
        _check(isinstance(each, str) and each in tensors and alias not in tensors, "an alias must name a tensor")
    return ModelEntry(file=file, aliases=aliases)


def _file(name: str, value: Any, limits: Limits) -> FileEntry:
    _keys(value, {"bytes", "header", "tensors"}, f"the file {name!r}")
    _check(_is_count(value["bytes"]) and _is_hash(value["header"]), "a file must have a size and the hash of a header")
    tensors = _object(value["tensors"], lambda name, each: _tensor(name, each, limits), "`tensors`")
    _check(len(tensors) <= limits.tensors, f"a file must have at most {limits.tensors} tensors")
    return FileEntry(bytes=value["bytes"], header=value["header"], tensors=tensors)


def _tensor(name: str, value: Any, limits: Limits) -> TensorDigest:
    _check(is_list(value, 3), "a tensor must have a dtype, a shape and a hash")
    dtype, shape, sha256 = value
    _check(isinstance(dtype, str) and dtype in DTYPES, f"the dtype of {name!r} must be one that a file can hold")
    _check(isinstance(shape, list) and all(map(_is_count, shape)), f"the shape of {name!r} must consist of sizes")
    _check(len(shape) <= limits.dimensions, f"a tensor must have at most {limits.dimensions} dimensions")
    # torch multiplies sizes without a check, so the product of those other than 0 must be a number of its own.
    _check(TensorInfo(dtype, tuple(size or 1 for size in shape)).bytes < 1 << 63, f"the shape of {name!r} is too large")
    _check(_is_hash(sha256), f"the hash of {name!r} must be a SHA-256")
    return TensorDigest(dtype, tuple(shape), sha256)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_hash(value: Any) -> bool:
    return isinstance(value, str) and _HEX.fullmatch(value) is not None
