"""Write the observed values as a table of comma-separated values."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lockstep.extensions.loggers.logger import Logger
from lockstep.side_files import DAMAGE, SideFile
from lockstep.trainer import Trainer

UPDATE = "update"


class CSVLogger(Logger):
    """Writes ``metrics.csv`` in the trainer's folder, one row per entry, and ``metrics.json`` with the configuration.

    The columns are ``update``, ``epoch`` and the names of the values. When a new name appears, the file is replaced by
    one with a further column. Numbers are written with all digits, and cells without a value are empty. A process that
    is killed leaves whole rows.

    Args:
        filename: The file name, relative to the trainer's folder.
        **options: The arguments of `Logger`.
    """

    def __init__(self, filename: str = "metrics.csv", **options: Any) -> None:
        super().__init__(**options)
        self.filename = filename
        self._table = SideFile(Path(), filename, required=self.required)
        self._config = SideFile(Path(), Path(filename).with_suffix(".json"), required=self.required)
        self._columns: list[str] = []
        self._values: dict[str, Any] = {}

    def initialize(self, trainer: Trainer) -> None:
        """Check that the files are regular files, if they exist."""
        for file in (self._table, self._config):
            file.folder = trainer.out
            file.check()

    def open(self, trainer: Trainer, *, keep: float) -> int:  # noqa: ARG002 - the interface
        """Read the files, and remove a row that is not whole and the rows that are not kept."""
        self._columns, rows = _parse(self._table, self._table.read() or b"") if keep else ([], [])
        kept = [row for row in rows if int(row[0]) <= keep]
        self._table.begin(_rows([self._columns, *kept] if self._columns else []))
        self._values = self._config.read_json() if keep else {}
        return int(kept[-1][0]) if kept else 0

    def configure(self, config: Mapping[str, Any]) -> None:
        """Replace the file of the configuration."""
        self._values = dict(config)
        self._config.write_json(self._values)

    def write(self, update: int, values: Mapping[str, float]) -> None:
        """Append a row, below a new header if there are new names."""
        row = {UPDATE: str(update), **{name: repr(float(value)) for name, value in values.items()}}
        new = [name for name in row if name not in self._columns]
        cells = [row.get(name, "") for name in self._columns + new]
        if new:
            _, rows = _parse(self._table, self._table.content)
            self._columns += new
            rows = [[*each, *[""] * len(new)] for each in rows]
            self._table.replace(_rows([self._columns, *rows, cells]))
        else:
            self._table.append(_rows([cells]))

    def summarize(self, summary: Mapping[str, Any]) -> None:
        """Add the summary to the file of the configuration."""
        self._config.write_json({**self._values, "summary": summary})

    def flush(self) -> None:
        """Wait until every row is durable."""
        self._table.write(durable=True)

    def close(self, *, failed: bool) -> None:  # noqa: ARG002 - the interface
        """Write the rows that could not be written before."""
        self._table.close()


def _parse(table: SideFile, data: bytes) -> tuple[list[str], list[list[str]]]:
    """Return the columns and the rows. What follows the last line break was not finished by a process that was killed.

    Raises:
        SideFileError: If the content is damaged.
    """
    columns, rows, last = list[str](), list[list[str]](), -1
    try:
        for row in csv.reader(io.StringIO(data[: data.rfind(b"\n") + 1].decode(), newline="")):
            if not columns:
                columns = row
                if columns[:1] != [UPDATE] or len(set(columns)) < len(columns):
                    raise ValueError(f"its first row must be a header that begins with {UPDATE!r}")
                continue
            if len(row) != len(columns) or int(row[0]) <= last:
                raise ValueError("it must have a cell for each column, and ascending updates")
            for cell in filter(None, row):
                float(cell)
            last = int(row[0])
            rows.append(row)
    except DAMAGE as error:
        raise table.damaged(f"row {len(rows) + 1}", error) from error
    return columns, rows


def _rows(cells: Iterable[list[str]]) -> bytes:
    """Return rows as comma-separated values."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(cells)
    return text.getvalue().encode()
