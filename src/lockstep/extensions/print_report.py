"""Print the log as a table, line by line."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from typing import TextIO

from tqdm import tqdm

from lockstep.extensions.log_report import COUNTER_KEYS, LogEntry, find_log
from lockstep.extensions.unobserved import Unobserved, check_names
from lockstep.trainer import READER, Extension, Trainer

MIN_COLUMN_WIDTH = 11
"""The smallest width of a column, in characters."""


class PrintReport(Extension):
    """Prints a line for each entry of a `LogReport`, below a header.

    It runs after the log in each iteration, in whichever order the two were added, and its lines do not interfere
    with a `ProgressBar`. Each line is flushed, so that it can be read at once, also through a pipe or in a file. With
    several processes, rank 0 prints.

    Args:
        entries: The names of the columns. By default all names in the log that fit the terminal, and without
            ``main/skipped`` until an update was skipped; when new names appear, a new header is printed.
        out: The stream to print to; by default the current standard output.
        log_report: The name of the `LogReport`.
    """

    priority = READER - 1
    _saved = ("printed",)

    def __init__(
        self,
        entries: Sequence[str] | None = None,
        out: TextIO | None = None,
        *,
        log_report: str = "LogReport",
    ) -> None:
        self.entries = check_names("entries", entries)
        self._unobserved = Unobserved("`entries` of PrintReport", self.entries)
        self.out = out
        self.log_report = log_report
        self._columns: tuple[str, ...] = ()
        self._known: tuple[str, ...] = ()
        self._left_out: set[str] = set()
        self._printed = 0

    def initialize(self, trainer: Trainer) -> None:
        """Check that there is a log, and print the header again."""
        report = find_log(trainer, self.log_report, reader=self)
        # The log of a run that resumes may be shorter than it was.
        self._printed = min(self._printed, report.num_entries)
        self._columns = ()

    def __call__(self, trainer: Trainer) -> None:
        """Print the entries that were added to the log."""
        report = find_log(trainer, self.log_report, reader=self)
        if report.num_entries > self._printed:
            for entry in report.log[self._printed :] if trainer.is_main else []:
                self._print(entry)
                self._unobserved.check(trainer, entry)
            self._printed = report.num_entries

    def finalize(self, trainer: Trainer) -> None:
        """Print the entries that are left."""
        self(trainer)
        self._unobserved.check(trainer, (), at_end=True)

    def _print(self, entry: LogEntry) -> None:
        """Print one entry, with a header if the columns have changed."""
        columns = self.entries or self._fitting(_columns(self._known, entry))
        if columns != self._columns:
            self._columns = columns
            self._write("  ".join(f"{name:<{MIN_COLUMN_WIDTH}}" for name in columns))
        self._write("  ".join(f"{_cell(name, entry):<{max(MIN_COLUMN_WIDTH, len(name))}}" for name in columns))

    def _fitting(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Return the columns that fit the terminal: the counters, and then the values in their order."""
        self._known = names
        out = self.out or sys.stdout
        if not out.isatty():
            return names
        width, kept = shutil.get_terminal_size().columns, list(names)
        # From the last value backwards; the elapsed time stays.
        for name in reversed([name for name in names if name not in COUNTER_KEYS]):
            if sum(max(MIN_COLUMN_WIDTH, len(each)) + 2 for each in kept) - 2 <= width:
                break
            kept.remove(name)
        left = [name for name in names if name not in kept and name not in self._left_out]
        if left:
            self._left_out.update(left)
            self._write(f"Wider than this terminal, and only in the log: {', '.join(left)}.")
        return tuple(kept)

    def _write(self, line: str) -> None:
        """Write a line without interfering with progress bars."""
        # `tqdm.write` clears the bars on the same terminal first and redraws them after the line.
        out = self.out or sys.stdout
        tqdm.write(line.rstrip(), file=out)
        # To a pipe, Python writes in blocks of several kilobytes, which may be more than a run prints.
        out.flush()


def _columns(known: tuple[str, ...], entry: LogEntry) -> tuple[str, ...]:
    """Return the columns: the counters, the known names and the new ones, and the elapsed time."""
    # Skipped updates are rare, and their column appears with the first of them.
    values = [
        name
        for name in (*known, *entry)
        if name not in COUNTER_KEYS and (name in known or not name.endswith("/skipped") or entry[name])
    ]
    return ("epoch", "iteration", *dict.fromkeys(values), "elapsed_time")


def _cell(name: str, entry: LogEntry) -> str:
    """Format the value of an entry for its column, which is empty if there is none."""
    if name not in entry:
        return ""
    return _duration(entry[name]) if name == "elapsed_time" else f"{entry[name]:.6g}"


def _duration(seconds: float) -> str:
    """Format a duration in units that people read.

    >>> _duration(2.31), _duration(75), _duration(7384)
    ('2.3 s', '1:15 min', '2:03:04 h')
    """
    if seconds < 60:  # noqa: PLR2004 - a minute
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02} min" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{rest:02} h"  # noqa: PLR2004
