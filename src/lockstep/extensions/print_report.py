"""Print the log as a table, line by line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TextIO

from tqdm import tqdm

from lockstep.extensions.log_report import COUNTERS, LogEntry, find_log
from lockstep.trainer import READER, Extension, Trainer

WIDTH = 11
"""The least number of characters in a column."""


class PrintReport(Extension):
    """Prints a line for each entry of a `LogReport`, under a heading.

    It comes after the log in each iteration, in whatever order the two were hung in, and
    lifts a `ProgressBar` out of the way of its lines. A line can be read as soon as it is printed, through
    a pipe or in a file also. Of several processes, rank 0 prints.

    Args:
        entries: The columns. All that the log has, unless given; when new ones turn up in the log, a
            new heading is printed.
        out: Where to; the standard output of the moment unless given.
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
        self.entries = None if entries is None else tuple(entries)
        self.out = out
        self.log_report = log_report
        self._columns: tuple[str, ...] = ()
        self._printed = 0

    def initialize(self, trainer: Trainer) -> None:
        """Check that there is a log, and print the heading anew."""
        find_log(trainer, self.log_report, reader=self)
        self._columns = ()

    def __call__(self, trainer: Trainer) -> None:
        """Print the entries that were added to the log."""
        report = find_log(trainer, self.log_report, reader=self)
        if report.num_entries > self._printed:
            for entry in report.log[self._printed :] if trainer.is_main else []:
                self._print(entry)
            self._printed = report.num_entries

    def finalize(self, trainer: Trainer) -> None:
        """Print what is left."""
        self(trainer)

    def _print(self, entry: LogEntry) -> None:
        columns = self.entries or _columns(self._columns, entry)
        if columns != self._columns:
            self._columns = columns
            self._write("  ".join(f"{name:<{WIDTH}}" for name in columns))
        self._write("  ".join(f"{_cell(name, entry):<{max(WIDTH, len(name))}}" for name in columns))

    def _write(self, line: str) -> None:
        # Not plain writing: tqdm takes bars that are on the same screen away first and draws them again.
        out = self.out or sys.stdout
        tqdm.write(line.rstrip(), file=out)
        # Through a pipe Python gathers some kilobytes, which may be all that a run has to say.
        out.flush()


def _columns(known: tuple[str, ...], entry: LogEntry) -> tuple[str, ...]:
    """Return the counters, the values known before and the new ones; the time comes last."""
    values = [name for name in (*known, *entry) if name not in COUNTERS]
    return ("epoch", "iteration", *dict.fromkeys(values), "elapsed_time")


def _cell(name: str, entry: LogEntry) -> str:
    if name not in entry:
        return ""
    return f"{entry[name]:.1f}" if name == "elapsed_time" else f"{entry[name]:.6g}"
