"""Files that are parts of a dataset: text, tar archives, parquet, tokens and safetensors files."""

from __future__ import annotations

import io
import os
import re
import tarfile
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, Final, TypeAlias, cast, final

import torch
from safetensors import safe_open

from lockstep.arguments import check_integer
from lockstep.data.parts.part import BlockPart, MadeWhenRead, Part, indexed

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_CHUNK: Final = 2**20
"""The number of bytes that are searched for lines at once."""
_NEWLINE: Final = re.compile(rb"\n")
_COMPRESSED: Final = frozenset({".gz", ".tgz", ".bz2", ".xz", ".zst", ".zip"})
"""The ends of the names of compressed files."""

OpenFile: TypeAlias = "Callable[[str], BinaryIO]"
"""A function that opens a file by its path for reading bytes, such as `fsspec.filesystem(...).open`."""


def open_local(path: str) -> BinaryIO:
    """Open a file of this machine."""
    # Without a buffer, which would read more than is asked for.
    return cast("BinaryIO", Path(path).open("rb", buffering=0))


class IndexedFile(BlockPart):
    """The base class of files that are read once to find their samples.

    Args:
        path: The path of the file.
        block: The number of samples that are read at once, at least 1.
        index: The path of the index, or None.
        open_file: A function that opens the file by its path.
    """

    counted: ClassVar[str] = "samples"
    """What the samples are called in the index."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        block: int = 256,
        index: str | os.PathLike[str] | None = None,
        open_file: OpenFile = open_local,
    ) -> None:
        super().__init__(path, block, index)
        if open_file is open_local and Path(path).suffix in _COMPRESSED:
            raise ValueError(
                f"`path` must be that of a file that is not compressed, got {self.name}. Unpack it, because a block of "
                "it cannot be found, or pass a function such as gzip.open as `open_file`, which reads from the start."
            )
        self.open_file = open_file

    @cached_property
    def _index(self) -> dict[str, Any]:
        """The number of samples, and the positions in bytes at which blocks begin and the last one ends."""
        with self.open_file(self.name) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            key = {f"{self.counted} of": Path(self.name).name, "bytes": size, "block": self.block}
            found: dict[str, Any] = indexed(self.index, key, lambda: self._find(file))
        return found

    def _count_samples(self) -> int:
        return int(self._index[self.counted])

    @abstractmethod
    def _find(self, file: BinaryIO) -> dict[str, Any]:
        """Return what the index holds of a file that is open at its beginning."""

    def _content(self, block: int) -> bytes:
        """Read the bytes of a block."""
        begin, end = self._index["offsets"][block : block + 2]
        with self.open_file(self.name) as file:
            file.seek(begin)
            content = file.read(end - begin)
        if len(content) != end - begin:
            raise EOFError(f"The file ends at {begin + len(content)} instead of {end} bytes.")
        return content


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
        super().__init__(path, block=block, index=index, open_file=open_file)
        if not "-\n".encode(encoding).endswith(b"-\n"):
            raise ValueError(f"`encoding` must write the end of a line as one byte, as utf-8 does, got {encoding!r}.")
        self.encoding = encoding

    def read(self, block: int) -> Sequence[str]:
        """Read a block of lines."""
        lines = self._content(block).removesuffix(b"\n").split(b"\n")
        return MadeWhenRead(len(lines), lambda place: lines[place].removesuffix(b"\r").decode(self.encoding))

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
class TarSamples(IndexedFile):
    """The samples of a tar archive in the format of webdataset, as dicts of bytes.

    Neighbouring files whose names are equal up to the first dot are a sample. Its entries are named by the rest of the
    names, in lower case, and ``"__key__"`` is what they have in common. Webdataset's decoders accept such dicts as
    `transform` of `data.Parts`. The archive must not be compressed as a whole.

    The headers are read once to find the samples. Where blocks begin is kept in the index, so that later runs seek.

    Args:
        path: The path of the archive.
        block: The number of samples that are read at once, at least 1.
        index: The path of the index; it is written if it does not exist. None to find the samples in every process.
        open_file: A function that opens the file by its path; by default a file of this machine.

    Raises:
        StateError: When samples are read, if the index is that of another file.

    References: the format of WebDataset (Aizman, Maltby, Breuel, "High Performance I/O For Large Scale Deep Learning",
    2020, arXiv:2001.01858).
    """

    def read(self, block: int) -> Sequence[dict[str, Any]]:
        """Read a block of samples."""
        content = io.BytesIO(self._content(block))
        samples = []
        # An archive may end without the zeros that mark its end.
        with tarfile.open(fileobj=content, mode="r:") as archive:
            for key, members in _tar_samples(archive):
                entries = {entry: _tar_content(archive, member) for entry, member in members}
                samples.append({"__key__": key, **entries})
        return samples

    def _find(self, file: BinaryIO) -> dict[str, Any]:
        with tarfile.open(fileobj=file, mode="r:") as archive:
            starts = [members[0][1].offset for _, members in _tar_samples(archive)]
            return {"samples": len(starts), "offsets": [*starts[:: self.block], archive.offset]}


def _tar_samples(archive: tarfile.TarFile) -> Iterator[tuple[str, list[tuple[str, tarfile.TarInfo]]]]:
    """Yield the key of each sample with the names of its entries and their files."""
    for key, named in groupby(_named(archive), lambda each: each[0]):
        yield key, [(entry, member) for _, entry, member in named]


def _named(archive: tarfile.TarFile) -> Iterator[tuple[str, str, tarfile.TarInfo]]:
    """Yield the key, the name of the entry, and the file of each entry of all samples."""
    for member in archive:
        folder, slash, name = member.name.rpartition("/")
        first, dot, entry = name.partition(".")
        # Files without a dot, and those of webdataset about the archive, are no samples.
        if member.isfile() and first and dot and not name.startswith("__"):
            yield f"{folder}{slash}{first}", entry.lower(), member


def _tar_content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    """Read a file of an archive."""
    file = archive.extractfile(member)
    content = b"" if file is None else file.read()
    if len(content) != member.size:
        raise EOFError(f"{member.name} has {len(content)} instead of {member.size} bytes.")
    return content


@final
class ParquetRows(Part):
    """The rows of a parquet file as dicts. A block is a row group, of which only the chosen columns are read.

    It needs pyarrow, ``pip install lockstep-torch[streams]``.

    Args:
        path: The path of the file.
        columns: The names of the columns; None for all.
        open_file: A function that opens the file by its path; by default a file of this machine.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, columns: Sequence[str] | None = None, open_file: OpenFile = open_local
    ) -> None:
        self.path = os.fspath(path)
        self.columns = None if columns is None else list(columns)
        self.open_file = open_file

    @property
    def name(self) -> str:
        """The path of the file."""
        return self.path

    @cached_property
    def _metadata(self) -> Any:
        """The metadata of the file, which is read once."""
        from pyarrow import parquet  # noqa: PLC0415 - optional

        with self.open_file(self.path) as file:
            return parquet.read_metadata(file)

    @cached_property
    def lengths(self) -> Sequence[int]:
        """The number of rows of each row group."""
        return [self._metadata.row_group(block).num_rows for block in range(self._metadata.num_row_groups)]

    def read(self, block: int) -> Sequence[dict[str, Any]]:
        """Read a row group."""
        from pyarrow import parquet  # noqa: PLC0415 - optional

        with self.open_file(self.path) as file:
            found = parquet.ParquetFile(file, metadata=self._metadata, pre_buffer=False)
            table = found.read_row_group(block, columns=self.columns, use_threads=False)
        columns = dict(zip(table.column_names, table.columns, strict=True))
        return MadeWhenRead(table.num_rows, lambda row: {name: column[row].as_py() for name, column in columns.items()})


