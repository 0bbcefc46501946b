"""The manifest of a snapshot: everything but the bytes of the tensors, for which it has digests.

It is one JSON object, of which the last field is the SHA-256 of the bytes that the object has without it. This holds
for every format, so that a newer one can be told from a damaged one.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import torch

from lockstep.digest import TensorDigest, digest, join_blocks
from lockstep.errors import SnapshotError
from lockstep.snapshots.content import STATE, Parent, model_file, without_sources
from lockstep.snapshots.tensor_file import DTYPES, TensorInfo, header
from lockstep.snapshots.tree import decode, is_list

FORMAT: Final = 2
"""The number of the format. Readers refuse a higher one, and read the one before for one release."""

PLAIN: Final = ("progress", "metrics", "recipe", "kernel_class")
"""The fields that hold no tensors."""
_HEX: Final = re.compile(r"[0-9a-f]{64}")
_SEAL: Final = re.compile(rb',"sha256":"([0-9a-f]{64})"\}')
_SEAL_BYTES: Final = 77


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds on what is read, so that a damaged or hostile file costs bounded time and memory.

    Attributes:
        manifest_bytes: The size of a manifest.
        depth: The depth of nested values in a tree.
        nodes: The number of values in a manifest.
        header_bytes: The size of the header of a tensor file.
        tensors: The number of tensors in a file.
        dimensions: The number of dimensions of a tensor.
    """

    manifest_bytes: int = 64 << 20
    depth: int = 64
    nodes: int = 1_000_000
    header_bytes: int = 16 << 20
    tensors: int = 100_000
    dimensions: int = 64


LIMITS: Final = Limits()
"""Far above what training needs."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """What a manifest says about a tensor, which stands for it in trees.

    Attributes:
        file: The name of its file.
        name: Its name in the file.
        info: Its dtype and shape.
        hashes: The SHA-256 of each of its blocks. Format 1 has a single one for all of them.
    """

    file: str
    name: str
    info: TensorInfo
    hashes: tuple[str, ...]

    @property
    def digest(self) -> TensorDigest:
        """What stands for the tensor in a digest."""
        return TensorDigest(*self.info, join_blocks(self.hashes))

    def empty(self) -> torch.Tensor:
        """Return memory for the tensor."""
        return torch.empty(self.info.shape, dtype=getattr(torch, self.info.dtype))


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The fields of a manifest, with a `StoredTensor` for each tensor; see `Content` for their meaning.

    Attributes:
        raw: The bytes of its file.
        format: The number of the format.
        writer: The name and the version of the library that wrote it.
        run_id: The name of the run.
        parent: The snapshot from which the run was resumed.
        reasons: Why the snapshot was written.
        progress: How far the run is.
        metrics: Numbers that describe the snapshot.
        recipe: The settings that define what the run computes.
        kernel_class: What the bits of the kernels depend on.
        models: The tensors of each model by their names, tied ones included.
        state: The state that the determinism guarantee covers.
        surroundings: The rest of the state.
        files: The tensors of each file by their names, in the order of their bytes.
    """

    raw: bytes
    format: int
    writer: str
    run_id: str
    parent: Parent | None
    reasons: tuple[str, ...]
    progress: Mapping[str, Any]
    metrics: Mapping[str, float]
    recipe: Mapping[str, Any]
    kernel_class: Mapping[str, Any]
    models: Mapping[str, Mapping[str, StoredTensor]]
    state: Any
    surroundings: Any
    files: Mapping[str, Mapping[str, StoredTensor]]

    @property
    def update(self) -> int:
        """The number of updates after which the snapshot was written."""
        update: int = self.progress["update"]
        return update

    @property
    def bytes(self) -> int:
        """The size of the tensors."""
        return sum(tensor.info.bytes for file in self.files.values() for tensor in file.values())

    @cached_property
    def training(self) -> str:
        """The digest of what the determinism guarantee covers, from those of its tensors."""
        return digest(self.covered())

    @cached_property
    def run(self) -> str:
        """The digest of `training` and the surroundings."""
        return digest({"training": self.training, "surroundings": with_tensors(self.surroundings, _digest)})

    def covered(self) -> dict[str, Any]:
        """Return what the digest `training` covers, with digests that stand for tensors.

        It is a dict with the keys progress, models and state; the state is that of `without_sources`.
        """
        state = without_sources(self.state, self.recipe)
        return with_tensors({"progress": self.progress, "models": self.models, "state": state}, _digest)  # type: ignore[no-any-return]


def with_tensors(tree: Any, tensor: Callable[[StoredTensor], Any]) -> Any:
    """Return a tree with something else for each `StoredTensor`.

    Args:
        tree: The tree.
        tensor: Returns what stands for a tensor.
    """
    if isinstance(tree, StoredTensor):
        return tensor(tree)
    if isinstance(tree, dict):
        found = {key: with_tensors(part, tensor) for key, part in tree.items()}
        return type(tree)(found)
    if isinstance(tree, list | tuple):
        return type(tree)([with_tensors(part, tensor) for part in tree])
    return tree


def _digest(tensor: StoredTensor) -> TensorDigest:
    return tensor.digest


def seal(document: Mapping[str, Any]) -> bytes:
    """Return the bytes of a manifest, with its seal.

    >>> seal({"format": 2})[:26]
    b'{"format":2,"sha256":"0b0a'
    """
    body = json.dumps(document, separators=(",", ":"), allow_nan=False).encode("ascii")
    return body[:-1] + b',"sha256":"%s"}' % hashlib.sha256(body).hexdigest().encode()


