"""Keep what was observed: one line of JSON for each interval."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from lockstep.metrics import Average
from lockstep.state import check_keys
from lockstep.trainer import Extension, Trainer
from lockstep.triggers import TriggerSpec

LogEntry: TypeAlias = dict[str, float]

COUNTERS = ("epoch", "iteration", "epoch_detail", "elapsed_time")
"""What every entry begins with."""


class LogReport(Extension):
    """Averages what is observed over an interval and writes it as one line of ``log.jsonl``.

    An entry holds ``epoch``, ``iteration``, ``epoch_detail`` and ``elapsed_time``, and the mean of
    each value observed since the last entry: sums over summed weights, so samples count equally
    however unequal the updates were. Numbers that are not finite are written as the strings
    ``"nan"``, ``"inf"`` and ``"-inf"``.

    A line is written in one piece. A run that begins or is resumed first rewrites the file from
    the entries it has in memory, so lines that a killed process wrote after the saved state, or
    half wrote, are gone; and a fresh run in the folder of an old one begins a fresh log. Of several
    processes each has the log, and rank 0 writes the file.

    Args:
        keys: The names to keep; all unless given.
        trigger: When an interval ends.
        filename: The file, below the trainer's folder.
        last: Names of values of which an entry holds the last one of the interval instead of the mean, such
            as a learning rate. A name stands for itself and for every name that ends with ``"/"`` and it.

    Determinism: the means depend on the values alone (see `metrics.Average`); ``elapsed_time`` is a clock's.
    """

    def __init__(
        self,
        keys: Sequence[str] | None = None,
        trigger: TriggerSpec = (1, "epoch"),
        filename: str = "log.jsonl",
        *,
        last: Sequence[str] = ("lr",),
    ) -> None:
        self.keys = None if keys is None else tuple(keys)
        self.trigger = trigger
        self.filename = filename
        self.last = tuple(last)
        self._log: list[LogEntry] = []
        self._averages: dict[str, Average] = {}

    @property
    def log(self) -> list[LogEntry]:
        """All entries so far, those before a resume included, in a new list."""
        return list(self._log)

    @property
    def num_entries(self) -> int:
        """How many entries there are."""
        return len(self._log)

    def collect(self, trainer: Trainer) -> None:
        """Take the observation of one update in; nothing is read from the device."""
        for name, value in trainer.observation.items():
            if self.keys is not None and name not in self.keys:
                continue
            if name.endswith(tuple(f"/{last}" for last in self.last)) or name in self.last:
                self._averages[name] = Average()
            self._averages.setdefault(name, Average()).update(value)

    def __call__(self, trainer: Trainer) -> None:
        """End the interval: read the means and write a line."""
        entry: LogEntry = {
            "epoch": trainer.updater.epoch,
            "iteration": trainer.updater.iteration,
            "epoch_detail": trainer.updater.epoch_detail,
            "elapsed_time": trainer.elapsed_time,
        }
        entry.update({name: average.compute() for name, average in self._averages.items()})
        if trainer.is_main:
            # Unbuffered: the line leaves in one call, and a killed process leaves it whole or not at all.
            with (trainer.out / self.filename).open("ab", buffering=0) as file:
                file.write(_line(entry))
        self._log.append(entry)
        self._averages.clear()

    def initialize(self, trainer: Trainer) -> None:
        """Rewrite the file from the entries in memory."""
        if not trainer.is_main:
            return
        path = trainer.out / self.filename
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = Path(f"{path}.new")
        whole.write_bytes(b"".join(map(_line, self._log)))
        whole.replace(path)

    def state_dict(self) -> dict[str, object]:
        """Return the entries so far and the values of the interval under way."""
        averages = {name: average.state_dict() for name, average in self._averages.items()}
        return {"log": [dict(entry) for entry in self._log], "averages": averages}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        check_keys(state, ("log", "averages"), of="LogReport")
        averages = {name: Average() for name in state["averages"]}
        for name, average in averages.items():
            average.load_state_dict(state["averages"][name])
        self._averages = averages
        self._log = [dict(entry) for entry in state["log"]]


def find_log(trainer: Trainer, name: str, *, reader: Extension) -> LogReport:
    """Return the log that another extension reads.

    Raises:
        TypeError: No `LogReport` was hung in under this name.
    """
    try:
        extension = trainer.get_extension(name)
    except KeyError:
        extension = reader
    if not isinstance(extension, LogReport):
        rule = f"must name a LogReport that {reader.name} can read"
        raise TypeError(f"`log_report` {rule}, got {name!r}. Call `trainer.extend(LogReport())`, too.")
    return extension


def _line(entry: LogEntry) -> bytes:
    finite = {key: value if math.isfinite(value) else str(value) for key, value in entry.items()}
    return json.dumps(finite, allow_nan=False).encode() + b"\n"
