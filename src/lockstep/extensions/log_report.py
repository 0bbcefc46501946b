"""Log the observed values, one line of JSON per interval."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

from lockstep.extensions.loggers import replace_file
from lockstep.metrics import IntervalMeans
from lockstep.state import check_keys
from lockstep.trainer import Extension, Trainer
from lockstep.triggers import TriggerSpec

LogEntry: TypeAlias = dict[str, float]

_JSON: Final = json.JSONEncoder(allow_nan=False)

COUNTER_KEYS = ("epoch", "iteration", "epoch_detail", "elapsed_time")
"""The keys at the start of every entry."""


class LogReport(Extension):
    """Averages the observed values over an interval, and writes the means as one line of ``log.jsonl``.

    An entry contains ``epoch``, ``iteration``, ``epoch_detail`` and ``elapsed_time``, and the mean of each value
    observed since the last entry: sums divided by summed weights, so that samples count equally even if updates had
    different sizes. Numbers that are not finite are written as the strings ``"nan"``, ``"inf"`` and ``"-inf"``.

    A line is written in one call. When a run starts or resumes, it first rewrites the file from the entries in
    memory, which removes lines, complete or not, that a killed process wrote after the saved state; a new run in
    the folder of an old one starts a new log. With several processes, each process has the log in memory, and
    rank 0 writes the file.

    Args:
        keys: The names to log; by default all.
        trigger: The trigger that ends an interval.
        filename: The file name, relative to the trainer's folder.
        sums: The names of values for which an entry holds the sum over the interval instead of the mean, such as
            ``"skipped"``, the number of updates that were skipped because their gradient was not finite. The other
            values of such an update do not count in the means.
        last: The names of values for which an entry holds the last one of the interval instead of the mean, such as
            learning rates. Here and in `sums`, a name also stands for every name that ends with ``"/"`` and that name.

    Raises:
        NonFiniteError: At the end of an interval, if `max_skipped` updates in a row were skipped and only a device
            knew.

    Determinism: the means depend only on the values (see `metrics.Average`); ``elapsed_time`` is read from a clock.
    """

    def __init__(
        self,
        keys: Sequence[str] | None = None,
        trigger: TriggerSpec = (1, "epoch"),
        filename: str = "log.jsonl",
        *,
        last: Sequence[str] = ("lr",),
        sums: Sequence[str] = ("skipped",),
    ) -> None:
        self.keys = None if keys is None else tuple(keys)
        self.trigger = trigger
        self.filename = filename
        self.last = tuple(last)
        self.sums = tuple(sums)
        self._log: list[LogEntry] = []
        self._means = IntervalMeans(last=last, sums=sums)

    @property
    def log(self) -> list[LogEntry]:
        """All entries so far, including those before the run was resumed, in a new list."""
        return list(self._log)

    @property
    def num_entries(self) -> int:
        """The number of entries."""
        return len(self._log)

    def collect(self, trainer: Trainer) -> None:
        """Add the observation of one update to the averages; nothing is read from the device."""
        self._means.update(trainer.observation, self.keys)

    def __call__(self, trainer: Trainer) -> None:
        """End the interval: compute the means and write a line."""
        # Before anything is written: if this ends the run and you continue it, the entry is made then.
        trainer.updater.last_skipped()
        entry: LogEntry = {
            "epoch": trainer.updater.epoch,
            "iteration": trainer.updater.iteration,
            "epoch_detail": trainer.updater.epoch_detail,
            "elapsed_time": trainer.elapsed_time,
        }
        entry.update(self._means.compute())
        if trainer.is_main:
            # Unbuffered, so that the line is written in one call: a killed process leaves it complete or not at all.
            with (trainer.out / self.filename).open("ab", buffering=0) as file:
                file.write(_line(entry))
        self._log.append(entry)
        self._means.clear()

    def initialize(self, trainer: Trainer) -> None:
        """Rewrite the file from the entries in memory."""
        if not trainer.is_main:
            return
        path = trainer.out / self.filename
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, b"".join(map(_line, self._log)))

    def state_dict(self) -> dict[str, object]:
        """Return the entries so far, and the averages of the current interval."""
        return {"log": [dict(entry) for entry in self._log], "averages": self._means.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state."""
        check_keys(state, ("log", "averages"), of="LogReport")
        # First, because it can fail: an error must change nothing.
        self._means.load_state_dict(state["averages"])
        self._log = [dict(entry) for entry in state["log"]]


def find_log(trainer: Trainer, name: str, *, reader: Extension) -> LogReport:
    """Return the log that another extension reads.

    Args:
        trainer: The trainer of both extensions.
        name: The name of the `LogReport`.
        reader: The extension that reads the log.

    Raises:
        TypeError: If no `LogReport` was added under this name.
    """
    try:
        extension = trainer.get_extension(name)
    except KeyError:
        extension = reader
    if not isinstance(extension, LogReport):
        rule = f"must name a LogReport that {reader.name} can read"
        raise TypeError(f"`log_report` {rule}, got {name!r}. Call `trainer.extend(LogReport())` as well.")
    return extension


def _line(entry: LogEntry) -> bytes:
    """Return an entry as a line of JSON."""
    # JSON has no NaN and no infinities, and other readers reject those that Python writes.
    finite = {key: value if math.isfinite(value) else str(value) for key, value in entry.items()}
    return _JSON.encode(finite).encode() + b"\n"