def read_manifest(raw: bytes, limits: Limits = LIMITS) -> Manifest:
    """Read a manifest and check everything in it that can be checked without the tensor files.

    Args:
        raw: The bytes of the file.
        limits: Bounds on what is read.

    Raises:
        SnapshotError: If it is not whole, was not written by this library, or has a format that is too new.
    """
    # Every value but the first follows a comma or opens a container, so this bounds the memory before parsing starts.
    nodes = 1 + raw.count(b",") + raw.count(b"[") + raw.count(b"{")
    if len(raw) > limits.manifest_bytes or nodes > limits.nodes:
        raise SnapshotError(
            f"The manifest must have at most {limits.manifest_bytes} bytes and {limits.nodes} values, "
            f"got {len(raw)} bytes and up to {nodes} values."
        )
    sealed = _SEAL.fullmatch(raw[-_SEAL_BYTES:])
    claimed = sealed[1].decode() if sealed else None
    found = hashlib.sha256(raw[:-_SEAL_BYTES] + b"}").hexdigest()
    if claimed != found:
        raise SnapshotError(
            f"The manifest says that its SHA-256 is {claimed!r}, but it is {found}.", expected=claimed, found=found
        )
    try:
        document = json.loads(raw, object_pairs_hook=_object)
        written = document["format"]
        if type(written) is int and written > FORMAT:
            raise SnapshotError(
                f"The snapshot has format {written}, written by {document.get('writer')!r}, and this version of "
                f"lockstep reads formats up to {FORMAT}. Use a newer version.",
                damaged=False,
            )
        return _manifest(document, raw, limits)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        what = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise SnapshotError(f"The manifest does not have the form of a manifest of this library: {what}.") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    _check(len(found) == len(pairs), "a key occurs twice in an object")
    return found


def _check(condition: object, rule: str) -> None:
    if not condition:
        raise ValueError(rule)


def _manifest(document: dict[str, Any], raw: bytes, limits: Limits) -> Manifest:
    is_old = document["format"] == 1
    _check(type(document["format"]) is int and document["format"] in {1, FORMAT}, f"`format` must be {FORMAT}")
    described = {file: dict(_tensors(file, each, limits, is_old=is_old)) for file, each in document["files"].items()}
    models = {
        name: _model(name, each["aliases"] if is_old else each, described) for name, each in document["models"].items()
    }
    _check(set(described) == {STATE, *map(model_file, models)}, "`files` must be those of the models and of the state")

    def tensor(reference: Any) -> StoredTensor:
        _check(is_list(reference, 2), f"{reference!r} must be the name of a file and that of a tensor")
        return described[reference[0]][reference[1]]

    trees = {name: decode(document[name], _no_tensor, limits.depth) for name in PLAIN}
    for name, tree in trees.items():
        _check(type(tree) is dict and all(map(_is_text, tree)), f"`{name}` must have names as keys")
    _check(_is_count(trees["progress"]["update"]), "`progress` must have the number of updates")
    _check(all(type(each) in {int, float} for each in trees["metrics"].values()), "`metrics` must be numbers")
    parent, reasons = document["parent"], document["reasons"]
    _check(parent is None or (is_list(parent, 2) and _is_text(parent[0]) and _is_count(parent[1])), "`parent` is wrong")
    _check(_is_text(document["writer"]) and _is_text(document["run_id"]), "`writer` and `run_id` must be text")
    _check(isinstance(reasons, list) and all(map(_is_text, reasons)), "`reasons` must be texts")
    return Manifest(
        raw=raw,
        **{name: document[name] for name in ("format", "writer", "run_id")},
        parent=None if parent is None else Parent(*parent),
        reasons=tuple(reasons),
        **trees,
        **{name: decode(document[name], tensor, limits.depth) for name in ("state", "surroundings")},
        models=models,
        files=described,
    )


def _no_tensor(_: Any) -> Any:
    raise ValueError("there is a tensor outside of the state")


def _model(name: str, aliases: Any, files: Mapping[str, Mapping[str, StoredTensor]]) -> dict[str, StoredTensor]:
    stored = files[model_file(name)]
    _check(not aliases.keys() & stored.keys(), "an alias must not be the name of a tensor")
    return {**stored, **{alias: stored[each] for alias, each in aliases.items()}}


def _tensors(file: str, entry: Any, limits: Limits, *, is_old: bool) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the tensors of a file, of which no size is larger than the numbers that torch computes with."""
    named = entry["tensors"] if is_old else entry
    _check(len(named) <= limits.tensors, f"a file must have at most {limits.tensors} tensors")
    _check(
        "__metadata__" not in named,
        "no tensor can have the name '__metadata__', under which the header describes the file",
    )
    infos = {}
    for name, (dtype, shape, hashes) in named.items():
        _check(dtype in DTYPES, f"{dtype!r} of {name!r} must be a dtype that a file can hold")
        _check(all(map(_is_count, shape)), f"the shape of {name!r} must consist of sizes")
        _check(len(shape) <= limits.dimensions, f"{name!r} must have at most {limits.dimensions} dimensions")
        # torch multiplies sizes without a check, so the product of those other than 0 must be a number of its own.
        _check(
            TensorInfo(dtype, tuple(size or 1 for size in shape)).bytes < 1 << 63, f"the shape of {name!r} is too large"
        )
        infos[name] = TensorInfo(dtype, tuple(shape))
        found = (hashes,) if is_old else tuple(hashes)
        _check(all(_is_text(each) and _HEX.fullmatch(each) for each in found), f"{name!r} must have SHA-256s")
        _check(len(found) == (1 if is_old else infos[name].blocks), f"{name!r} must have a SHA-256 for each block")
        yield name, StoredTensor(file, name, infos[name], found)
    _check(
        len(header(infos)) <= limits.header_bytes, f"the header of {file!r} is longer than {limits.header_bytes} bytes"
    )


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_text(value: Any) -> bool:
    return isinstance(value, str)
