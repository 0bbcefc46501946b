"""Every state in which a weak file system may leave a disk, if the power fails during recorded calls.

The model promises only what POSIX does: the content of a file is there after its fsync, and a name in a folder after
an fsync of that folder. Without them, each block of 4 KB of a file may be there, or be zeros, or the whole content may
be missing; and of the changes of names in a folder, any may have happened, in any order.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from lockstep.snapshots import Disk

BLOCK = 4096
SECTOR = 512
ALL_SUBSETS = 5
"""Up to this many changes of names, every subset of them is tried."""

ALL_BLOCKS = 3**6
"""Up to this many ways to tear a file, each of them is tried."""

Call: TypeAlias = tuple[Any, ...]


class RecordingDisk(Disk):
    """Writes as usual, and records the calls with paths relative to a folder."""

    def __init__(self, root: Path) -> None:
        self.calls: list[Call] = []
        self._root = root
        self._files: dict[int, str] = {}

    def _name(self, path: Path) -> str:
        return path.relative_to(self._root).as_posix()

    def mark(self, update: int) -> None:
        """Record that a snapshot counts as durable from here on."""
        self.calls.append(("durable", update))

    def create_folder(self, path: Path) -> None:
        super().create_folder(path)
        self.calls.append(("create_folder", self._name(path)))

    def create_file(self, path: Path) -> int:
        descriptor = super().create_file(path)
        self._files[descriptor] = self._name(path)
        self.calls.append(("create_file", self._name(path)))
        return descriptor

    def write(self, descriptor: int, data: memoryview) -> None:
        self.calls.append(("write", self._files[descriptor], bytes(data)))
        super().write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        super().sync(descriptor)
        self.calls.append(("sync", self._files[descriptor]))

    def sync_folder(self, path: Path) -> None:
        super().sync_folder(path)
        self.calls.append(("sync_folder", self._name(path)))

    def rename(self, path: Path, new: Path) -> None:
        super().rename(path, new)
        self.calls.append(("rename", self._name(path), self._name(new)))

    def remove_file(self, path: Path) -> None:
        super().remove_file(path)
        self.calls.append(("remove", self._name(path)))

    def remove_folder(self, path: Path) -> None:
        super().remove_folder(path)
        self.calls.append(("remove", self._name(path)))


@dataclass(eq=False)
class File:
    """A file: what is in it, and how much of that is durable."""

    content: bytes = b""
    durable: bytes = b""


@dataclass(eq=False)
class Folder:
    """A folder: its durable names, and the changes of names that are not durable yet."""

    durable: dict[str, File | Folder] = field(default_factory=dict)
    changes: list[tuple[str | None, str | None, File | Folder]] = field(default_factory=list)

    def names(self, chosen: Sequence[bool] | None = None) -> dict[str, File | Folder]:
        """Return the names after some of the changes; after all of them if none are chosen."""
        found = dict(self.durable)
        for index, (old, new, node) in enumerate(self.changes):
            if chosen is None or chosen[index]:
                if old is not None:
                    found.pop(old, None)
                if new is not None:
                    found[new] = node
        return found


Tree: TypeAlias = dict[str, "bytes | Tree"]
"""What is on the disk: the content of files and folders by name."""


class Machine:
    """The file system while calls are made."""

    def __init__(self) -> None:
        self.root = Folder()

    def _at(self, path: str) -> File | Folder:
        node: File | Folder = self.root
        for part in Path(path).parts:
            assert isinstance(node, Folder)
            node = node.names()[part]
        return node

    def _parent(self, path: str) -> Folder:
        node = self._at(Path(path).parent.as_posix())
        assert isinstance(node, Folder)
        return node

    def make(self, call: Call) -> None:
        """Make one call."""
        match call:
            case ("create_folder", path):
                self._parent(path).changes.append((None, Path(path).name, Folder()))
            case ("create_file", path):
                self._parent(path).changes.append((None, Path(path).name, File()))
            case ("write", path, data):
                file = self._at(path)
                assert isinstance(file, File)
                file.content += data
            case ("sync", path):
                file = self._at(path)
                assert isinstance(file, File)
                file.durable = file.content
            case ("sync_folder", path):
                folder = self._at(path)
                assert isinstance(folder, Folder)
                folder.durable = folder.names()
                folder.changes.clear()
            case ("rename", path, new):
                self._parent(path).changes.append((Path(path).name, Path(new).name, self._at(path)))
            case ("remove", path):
                self._parent(path).changes.append((Path(path).name, None, self._at(path)))

    def after_a_crash(self, draw: random.Random, limit: int) -> Iterator[Tree]:
        """Yield states in which the disk may be now. If there are more than a limit, they are drawn."""
        folders, files = self._open_nodes()
        subsets = [_subsets(len(folder.changes), draw) for folder in folders]
        contents = [_contents(file, draw) for file in files]
        choices: Iterator[tuple[Any, ...]] = itertools.product(*subsets, *contents)
        count = 1
        for each in (*subsets, *contents):
            count *= len(each)
        if count > limit:
            choices = (tuple(draw.choice(each) for each in (*subsets, *contents)) for _ in range(limit))
        for choice in choices:
            chosen = dict(zip(map(id, folders), choice[: len(folders)], strict=True))
            torn = dict(zip(map(id, files), choice[len(folders) :], strict=True))
            yield _tree(self.root, chosen, torn)

    def _open_nodes(self) -> tuple[list[Folder], list[File]]:
        """List the folders and files of which something is not durable."""
        folders: dict[int, Folder] = {}
        files: dict[int, File] = {}
        todo: list[File | Folder] = [self.root]
        while todo:
            node = todo.pop()
            if isinstance(node, Folder):
                if node.changes:
                    folders[id(node)] = node
                todo += [*node.durable.values(), *(each for _, _, each in node.changes)]
            elif node.content != node.durable:
                files[id(node)] = node
        return list(folders.values()), list(files.values())


def _subsets(count: int, draw: random.Random) -> list[tuple[bool, ...]]:
    if count <= ALL_SUBSETS:
        return list(itertools.product((True, False), repeat=count))
    prefixes = [tuple(index < end for index in range(count)) for end in range(count + 1)]
    return prefixes + [tuple(draw.random() < 0.5 for _ in range(count)) for _ in range(2**ALL_SUBSETS)]


def _contents(file: File, draw: random.Random) -> list[bytes]:
    """List what may be in a file: a part of what is new, or each block of it whole, halved or zeros."""
    whole, start = file.content, len(file.durable)
    blocks = range(start, len(whole), BLOCK)
    kept = itertools.product((2, 1, 0), repeat=len(blocks))
    if 3 ** len(blocks) > ALL_BLOCKS:
        kept = ([draw.choice((2, 1, 0)) for _ in blocks] for _ in range(ALL_BLOCKS))
    found = [whole, *(whole[:end] for end in range(start, len(whole), SECTOR))]
    for halves in kept:
        torn = bytearray(whole)
        for block, count in zip(blocks, halves, strict=True):
            end = min(block + BLOCK, len(whole))
            keep = (end - block) * count // 2
            torn[block + keep : end] = bytes(end - block - keep)
        found.append(bytes(torn))
    return list(dict.fromkeys(found))


def _tree(folder: Folder, chosen: dict[int, Sequence[bool]], torn: dict[int, bytes]) -> Tree:
    return {
        name: torn.get(id(node), node.content) if isinstance(node, File) else _tree(node, chosen, torn)
        for name, node in folder.names(chosen.get(id(folder), ())).items()
    }


def crash_states(calls: Sequence[Call], *, limit: int, seed: int = 0) -> Iterator[tuple[int, Tree]]:
    """Yield the states after a crash at any moment, each once, with the newest update that counts as durable, or 0."""
    machine, draw, durable = Machine(), random.Random(seed), 0  # noqa: S311
    seen: set[int] = set()
    for call in calls:
        if call[0] == "durable":
            durable = call[1]
        else:
            machine.make(call)
        for tree in machine.after_a_crash(draw, limit):
            state = hash((durable, _frozen(tree)))
            if state not in seen:
                seen.add(state)
                yield durable, tree


def _frozen(tree: Tree) -> frozenset[tuple[str, object]]:
    return frozenset((name, node if isinstance(node, bytes) else _frozen(node)) for name, node in tree.items())


def lay_out(tree: Tree, folder: Path) -> None:
    """Write a state of the disk into a folder."""
    folder.mkdir()
    for name, node in tree.items():
        if isinstance(node, bytes):
            (folder / name).write_bytes(node)
        else:
            lay_out(node, folder / name)


# Mutants of the protocol, as changes of the calls -----------------------------------------------------


def _without(kind: str) -> Callable[[list[Call]], list[Call]]:
    return lambda calls: [call for call in calls if call[0] != kind]


def _saves(calls: list[Call]) -> list[list[Call]]:
    """Split calls at the marks of durable snapshots, which begin with the creation of a temporary folder."""
    found: list[list[Call]] = [[]]
    for call in calls:
        if call[0] == "create_folder" and Path(call[1]).name.startswith(".tmp-"):
            found.append([])
        found[-1].append(call)
    return found


def _delete_first(calls: list[Call]) -> list[Call]:
    """Remove old snapshots before the new one is written."""
    found = []
    for save in _saves(calls):
        removals = next((i for i, call in enumerate(save) if call[0] == "rename" and ".tmp-" in call[2]), len(save))
        found += save[removals:] + save[:removals]
    return found


def _manifest_first(calls: list[Call]) -> list[Call]:
    """Write the manifest before the files that it vouches for."""
    found = []
    for save in _saves(calls):
        manifest = [c for c in save if c[0] in {"create_file", "write", "sync"} and c[1].endswith("snapshot.json")]
        found += save[:1] + manifest + [call for call in save[1:] if call not in manifest]
    return found


def _latest(calls: list[Call]) -> list[Call]:
    """Name the newest snapshot in a file, which is written anew each time."""
    found: list[Call] = []
    for call in calls:
        found.append(call)
        if call[0] == "rename" and ".tmp-" in call[1]:
            number, folder = len(found), Path(call[2])
            temporary, latest = (folder.with_name(name).as_posix() for name in (f".latest-{number}", "latest"))
            found += [("create_file", temporary), ("write", temporary, folder.name.encode())]
            found += [("rename", temporary, latest)]
    return found


MUTANTS: dict[str, Callable[[list[Call]], list[Call]]] = {
    "no file fsync": _without("sync"),
    "no folder fsync": _without("sync_folder"),
    "delete first": _delete_first,
    "manifest first": _manifest_first,
    "latest file": _latest,
}
