"""Row groups of parquet files as blocks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from typing import Any, final

from lockstep.data.parts.files import OpenFile, open_local
from lockstep.data.parts.part import Part


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
            return _Rows(found.read_row_group(block, columns=self.columns, use_threads=False))


@final
class _Rows(Sequence[dict[str, Any]]):
    """Rows of a table, which become objects of Python when they are read."""

    def __init__(self, table: Any) -> None:
        self._names, self._columns, self._size = table.column_names, table.columns, table.num_rows

    def __len__(self) -> int:
        return int(self._size)

    def __getitem__(self, index: Any) -> Any:
        return {name: column[index].as_py() for name, column in zip(self._names, self._columns, strict=True)}
