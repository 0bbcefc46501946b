"""Read the log of a run, one JSON object per line, into one series per value."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from lockstep.side_files import SideFile

COUNTERS: Final = ("iteration", "epoch", "epoch_detail", "elapsed_time")
"""The values of an entry that tell its position, see `LogReport`."""
TIMES: Final = ("throughput/",)
"""The beginnings of names of values that differ between equal runs."""
DIGITS: Final = 9
"""The significant digits of the values on a page. All digits are in the log."""


class Point(NamedTuple):
    """A value at an update."""

    update: float
    value: float


@dataclass(frozen=True)
class Series:
    """The values of one name, in ascending order of updates.

    Attributes:
        updates: The update of each value.
        values: The values, which need not be finite.
    """

    updates: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def append(self, update: float, value: float) -> None:
        """Add a value of a later update."""
        self.updates.append(update)
        self.values.append(value)

    def cut(self, update: float) -> None:
        """Remove the values from an update on."""
        first = bisect_left(self.updates, update)
        del self.updates[first:], self.values[first:]

    def points(self) -> Iterator[Point]:
        """Yield all values."""
        return map(Point, self.updates, self.values)


@dataclass(frozen=True)
class Log:
    """The log of a run.

    Attributes:
        series: The values by name.
        epochs: The epoch, with its fraction, over updates.
        times: The elapsed time in seconds over updates.
        num_entries: The number of entries.
        unreadable: The number of lines that are no entries, such as one that was cut when a process was killed.
    """

    series: dict[str, Series]
    epochs: Series
    times: Series
    num_entries: int
    unreadable: int


def read_log(path: Path) -> Log | None:
    """Read a log that `LogReport` has written.

    Args:
        path: The file.

    Returns:
        The log; None if there is no such file.

    Raises:
        SideFileError: If the file cannot be read, or is no regular file.
    """
    series: dict[str, Series] = {}
    epochs, times = Series(), Series()
    num_entries = 0

    def take(entry: Mapping[str, Any]) -> None:
        nonlocal num_entries
        update = float(int(entry["iteration"]))
        values = {name: float(value) for name, value in entry.items() if name not in COUNTERS}
        epoch, elapsed = float(entry.get("epoch_detail", "nan")), float(entry.get("elapsed_time", "nan"))
        num_entries += 1
        if epochs.updates and update <= epochs.updates[-1]:
            # What a log repeats replaces what it had.
            for each in (epochs, times, *series.values()):
                each.cut(update)
        epochs.append(update, epoch)
        times.append(update, elapsed)
        for name, value in values.items():
            series.setdefault(name, Series()).append(update, value)

    unreadable = SideFile(path.parent, path.name).read_lines(take, strict=False)
    if unreadable is None:
        return None
    # A repetition may lack a name, of which nothing is left then.
    series = {name: each for name, each in series.items() if each.updates}
    return Log(series, epochs, times, num_entries, unreadable)


def first_difference(one: Log, other: Log) -> tuple[float, list[str]] | None:
    """Return the first update at which two logs differ, and the names that differ there; None if they are equal.

    Only updates and names that both logs have are compared, and no rates or times.
    """
    found = {
        name: update
        for name in one.series.keys() & other.series.keys()
        if not name.startswith(TIMES)
        and (update := _first_difference(one.series[name], other.series[name])) is not None
    }
    first = min(found.values(), default=None)
    return None if first is None else (first, sorted(name for name, update in found.items() if update == first))


def _first_difference(one: Series, other: Series) -> float | None:
    # The text tells NaN from numbers, and equals itself.
    values = {update: repr(value) for update, value in other.points()}
    return next((update for update, value in one.points() if values.get(update, repr(value)) != repr(value)), None)


def thin(series: Series, bins: int) -> list[Point]:
    """Return the smallest and the largest value of each of several bins of updates; all values if there are few.

    Of the values of a bin that are not finite, the first of each kind is returned as well.

    Args:
        series: The values.
        bins: The number of bins, at least 1.

    >>> wave = Series(array("d", range(8)), array("d", [0, 5, 1, 2, 3, 9, 4, 4]))
    >>> [int(point.value) for point in thin(wave, 2)]
    [0, 5, 3, 9, 4]
    """
    if len(series.updates) <= 2 * bins:
        return list(series.points())
    first, last = series.updates[0], series.updates[-1]
    width = (last - first) / bins
    kept = {0, len(series.updates) - 1}
    start = 0
    for bin_ in range(1, bins + 1):
        end = len(series.updates) if bin_ == bins else bisect_left(series.updates, first + bin_ * width, start)
        kept.update(_extremes(series.values[start:end], start))
        start = end
    return [Point(series.updates[index], series.values[index]) for index in sorted(kept)]


def _extremes(values: Sequence[float], start: int) -> Iterator[int]:
    """Yield the positions of the smallest and the largest finite value, and of the first NaN and infinities."""
    finite = [(value, index) for index, value in enumerate(values, start) if value - value == 0]
    if finite:
        yield min(finite)[1]
        yield max(finite)[1]
    if len(finite) < len(values):
        others = [(repr(value), index) for index, value in enumerate(values, start) if value - value != 0]
        yield from dict(reversed(others)).values()


def as_json(points: Sequence[Point]) -> dict[str, list[Any]]:
    """Return points for a page. JSON has no NaN and no infinities, which are written as text.

    >>> as_json([Point(1, 0.5), Point(2, float("nan"))])
    {'x': [1, 2], 'y': [0.5, 'nan']}
    """
    return {
        "x": [int(point.update) if point.update == int(point.update) else point.update for point in points],
        "y": [float(f"{each:.{DIGITS}g}") if each - each == 0 else str(each) for _, each in points],
    }
