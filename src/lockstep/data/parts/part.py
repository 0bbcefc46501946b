"""The interface of a part of a dataset: a file, or a stream that can be opened again."""

from __future__ import annotations

import json
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from lockstep.arguments import check_integer
from lockstep.errors import StateError


class Part(ABC):
    """A part of a dataset, such as a file, which is read in blocks of samples.

    A block is what one request reads: some lines, a row group, a piece of an archive. It must hold the same samples
    whenever and wherever it is read.

    Attributes:
        in_order: Whether the blocks must be read one after the other, because a later one is expensive to find. Then
            only whole parts are shuffled, and not their blocks.
    """

    in_order = False

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of the part in errors and warnings, such as its path."""

    @property
    @abstractmethod
    def lengths(self) -> Sequence[int]:
        """The number of samples of each block."""

    @abstractmethod
    def read(self, block: int) -> Sequence[Any]:
        """Read a block.

        A sample that can be bad without the others, such as one that is parsed, should be made when the result is
        indexed, so that its error is that of one record.

        Args:
            block: The index of the block.

        Returns:
            The samples of the block, as many as `lengths` says.
        """


class BlockPart(Part):
    """The base class of parts whose blocks have the same number of samples, except for the last one.

    Args:
        name: The name of the part in errors and warnings, which for a file is its path.
        block: The number of samples that are read at once, at least 1.
        index: The path of the index, which no other part has; None without one.
    """

    def __init__(self, name: str | os.PathLike[str], block: int, index: str | os.PathLike[str] | None = None) -> None:
        check_integer("block", block, minimum=1)
        self._name = os.fspath(name)
        self.block = block
        self.index = None if index is None else os.fspath(index)

    @property
    def name(self) -> str:
        """The name of the part."""
        return self._name

    @abstractmethod
    def _count_samples(self) -> int:
        """Return the number of samples of the part."""

    @cached_property
    def lengths(self) -> Sequence[int]:
        """The number of samples of each block."""
        num_samples = self._count_samples()
        return [min(self.block, num_samples - start) for start in range(0, num_samples, self.block)]


class MadeWhenRead(Sequence[Any]):
    """The samples of a block, each of which is made when it is read, so that it may be bad without the others.

    Args:
        size: The number of samples.
        make: A function that returns the sample of an index.
    """

    def __init__(self, size: int, make: Callable[[int], Any]) -> None:
        self._places, self._make = range(size), make

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: Any) -> Any:
        # The range raises an IndexError beyond the end, where the sequence is iterated over.
        return self._make(self._places[index])


def indexed(path: str | os.PathLike[str] | None, key: Mapping[str, Any], count: Callable[[], Any]) -> Any:
    """Return what is in an index file; count it and write the file if there is none.

    Args:
        path: The path of the index file; None to count whenever this is called.
        key: What the contents depend on, such as the size of the file that is indexed, as JSON values.
        count: A function that returns the contents, as JSON values.

    Raises:
        StateError: If the file holds the index of something else, or no index.
    """
    if path is None:
        return count()
    path = Path(path)
    key = json.loads(json.dumps(key))
    try:
        text = path.read_text()
    except FileNotFoundError:
        found = json.loads(json.dumps(count()))
        _write(path, json.dumps({"key": key, "index": found}))
        return found
    try:
        saved = json.loads(text)
        own, index = saved["key"], saved["index"]
    except (ValueError, TypeError, KeyError) as error:
        raise StateError(f"`index` must be the path of an index, got {path}, which holds something else.") from error
    if own != key:
        raise StateError(f"`index` must be the index of {key}, got {path}, the index of {own}. Delete it.")
    return index


def _write(path: Path, text: str) -> None:
    """Write a file so that other processes find all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(handle, "w") as file:
        file.write(text)
    Path(name).replace(path)
