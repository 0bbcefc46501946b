"""Tar archives in the format of webdataset."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, BinaryIO, final

from lockstep.data.parts.files import IndexedFile, OpenFile, open_local


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

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        block: int = 256,
        index: str | os.PathLike[str] | None = None,
        open_file: OpenFile = open_local,
    ) -> None:
        super().__init__(path, block, index, open_file)

    def read(self, block: int) -> Sequence[dict[str, Any]]:
        """Read a block of samples."""
        content = io.BytesIO(self._content(block))
        samples = []
        # An archive may end without the zeros that mark its end.
        with tarfile.open(fileobj=content, mode="r:") as archive:
            for key, members in _samples(archive):
                entries = {entry: _content(archive, member) for entry, member in members}
                samples.append({"__key__": key, **entries})
        return samples

    def _find(self, file: BinaryIO) -> dict[str, Any]:
        with tarfile.open(fileobj=file, mode="r:") as archive:
            starts = [members[0][1].offset for _, members in _samples(archive)]
            return {"samples": len(starts), "offsets": [*starts[:: self.block], archive.offset]}


def _samples(archive: tarfile.TarFile) -> Iterator[tuple[str, list[tuple[str, tarfile.TarInfo]]]]:
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


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    """Read a file of an archive."""
    file = archive.extractfile(member)
    content = b"" if file is None else file.read()
    if len(content) != member.size:
        raise EOFError(f"{member.name} has {len(content)} instead of {member.size} bytes.")
    return content
