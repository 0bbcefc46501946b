"""The manifest of a snapshot: everything but the bytes of the tensors, for which it has digests.

It is one JSON object, of which the last field is the SHA-256 of the bytes that the object has without it. This holds
for every format, so that a newer one can be told from a damaged one.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from lockstep.digest import TensorDigest, digest
from lockstep.errors import SnapshotError
from lockstep.side_files import DAMAGE
from lockstep.snapshots.content import STATE, Content, Parent, model_file, training_of
from lockstep.snapshots.tensor_file import DTYPES, TensorInfo, header
from lockstep.snapshots.tree import decode, is_list

FORMAT: Final = 2
"""The number of the format. Readers refuse a higher one, and read the one before for one release."""

PLAIN: Final = ("progress", "metrics", "recipe", "kernel_class")
"""The fields that hold no tensors."""
_HEX: Final = re.compile(r"[0-9a-f]{64}")
_SEAL: Final = re.compile(rb',"sha256":"([0-9a-f]{64})"\}')
_SEAL_BYTES: Final = 77


MANIFEST_BYTES: Final = 64 << 20
"""The largest size of a manifest. This and the next five are far above what training needs, and are there so that a
damaged or hostile file costs bounded time and memory."""
NODES: Final = 1_000_000
"""The largest number of values in a manifest."""
DEPTH: Final = 64
"""How deep values of a tree may be nested."""
HEADER_BYTES: Final = 16 << 20
"""The largest size of the header of a tensor file."""
TENSORS: Final = 100_000
"""The largest number of tensors in a file."""
DIMENSIONS: Final = 64
"""The largest number of dimensions of a tensor."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Manifest(Content):
    """What a manifest says: the fields of `Content`, with a `TensorDigest` for each tensor, and what follows.

    Attributes:
        raw: The bytes of its file.
        format: The number of the format.
        writer: The name and the version of the library that wrote it.
        reasons: Why the snapshot was written.
        tied: The names of tied tensors in each model, with the name under which the tensor is stored.
        files: The tensors of each file by their names, in the order of their bytes.
    """

    raw: bytes
    format: int
    writer: str
    reasons: tuple[str, ...]
    tied: Mapping[str, Mapping[str, str]]
    files: Mapping[str, Mapping[str, TensorInfo]]

    def __repr__(self) -> str:
        return f"Manifest(update={self.update}, epoch={self.progress.get('epoch')}, reasons={self.reasons})"

    @property
    def update(self) -> int:
        """The number of updates after which the snapshot was written."""
        return int(self.progress["update"])

    @property
    def bytes(self) -> int:
        """The size of the tensors."""
        return sum(tensor.bytes for file in self.files.values() for tensor in file.values())

    @cached_property
    def training(self) -> str:
        """The digest of what the determinism guarantee covers, from those of its tensors."""
        return digest(training_of(self))

    @cached_property
    def run(self) -> str:
        """The digest of `training` and the surroundings."""
        return digest({"training": self.training, "surroundings": self.surroundings})


def seal(document: Mapping[str, Any]) -> bytes:
    """Return the bytes of a manifest, with its seal.

    >>> seal({"format": 2})[:26]
    b'{"format":2,"sha256":"0b0a'
    """
    body = json.dumps(document, separators=(",", ":"), allow_nan=False).encode("ascii")
    return body[:-1] + b',"sha256":"%s"}' % hashlib.sha256(body).hexdigest().encode()


def read_manifest(raw: bytes) -> Manifest:
    """Read a manifest and check everything in it that can be checked without the tensor files.

    Args:
        raw: The bytes of the file.

    Raises:
        SnapshotError: If it is not whole, was not written by this library, or has a format that is too new.
    """
    # Every value but the first follows a comma or opens a container, so this bounds the memory before parsing starts.
    nodes = 1 + raw.count(b",") + raw.count(b"[") + raw.count(b"{")
    if len(raw) > MANIFEST_BYTES or nodes > NODES:
        raise SnapshotError(
            f"The manifest must have at most {MANIFEST_BYTES} bytes and {NODES} values, "
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
        return _manifest(document, raw)
    except DAMAGE as error:
        what = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise SnapshotError(f"The manifest does not have the form of a manifest of this library: {what}.") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    _check(len(found) == len(pairs), "a key occurs twice in an object")
    return found


def _check(condition: object, rule: str) -> None:
    if not condition:
        raise ValueError(rule)


def _manifest(document: dict[str, Any], raw: bytes) -> Manifest:
    is_old = document["format"] == 1
    _check(type(document["format"]) is int and document["format"] in {1, FORMAT}, f"`format` must be {FORMAT}")
    files = {file: dict(_tensors(file, each, is_old=is_old)) for file, each in document["files"].items()}
    tied = {name: each["aliases"] if is_old else each for name, each in document["models"].items()}
    _check(set(files) == {STATE, *map(model_file, tied)}, "`files` must be those of the models and of the state")

    def tensor(place: Any) -> TensorDigest:
        _check(is_list(place, 2), f"{place!r} must be the name of a file and that of a tensor")
        return files[place[0]][place[1]].digest

    trees = {name: decode(document[name], _no_tensor, DEPTH) for name in PLAIN}
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
        **{name: decode(document[name], tensor, DEPTH) for name in ("state", "surroundings")},
        models={name: _model(files[model_file(name)], names) for name, names in tied.items()},
        tied=tied,
        files=files,
    )


def _no_tensor(_: Any) -> Any:
    raise ValueError("there is a tensor outside of the state")


def _model(stored: Mapping[str, TensorInfo], tied: Mapping[str, str]) -> dict[str, TensorDigest]:
    _check(not tied.keys() & stored.keys(), "an alias must not be the name of a tensor")
    return {name: stored[each].digest for name, each in [*zip(stored, stored, strict=True), *tied.items()]}


def _tensors(file: str, entry: Any, *, is_old: bool) -> Iterator[tuple[str, TensorInfo]]:
    """Yield the tensors of a file, of which no size is larger than the numbers that torch computes with."""
    named = entry["tensors"] if is_old else entry
    _check(len(named) <= TENSORS, f"a file must have at most {TENSORS} tensors")
    _check(
        "__metadata__" not in named,
        "no tensor can have the name '__metadata__', under which the header describes the file",
    )
    infos = {}
    for name, (dtype, shape, hashes) in named.items():
        _check(dtype in DTYPES, f"{dtype!r} of {name!r} must be a dtype that a file can hold")
        _check(all(map(_is_count, shape)), f"the shape of {name!r} must consist of sizes")
        _check(len(shape) <= DIMENSIONS, f"{name!r} must have at most {DIMENSIONS} dimensions")
        # torch multiplies sizes without a check, so the product of those other than 0 must be a number of its own.
        size = TensorInfo(dtype, tuple(size or 1 for size in shape)).bytes
        _check(size < 1 << 63, f"the shape of {name!r} is too large")
        infos[name] = TensorInfo(dtype, tuple(shape), (hashes,) if is_old else tuple(hashes))
        found, count = infos[name].hashes, 1 if is_old else infos[name].blocks
        _check(all(_is_text(each) and _HEX.fullmatch(each) for each in found), f"{name!r} must have SHA-256s")
        _check(len(found) == count, f"{name!r} must have a SHA-256 for each block")
        yield name, infos[name]
    _check(len(header(infos)) <= HEADER_BYTES, f"the header of {file!r} is longer than {HEADER_BYTES} bytes")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_text(value: Any) -> bool:
    return isinstance(value, str)