@final
class Tokens(BlockPart):
    """Samples of consecutive tokens of a file, which is mapped into memory.

    Sample i has the `length` tokens from token i·`stride` on, as an int64 tensor. Tokens at the end that do not fill a
    sample are left out.

    Args:
        path: The path of an ``.npy`` file with one dimension, or of a file with nothing but tokens.
        length: The number of tokens per sample, at least 1. For a model that predicts the next token, one more than it
            reads.
        stride: The number of tokens from the start of a sample to that of the next one, at least 1; by default
            `length`.
        dtype: The type of the tokens of a file that is no ``.npy`` file, as NumPy names it, such as ``"uint16"``.
        block: The number of samples that are shuffled among themselves, at least 1.

    Raises:
        ValueError: When samples are counted, if an ``.npy`` file has more dimensions.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        length: int,
        *,
        stride: int | None = None,
        dtype: str = "uint16",
        block: int = 1024,
    ) -> None:
        super().__init__(path, block)
        check_integer("length", length, minimum=1)
        if stride is not None:
            check_integer("stride", stride, minimum=1)
        self.length = length
        self.stride = length if stride is None else stride
        self.dtype = dtype

    def _tokens(self) -> npt.NDArray[np.integer[Any]]:
        """Map the file into memory."""
        import numpy as np  # noqa: PLC0415 - takes long, and most runs need no tokens

        if Path(self.name).suffix != ".npy":
            return np.memmap(self.name, self.dtype, "r")
        tokens: npt.NDArray[np.integer[Any]] = np.load(self.name, mmap_mode="r")
        if tokens.ndim != 1:
            raise ValueError(f"{self.name} must have one dimension, got shape {tokens.shape}.")
        return tokens

    def _count_samples(self) -> int:
        return self._num_in(self._tokens())

    def _num_in(self, tokens: npt.NDArray[np.integer[Any]]) -> int:
        return max(0, (len(tokens) - self.length) // self.stride + 1)

    def read(self, block: int) -> Sequence[torch.Tensor]:
        """Map a block of samples; what is not used of it is not read."""
        begin = block * self.block * self.stride
        end = begin + (self.lengths[block] - 1) * self.stride + self.length
        tokens = self._tokens()[begin:end]

        def window(place: int) -> torch.Tensor:
            start = place * self.stride
            return torch.from_numpy(tokens[start : start + self.length].astype("int64"))

        return MadeWhenRead(self._num_in(tokens), window)


@final
class Safetensors(BlockPart):
    """The tensors of a safetensors file, which all have the samples along their first dimension.

    A sample is a dict with the entry of each tensor.

    Args:
        path: The path of the file.
        block: The number of samples that are read at once, at least 1.

    Raises:
        ValueError: When samples are counted, if tensors have different numbers of samples, or if there are none.
    """

    def __init__(self, path: str | os.PathLike[str], *, block: int = 256) -> None:
        super().__init__(path, block)

    def _count_samples(self) -> int:
        with safe_open(self.name, "pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no dict
        sizes = {shape[:1] for shape in shapes.values()}
        if len(sizes) != 1 or sizes == {()}:
            raise ValueError(f"All tensors of {self.name} must have the same number of samples, got shapes {shapes}.")
        ((num_samples,),) = sizes
        return int(num_samples)

    def read(self, block: int) -> Sequence[dict[str, torch.Tensor]]:
        """Read a block of samples."""
        begin = block * self.block
        rows = slice(begin, begin + self.lengths[block])
        with safe_open(self.name, "pt") as file:
            tensors = {name: file.get_slice(name)[rows] for name in file.keys()}  # noqa: SIM118 - no dict
        return [
            dict(zip(tensors, entries, strict=True))
            for entries in zip(*map(torch.unbind, tensors.values()), strict=True)
        ]
