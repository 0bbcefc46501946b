"""Files that are parts of a dataset: lines of text, tokens in arrays, and tensors in safetensors files."""

from __future__ import annotations

import os
import re
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeAlias, cast, final

from lockstep.data.parts.part import IndexedPart, indexed

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


class IndexedFile(IndexedPart):
    """The base class of files that are read once to find their samples.

    Args:
        path: The path of the file.
        block: The number of samples that are read at once, at least 1.
        index: The path of the index, or None.
        open_file: A function that opens the file by its path.
    """

    def __init__(
        self, path: str | os.PathLike[str], block: int, index: str | os.PathLike[str] | None, open_file: OpenFile
    ) -> None:
        super().__init__(os.fspath(path), block, index)
        self.path = os.fspath(path)
        self.open_file = open_file

    @cached_property
    def _index(self) -> dict[str, Any]:
        """The number of samples, and the positions in bytes at which blocks begin and the last one ends."""
        with self.open_file(self.path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            key = {f"{self.counted} of": Path(self.path).name, "bytes": size, "block": self.block}
            found: dict[str, Any] = indexed(self.index, key, lambda: self._find(file))
        return found

    @abstractmethod
    def _find(self, file: BinaryIO) -> dict[str, Any]:
        """Return what the index holds of a file that is open at its beginning."""

    def _content(self, block: int) -> bytes:
        """Read the bytes of a block."""
        begin, end = self._index["offsets"][block : block + 2]
        return read_range(self.open_file, self.path, begin, end)


@final
class TextLines(IndexedFile):
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

    counted = "lines"

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        block: int = 1024,
        index: str | os.PathLike[str] | None = None,
        encoding: str = "utf-8",
        open_file: OpenFile = open_local,
    ) -> None:
        super().__init__(path, block, index, open_file)
        self.encoding = encoding

    def read(self, block: int) -> Sequence[str]:
        """Read a block of lines."""
        return _Lines(self._content(block).removesuffix(b"\n").split(b"\n"), self.encoding)

    def _find(self, file: BinaryIO) -> dict[str, Any]:
        offsets, position, lines, last = [0], 0, 0, b""
        while chunk := file.read(_CHUNK):
            for newline in _NEWLINE.finditer(chunk):
                lines += 1
                if lines % self.block == 0:
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
