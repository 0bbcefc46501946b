"""What a run shows on the screen: a table of its log, and a progress bar."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from importlib import import_module
from typing import TextIO

from tqdm import tqdm

from lockstep.arguments import check_number
from lockstep.extensions.log_report import COUNTER_KEYS, LogEntry, find_log
from lockstep.extensions.plots import in_notebook
from lockstep.extensions.unobserved import Unobserved, check_names
from lockstep.metrics import Observed, as_mean
from lockstep.trainer import READER, Extension, Trainer
from lockstep.triggers import Unit, position

MIN_COLUMN_WIDTH = 11
"""The smallest width of a column, in characters."""


@dataclass(eq=False, repr=False)
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

    entries: Sequence[str] | None = None
    out: TextIO | None = None
    _: KW_ONLY
    log_report: str = "LogReport"

    def __post_init__(self) -> None:
        self.entries = check_names("entries", self.entries)
        self._unobserved = Unobserved("`entries` of PrintReport", self.entries)
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
        columns = tuple(self.entries or ()) or self._fitting(_columns(self._known, entry))
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
    return "" if name not in entry else _duration(entry[name]) if name == "elapsed_time" else f"{entry[name]:.6g}"


def _duration(seconds: float) -> str:
    """Format a duration in units that people read.

    >>> _duration(2.31), _duration(75), _duration(7384)
    ('2.3 s', '1:15 min', '2:03:04 h')
    """
    if seconds < 60:  # noqa: PLR2004 - a minute
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02} min" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{rest:02} h"  # noqa: PLR2004


FORMAT_WITH_BOUND = "{percentage:3.0f}%|{bar}| {desc} [{elapsed}<{remaining}]"
FORMAT_WITHOUT_BOUND = "{desc} [{elapsed}]"
LINE_WITH_BOUND = "{percentage:.0f}% {desc} [{elapsed}<{remaining}]"
"""The format of a line in a file. The line of a run without a bound is that of the bar."""

REDRAW_INTERVAL = 0.1
"""The smallest number of seconds between two drawings of a bar."""


@dataclass(eq=False, repr=False)
class ProgressBar(Extension):
    """Displays the progress of the whole run: the epoch, the iteration, the loss, and the updates per second.

    On a terminal it is a bar, and in a notebook a widget (`tqdm.auto`), which is redrawn at most ten times per second.
    Elsewhere, such as in the log of a job, it is a line of text from time to time, and one at the end. The length of
    the bar is the bound of the trainer, or the limit of a trigger such as `EarlyStopping`, see `Trigger.limit`; a run
    that may end at any time has a line without a bar. With several processes,
    rank 0 draws.

    Values are read only when they are drawn, so that the host rarely waits for a device.

    Args:
        show: Whether to draw a bar, also into a file, where each drawing adds a line, or nothing at all. None chooses
            by the place, as above.
        out: The stream to draw to; by default the current standard error.
        values: The names of the observed values to show, such as ``"validation/main/accuracy"``, each with the last
            value observed. By default the losses of the update.
        line_interval: The number of seconds, at least 0, between two lines of text.

    Raises:
        ValueError: If `line_interval` is less than 0.
    """

    priority = READER - 2

    _: KW_ONLY
    show: bool | None = None
    out: TextIO | None = None
    values: Sequence[str] | None = None
    line_interval: float = 30.0

    def __post_init__(self) -> None:
        check_number("line_interval", self.line_interval, least=0)
        self.values = check_names("values", self.values)
        self._unobserved = Unobserved("`values` of ProgressBar", self.values)
        self._display: _Bar | _Lines | None = None
        self._unit: Unit = "iteration"
        self._start = (0, 0.0)
        self._next = 0.0
        self._seen: dict[str, Observed] = {}

    def initialize(self, trainer: Trainer) -> None:
        """Create the display at the current position of the run."""
        out = self.out or sys.stderr
        limit = trainer.until.limit
        total, self._unit = limit or (None, "iteration")
        # The speed is that since the run started or resumed, and not that of an earlier process.
        self._start = (trainer.updater.iteration, time.perf_counter())
        self._seen = {}
        self._next = 0.0
        if self.show is False or not trainer.is_main:
            return
        initial = 0.0 if total is None else min(position(trainer, self._unit), total)
        widget = self.out is None and in_notebook()
        if self.show or widget or out.isatty():
            self._display = _Bar(total, initial, out, self._text(trainer, 0.0), widget=widget)
        else:
            self._display = _Lines(total, initial, out)
            self._next = time.perf_counter() + self.line_interval

    def __call__(self, trainer: Trainer) -> None:
        """Draw again, unless the last drawing is too recent."""
        if trainer.updater.is_new_epoch:
            self._unobserved.check(trainer, trainer.observation)
        if self._display is None:
            return
        observed = trainer.observation
        self._seen |= {name: observed[name] for name in self.values or () if name in observed}
        now = time.perf_counter()
        if now >= self._next:
            self._draw(self._display, trainer)
            self._next = now + (REDRAW_INTERVAL if isinstance(self._display, _Bar) else self.line_interval)

    def finalize(self, trainer: Trainer) -> None:
        """Draw the last position, and end the display."""
        self._unobserved.check(trainer, trainer.observation, at_end=True)
        display, self._display = self._display, None
        if display is not None:
            self._draw(display, trainer)
            display.close()

    def _draw(self, display: _Bar | _Lines, trainer: Trainer) -> None:
        """Show the position and the text."""
        iteration, start = self._start
        speed = (trainer.updater.iteration - iteration) / max(time.perf_counter() - start, 1e-9)
        display.draw(position(trainer, self._unit), self._text(trainer, speed))

    def _text(self, trainer: Trainer, speed: float) -> str:
        """Return the text next to the bar."""
        updater, values = trainer.updater, self._seen
        if self.values is None:
            observed = trainer.observation.items()
            values = {name: each for name, each in observed if name.startswith("main/") and name.endswith("/loss")}
        shown = "".join(f"{name} {float(as_mean(value)):.4g}, " for name, value in values.items())
        return f"epoch {updater.epoch_detail:.2f}, iteration {updater.iteration}, {shown}{speed:.1f} updates/s"


class _Bar:
    """A bar of tqdm: text on a terminal, or a widget in a notebook.

    Args:
        total: The bound, or None.
        initial: The position at the start.
        out: The stream to draw to.
        text: The text next to the bar.
        widget: Whether to draw a widget.
    """

    def __init__(self, total: float | None, initial: float, out: TextIO, text: str, *, widget: bool) -> None:
        # Imported where it is needed, because it imports asyncio, and looks for widgets.
        kind = import_module("tqdm.auto").tqdm if widget else tqdm
        # Without the monitor thread of tqdm, which would outlive the run.
        self._bar = type("Bar", (kind,), {"monitor_interval": 0})(
            total=total,
            initial=initial,
            file=out,
            bar_format=FORMAT_WITHOUT_BOUND if total is None else FORMAT_WITH_BOUND,
            dynamic_ncols=True,
            desc=text,
        )

    def draw(self, current: float, text: str) -> None:
        """Draw the bar again.

        Args:
            current: The position.
            text: The text next to the bar.
        """
        # If an epoch is not a whole number of updates, the last update goes slightly beyond the bound.
        self._bar.n = current if self._bar.total is None else min(current, self._bar.total)
        self._bar.set_description_str(text, refresh=False)
        self._bar.refresh()

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()


class _Lines:
    """Lines of text, for files and pipes.

    Args:
        total: The bound, or None.
        initial: The position at the start.
        out: The stream to write to.
    """

    def __init__(self, total: float | None, initial: float, out: TextIO) -> None:
        self._total, self._initial, self._out = total, initial, out
        self._start = time.perf_counter()
        self._last: float | None = None

    def draw(self, current: float, text: str) -> None:
        """Write a line, which can be read at once.

        Args:
            current: The position.
            text: The text of the line.
        """
        # At the end of the run, the last position may have its line already.
        if current == self._last:
            return
        self._last = current
        line = tqdm.format_meter(
            current if self._total is None else min(current, self._total),
            self._total,
            time.perf_counter() - self._start,
            prefix=text,
            initial=self._initial,
            bar_format=FORMAT_WITHOUT_BOUND if self._total is None else LINE_WITH_BOUND,
        )
        print(line, file=self._out, flush=True)

    def close(self) -> None:
        """Close the display. Every line has been written already."""
