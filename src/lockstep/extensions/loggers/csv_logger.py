"""Write the observed values as a table of comma-separated values."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lockstep.extensions.loggers.logger import Logger
from lockstep.extensions.loggers.replaced_file import read_json, replace_file, write_json
from lockstep.trainer import Trainer

UPDATE = "update"


class CSVLogger(Logger):
    """Writes ``metrics.csv`` in the trainer's folder, one row per entry, and ``metrics.json`` with the configuration.

    The columns are ``update``, ``epoch`` and the names of the values. When a new name appears, the file is replaced by
    one with a further column. Numbers are written with all digits, and cells without a value are empty. A row is
    written in one call, so that a killed process leaves whole rows.

    Args:
        filename: The file name, relative to the trainer's folder.
        **options: The arguments of `Logger`.
    """

    def __init__(self, filename: str = "metrics.csv", **options: Any) -> None:
        super().__init__(**options)
        self.filename = filename
        self._path = Path(filename)
        self._columns: list[str] = []

    def open(self, trainer: Trainer, *, keep: float) -> int:
        """Open the file, and remove a row that is not whole and the rows that are not kept."""
        self._path = trainer.out / self.filename
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._columns, rows = _read(self._path) if keep else ([], [])
        kept = [row for row in rows if int(row[UPDATE]) <= keep]
        replace_file(self._path, _rows([self._columns, *_cells(kept, self._columns)] if self._columns else []))
        return max((int(row[UPDATE]) for row in kept), default=0)

    def configure(self, config: Mapping[str, Any]) -> None:
        """Replace the file of the configuration."""
        write_json(self._path.with_suffix(".json"), config)

    def write(self, update: int, values: Mapping[str, float]) -> None:
        """Append a row, below a new header if there are new names."""
        row = {UPDATE: str(update), **{name: repr(float(value)) for name, value in values.items()}}
        new = [name for name in row if name not in self._columns]
        if new:
            _, rows = _read(self._path)
            self._columns += new
            replace_file(self._path, _rows([self._columns, *_cells(rows, self._columns)]))
        # Unbuffered, so that the row is written in one call.
        with self._path.open("ab", buffering=0) as file:
            file.write(_rows(_cells([row], self._columns)))

    def summarize(self, summary: Mapping[str, Any]) -> None:
        """Add the summary to the file of the configuration."""
        path = self._path.with_suffix(".json")
        write_json(path, read_json(path) | {"summary": summary})

    def close(self, *, failed: bool) -> None:
        """Close the table, of which every row is already written."""


def _read(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Return the columns and the whole rows of a file; none if there is no file."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    # What follows the last line break is a row that a killed process did not finish.
    reader = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1]))
    rows = list(reader)
    return list(reader.fieldnames or []), rows


def _cells(rows: Iterable[Mapping[str, str]], columns: list[str]) -> list[list[str]]:
    """Return the cells of rows in the order of the columns."""
    return [[row.get(name) or "" for name in columns] for row in rows]


def _rows(cells: Iterable[list[str]]) -> bytes:
    """Return rows as comma-separated values."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(cells)
    return text.getvalue().encode()
