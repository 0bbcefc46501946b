"""What is read may be anything: the only outcome is a snapshot or our own error, in bounded time and memory."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import resource
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import SnapshotError
from lockstep.snapshots import load, manifest
from lockstep.snapshots.manifest import read_manifest
from tests.support.audit import Audit
from tests.support.snapshots import small_content, write

NAMES = [
    "\x1b[2J\x1b]0;title\x07",
    "\u202e\n",
    "",
    "..",
    "../x",
    "/etc/passwd",
    "a" * 300,
    "\x00",
    "\ud800",
    "__metadata__",
    "model.safetensors",
    "state",
]
VALUES: list[Callable[[random.Random], Any]] = [
    lambda draw: draw.choice(NAMES),
    lambda draw: draw.choice([0, -1, 1, 2, 2**31, 2**62, 2**63, 2**64, 10**300, 0.5, 1e308, -0.0]),
    lambda draw: draw.choice([None, True, False, [], {}, [[]], {"": {}}]),
    lambda draw: [draw.choice([0, 1, 2**32, 2**62])] * draw.choice([1, 3, 65, 1000]),
    lambda draw: {draw.choice(["$tensor", "$tuple", "$float", "$items", "$counter", "$"]): draw.choice([[], "nan", 1])},
    lambda draw: {"$tensor": ["state.safetensors", draw.choice(NAMES)]},
    lambda draw: {"$items": [[draw.choice([1, 1.0, True, []]), 0], [1, 0]]},
    lambda draw: _nested(draw.choice([10, 63, 64, 65, 200])),
    lambda draw: draw.choice(["F32", "float32", "float64", "int8", "bool", "complex64", "complex128", "qint8"]),
    lambda draw: hashlib.sha256(draw.randbytes(2)).hexdigest(),
]


def _nested(depth: int) -> Any:
    found: Any = None
    for _ in range(depth):
        found = [found]
    return found


def _places(value: Any) -> list[tuple[Any, Any]]:
    """List every container of a tree with each of its keys."""
    found: list[tuple[Any, Any]] = []
    todo = [value]
    while todo:
        node = todo.pop()
        keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else []
        found += [(node, key) for key in keys]
        todo += [node[key] for key in keys]
    return found


def mutate(document: Any, draw: random.Random) -> Any:
    """Change a tree of JSON in one to three places: values, keys, repetitions, and swaps of parts."""
    document = copy.deepcopy(document)
    for _ in range(draw.randint(1, 3)):
        places = _places(document)
        if not places:
            break
        (node, key), (other, from_) = draw.choice(places), draw.choice(places)
        match draw.randrange(6):
            case 0:
                node[key] = draw.choice(VALUES)(draw)
            case 1:
                del node[key]
            case 2:
                node[key] = copy.deepcopy(other[from_])
            case 3 if isinstance(node, dict):
                node[draw.choice([*NAMES, *map(str, node)])] = node.pop(key)
            case 4 if isinstance(node, list):
                node.append(copy.deepcopy(node[key]))
            case 5 if isinstance(node[key], int | float):
                node[key] = draw.choice([node[key] + 1, -node[key], node[key] * 2, str(node[key])])
    return document


def sealed(document: Any) -> bytes:
    """Return a manifest with the digest of what is in it, so that its content is what is tested."""
    if not isinstance(document, dict):
        return _text(document)
    document.pop("sha256", None)
    return _text({**document, "sha256": hashlib.sha256(_text(document)).hexdigest()})


def _text(document: Any) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()


def mutate_header(data: bytes, draw: random.Random) -> bytes:
    """Change the header of a tensor file: its length, its JSON, or its bytes."""
    size = int.from_bytes(data[:8], "little")
    match draw.randrange(4):
        case 0:
            length = draw.choice([0, 1, size - 1, size + 8, 2**31, 2**63, 2**64 - 1])
            return length.to_bytes(8, "little") + data[8:]
        case 1:
            place = draw.randrange(8, 8 + size)
            return data[:place] + draw.randbytes(1) + data[place + 1 :]
        case _:
            head = _text(mutate(json.loads(data[8 : 8 + size]), draw))
            head += b" " * (-len(head) % 8)
            return len(head).to_bytes(8, "little") + head + data[8 + size :]


def adopt_file(document: Any, name: str, data: bytes) -> None:
    """Have a manifest name the tensors that the header of a file names, as if it had been written like this."""
    header = json.loads(data[8 : 8 + min(int.from_bytes(data[:8], "little"), len(data))])
    entries = document["files"][name]
    document["files"][name] = {
        each: [
            *list(entries.values())[index % len(entries)][:1],
            about["shape"],
            [hashlib.sha256(data[-1:]).hexdigest()],
        ]
        for index, (each, about) in enumerate(header.items())
    }


def changed_files(originals: dict[str, bytes], draw: random.Random) -> dict[str, bytes]:
    """Change manifest and headers so that the digests in the manifest are right again, as far as that is possible."""
    document = json.loads(originals["snapshot.json"])
    changed: dict[str, bytes] = {}
    kind = draw.choice(["swapped", "a part", "header", "manifest", "both"])
    if kind == "swapped":
        first, second = "model.safetensors", "state.safetensors"
        changed = {first: originals[second], second: originals[first]}
    elif kind == "a part":
        part = draw.choice(["state", "surroundings", "progress", "metrics", "models", "files"])
        document[part] = mutate(document[part], draw)
    if kind in {"manifest", "both"}:
        document = mutate(document, draw)
    if kind in {"header", "both"}:
        name = draw.choice(["model.safetensors", "state.safetensors"])
        changed[name] = mutate_header(originals[name], draw)
        with suppress(KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError):
            adopt_file(document, name, changed[name])
    return changed | {"snapshot.json": sealed(document)}


def one_mutant(folder: Path, originals: dict[str, bytes], draw: random.Random) -> bool:
    """Return whether a mutant was refused."""
    changed = changed_files(originals, draw)
    for name, data in changed.items():
        (folder / name).write_bytes(data)
    try:
        load(folder)
    except SnapshotError as error:
        assert str(error).isprintable()  # noqa: PT017 - it may as well be accepted
        return True
    finally:
        for name in changed:
            (folder / name).write_bytes(originals[name])
    return False


def run_mutants(folder: Path, seed: int, count: int) -> None:
    """Read mutants, and check what the process has done meanwhile."""
    originals = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in {".safetensors", ".json"}}
    draw = random.Random(seed)  # noqa: S311
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    slowest, refused = 0.0, 0
    with Audit() as audit:
        for _ in range(count):
            # Of the processor, because other programs may stop this one for any time.
            start = time.process_time()
            refused += one_mutant(folder, originals, draw)
            slowest = max(slowest, time.process_time() - start)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024
    print(f"{refused} of {count} mutants refused, the slowest took {slowest:.2f} s, memory grew by {grown} MiB")  # noqa: T201 - for the table
    # Most mutants change something that the digests cover.
    assert refused > count // 2
    assert audit.written_outside(folder) == []
    assert audit.unpickled == []
    assert grown <= 64 + 2 * sum(map(len, originals.values())) // 2**20


def test_a_tensor_under_the_name_of_the_description_of_a_file_is_refused(memory_path: Path) -> None:
    [folder] = write(memory_path, small_content())
    document = json.loads((folder / "snapshot.json").read_bytes())
    tensors = document["files"]["model.safetensors"]
    tensors["__metadata__"] = tensors.pop(next(iter(tensors)))
    (folder / "snapshot.json").write_bytes(sealed(document))
    with pytest.raises(SnapshotError, match="no tensor can have the name '__metadata__', under which the header"):
        load(folder)


def test_some_mutants_raise_only_our_error(memory_path: Path) -> None:
    [folder] = write(memory_path, small_content())
    run_mutants(folder, 0, 1000)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 21))
def test_100_000_mutants_raise_only_our_error(memory_path: Path, seed: int) -> None:
    [folder] = write(memory_path, small_content())
    run_mutants(folder, seed, 5000)


@pytest.mark.parametrize("name", ["model.safetensors", "state.safetensors", "snapshot.json"])
def test_only_regular_files_are_read(tmp_path: Path, name: str) -> None:
    [folder] = write(tmp_path, small_content())
    target = tmp_path / "moved"
    (folder / name).rename(target)
    (folder / name).symlink_to(target)
    with pytest.raises(SnapshotError, match="cannot be read"):
        load(folder)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(SnapshotError, match="regular file"):
        load(folder)
    (folder / name).unlink()
    (folder / name).mkdir()
    with pytest.raises(SnapshotError, match="regular file"):
        load(folder)


@pytest.mark.parametrize(
    "raw",
    [
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b'{"format":2,"state":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"format":2,"state":' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"a":1,"a":1}',
        b'{"format":2,"format":2}',
        b'{"format":2,"metrics":{"a":NaN}}',
        b'{"format":2,"metrics":{"a":1e999}}',
        b'{"format":2,"metrics":{"a":' + b"1" * 5000 + b"}}",
        b'{"format":' + b"9" * 5000 + b"}",
        b'{"format":2.0}',
        b'{"format":true}',
        b"{}",
        b"}",
        b"[}",
        b"\xff}",
        b"",
        b"[" + b"[]," * 1_200_000 + b"[]]",
    ],
    ids=lambda raw: repr(raw[:20]),
)
def test_json_that_is_not_ours_is_refused(tmp_path: Path, raw: bytes) -> None:
    [folder] = write(tmp_path, small_content())
    # With the right digest, so that it is read, and without.
    for each in (raw, raw[:-1] + b',"sha256":"' + hashlib.sha256(raw).hexdigest().encode() + b'"}'):
        (folder / "snapshot.json").write_bytes(each)
        with pytest.raises(SnapshotError) as raised:
            load(folder)
        assert str(raised.value).isprintable()


@pytest.mark.parametrize(
    "value", ["1" * 400, "NaN", "1e999", '{"$float":1}', '{"$items":[[1,0],[1.0,0]]}', "[" * 70 + "]" * 70]
)
def test_a_value_that_is_not_ours_is_refused(tmp_path: Path, value: str) -> None:
    [folder] = write(tmp_path, small_content())
    document = json.loads((folder / "snapshot.json").read_bytes())
    del document["sha256"]
    body = _text({**document, "state": "HERE"}).replace(b'"HERE"', value.encode())
    (folder / "snapshot.json").write_bytes(
        body[:-1] + b',"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'"}'
    )
    with pytest.raises(SnapshotError, match="does not have the form of a manifest of this library"):
        load(folder)


@pytest.mark.parametrize(
    ("limit", "value"),
    [("MANIFEST_BYTES", 100), ("NODES", 20), ("DEPTH", 3), ("TENSORS", 1), ("DIMENSIONS", 1), ("HEADER_BYTES", 50)],
)
def test_each_limit_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int) -> None:
    [folder] = write(tmp_path, small_content())
    raw = (folder / "snapshot.json").read_bytes()
    assert read_manifest(raw).update == 1
    monkeypatch.setattr(manifest, limit, value)
    with pytest.raises(SnapshotError):
        read_manifest(raw)


def test_a_shape_too_large_for_its_file_allocates_nothing(tmp_path: Path) -> None:
    [folder] = write(tmp_path, small_content())
    document = json.loads((folder / "snapshot.json").read_bytes())
    document["files"]["state.safetensors"]["state/half"][1:] = [[2**33], ["0" * 64] * 2**10]
    (folder / "snapshot.json").write_bytes(sealed(document))
    with pytest.raises(SnapshotError, match=r"bytes"):
        load(folder)
