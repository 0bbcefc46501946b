"""Files that are parts of a dataset: lines of text, tokens in arrays, and tensors in safetensors files."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeAlias, cast, final

from lockstep.data.parts.index import indexed
from lockstep.data.parts.part import Part
from lockstep.integers import check_integer

_CHUNK: Final = 2**20
"""The number of bytes that are searched for lines at once."""
_NEWLINE: Final = re.compile(rb"\n")

OpenFile: TypeAlias = "Callable[[str], BinaryIO]"
"""A function that opens a file by its path for reading bytes, such as `fsspec.filesystem(...).open`."""


def open_local(path: str) -> BinaryIO:
    """Open a file of this machine."""
    # Without a buffer, which would read more than is asked for.
    return cast("BinaryIO", Path(path).open("rb", buffering=0))


def read_range(open_file: OpenFile, path: str, begin: int, end: int) -> bytes:
    """Read the bytes of a file from one position to another.

    Raises:
        EOFError: If the file ends before.
    """
    with open_file(path) as file:
        file.seek(begin)
        content = file.read(end - begin)
    if len(content) != end - begin:
        raise EOFError(f"The file ends at {begin + len(content)} instead of {end} bytes.")
    return content


@final
class TextLines(Part):
    r"""The lines of a text file, such as JSON lines, without the characters that end them.

    The file is read once to find the lines. Where blocks begin is kept in the index, so that later runs seek.

    Args:
        path: The path of the file.
        block: The number of lines that are read at once, at least 1.
        index: The path of the index; it is written if it does not exist. None to find the lines in every process.
        encoding: The encoding of the text. Lines must end with the byte of ``"\n"``.
        open_file: A function that opens the file by its path; by default a file of this machine.

    Raises:
        StateError: When lines are read, if the index is that of another file.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        block: int = 1024,
        index: str | os.PathLike[str] | None = None,
        encoding: str = "utf-8",
        open_file: OpenFile = open_local,
    ) -> None:
        check_integer("block", block, minimum=1)
        self.path = os.fspath(path)
        self.block = block
        self.index = index
        self.encoding = encoding
        self.open_file = open_file

    @property
    def name(self) -> str:
        """The path of the file."""
        return self.path

    @cached_property
    def _index(self) -> dict[str, Any]:
        """The number of lines, and the positions in bytes at which blocks begin and the last one ends."""
        with self.open_file(self.path) as file:
            size = file.seek(0, os.SEEK_END)
            key = {"lines of": Path(self.path).name, "bytes": size, "block": self.block}
            found: dict[str, Any] = indexed(self.index, key, lambda: _find_lines(file, self.block))
        return found

    @property
    def lengths(self) -> Sequence[int]:
        """The number of lines of each block."""
        starts = range(0, self._index["lines"], self.block)
        return [min(self.block, self._index["lines"] - start) for start in starts]

    def read(self, block: int) -> Sequence[str]:
        """Read a block of lines."""
        begin, end = self._index["offsets"][block : block + 2]
        content = read_range(self.open_file, self.path, begin, end)
        return _Lines(content.removesuffix(b"\n").split(b"\n"), self.encoding)


def _find_lines(file: BinaryIO, block: int) -> dict[str, Any]:
    """Return the number of lines of a file, and the positions at which blocks begin and the last one ends."""
    file.seek(0)
    offsets, position, lines, last = [0], 0, 0, b""
    while chunk := file.read(_CHUNK):
        for newline in _NEWLINE.finditer(chunk):
            lines += 1
            if lines % block == 0:
                offsets.append(position + newline.end())
        position += len(chunk)
        last = chunk[-1:]
    if last not in b"\n":
        lines += 1
    return {"lines": lines, "offsets": offsets if offsets[-1] == position else [*offsets, position]}


@final
class _Lines(Sequence[str]):
    """Lines that are decoded when they are read, so that each may be bad by itself."""

    def __init__(self, lines: list[bytes], encoding: str) -> None:
        self._lines, self._encoding = lines, encoding

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: Any) -> Any:
        return self._lines[index].removesuffix(b"\r").decode(self._encoding)
