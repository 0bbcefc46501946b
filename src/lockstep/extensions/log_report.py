"""Log the observed values, one line of JSON per interval."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from lockstep.arguments import check_bool
from lockstep.errors import SideFileWarning, warn
from lockstep.extensions.unobserved import Unobserved, check_names
from lockstep.metrics import IntervalMeans
from lockstep.side_files import SideFile, kind_of
from lockstep.snapshots import first_rank_in_folder
from lockstep.state import check_keys
from lockstep.trainer import Extension, Trainer
from lockstep.triggers import TriggerSpec

LogEntry: TypeAlias = dict[str, float]

COUNTER_KEYS = ("epoch", "iteration", "epoch_detail", "elapsed_time")
"""The keys at the start of every entry."""


@dataclass(eq=False, repr=False)
class LogReport(Extension):
    """Averages the observed values over an interval, and writes the means as one line of ``log.jsonl``.

    An entry contains ``epoch``, ``iteration``, ``epoch_detail`` and ``elapsed_time``, and the mean of each value
    observed since the last entry: sums divided by summed weights, so that samples count equally even if updates had
    different sizes. Numbers that are not finite are written as the strings ``"nan"``, ``"inf"`` and ``"-inf"``.

    The log is not part of a snapshot; its position is, with the last entry. A run that resumes keeps the file up to
    there, and removes lines, complete or not, that a killed process wrote later. If it resumes in another folder, it
    copies them. A `SideFileWarning` names a log that is absent or too short, and the log begins with what there is. A
    new run in the folder of an old one warns, and starts a new log with its first entry. With several processes, each
    process has the log in memory, and the first rank of each folder writes the file.

    If a line cannot be written, a `SideFileWarning` says so, and it is written with a later one.

    Args:
        keys: The names to log; by default all.
        trigger: The trigger that ends an interval.
        filename: The file name, relative to the trainer's folder.
        sums: The names of values for which an entry holds the sum over the interval instead of the mean, such as
            ``"skipped"``, the number of updates that were skipped because their gradient was not finite. The other
            values of such an update do not count in the means.
        last: The names of values for which an entry holds the last one of the interval instead of the mean, such as
            learning rates. Here and in `sums`, a name also stands for every name that ends with ``"/"`` and that name.
        required: Whether a line that cannot be written ends the run by a `SideFileError`.

    Attributes:
        num_entries: The number of entries so far.

    Raises:
        NonFiniteError: At the end of an interval, if `max_skipped` updates in a row were skipped and only a device
            knew.
        SideFileError: At the start of a run, if the file is damaged or no regular file.
        ValueError: At the start of a run, if another `LogReport` of the trainer writes the same file.

    Determinism: the means depend only on the values (see `metrics.Average`); ``elapsed_time`` is read from a clock.
    """

    acts_together = True

    keys: Sequence[str] | None = None
    trigger: TriggerSpec = (1, "epoch")
    filename: str = "log.jsonl"
    _: KW_ONLY
    last: Sequence[str] = ("lr",)
    sums: Sequence[str] = ("skipped",)
    required: bool = False

    def __post_init__(self) -> None:
        self.keys = check_names("keys", self.keys)
        self.last = check_names("last", self.last) or ()
        self.sums = check_names("sums", self.sums) or ()
        check_bool("required", self.required)
        self._file = SideFile(Path(), self.filename, required=self.required)
        self._writes = self._loaded = False
        self.num_entries = 0
        self._last: LogEntry = {}
        # Of the lines of a log that is resumed, none is parsed before something asks for the entries.
        self._entries: list[LogEntry] = []
        # What a saved state says of the lines, until they are read.
        self._awaited: Mapping[str, Any] | None = None
        self._means = IntervalMeans(last=self.last, sums=self.sums)
        self._unobserved = Unobserved("`keys` of LogReport", self.keys)

    @property
    def log(self) -> list[LogEntry]:
        """All entries so far, including those before the run was resumed, in a new list."""
        if len(self._entries) < self.num_entries:
            self._entries = [_entry(json.loads(line)) for line in self._file.content.splitlines()]
        return list(self._entries)

    def collect(self, trainer: Trainer) -> None:
        """Add the observation of one update to the averages; nothing is read from the device."""
        self._means.update(trainer.observation, self.keys)

    def __call__(self, trainer: Trainer) -> None:
        """End the interval: compute the means and write a line."""
        # Before anything is written: if this ends the run and you continue it, the entry is made then.
        trainer.updater.last_skipped()
        self._unobserved.check(trainer, trainer.observation)
        entry: LogEntry = {
            "epoch": trainer.updater.epoch,
            "iteration": trainer.updater.iteration,
            "epoch_detail": trainer.updater.epoch_detail,
            "elapsed_time": trainer.elapsed_time,
        }
        entry.update(self._means.compute())
        line = _line(entry)
        (self._file.append if self._writes else self._file.add)(line)
        if len(self._entries) == self.num_entries:
            self._entries.append(entry)
        self.num_entries, self._last = self.num_entries + 1, entry
        self._means.clear()

    def prepare(self, trainer: Trainer) -> None:
        """Read the lines of a saved state. Every rank must call this."""
        if self._awaited is not None:
            self._begin(_read(trainer, self.filename, self._awaited))
            self._awaited = None

    def initialize(self, trainer: Trainer) -> None:
        """Check the file. Nothing is written before the first entry, because the start may still be refused."""
        communicator = trainer.updater.communicator
        if first_rank_in_folder(communicator, trainer.out)[communicator.rank] == communicator.rank:
            names = {name: each.filename for name, each in trainer.extensions.items() if isinstance(each, LogReport)}
            if [*names.values()].count(self.filename) > 1:
                raise ValueError(
                    f"`filename` must be different for each LogReport, got {self.filename!r} for {', '.join(names)}. "
                    "Leave one out, or pass filename=."
                )
            self._file.folder = trainer.out
            self._file.check()
            self._writes = True

    def begin(self, trainer: Trainer) -> None:  # noqa: ARG002 - the interface
        """Warn of the log of another run, which the first entry will replace."""
        path = self._file.path
        if self._writes and not (self._loaded or self.num_entries) and kind_of(path) and path.stat().st_size:
            message = f"{path} is the log of another run, which the first entry of this one replaces. To keep it, pass"
            warn(f"{message} another `out` to the Trainer.", SideFileWarning)

    def finalize(self, trainer: Trainer) -> None:
        """Write what could not be written before."""
        known = {name for entry in (self.log if self.keys else []) for name in entry}
        self._unobserved.check(trainer, known | trainer.observation.keys(), at_end=True)
        if self._writes:
            self._writes = False
            self._file.close()

    def state_dict(self) -> dict[str, object]:
        """Return where the log is, its last entry, and the averages of the current interval."""
        # A run that resumes from this state reads the entries from the file.
        if self._writes:
            self._file.write(durable=True)
        # The last one, because a rank that survives may save a state whose last entry rank 0 did not write any more.
        return {**(self._awaited or self._where), "averages": self._means.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state, also one of an earlier version, which has all entries or no position."""
        content, saved = self._file.content, None
        if "log" in state:
            check_keys(state, ("log", "averages"), of="LogReport")
            content = b"".join(_line(dict(entry)) for entry in state["log"])
        else:
            given = {"position": None, **state}
            check_keys(given, (*self._where, "averages"), of="LogReport")
            position = None if given["position"] is None else (int(given["position"][0]), str(given["position"][1]))
            saved = {"entries": int(given["entries"]), "last": dict(given["last"]), "position": position}
        # First, because it can fail: an error must change nothing.
        self._means.load_state_dict(state["averages"])
        if saved is None:
            self._begin(content)
        self._awaited, self._loaded = None if saved == self._where else saved, True

    @property
    def _where(self) -> dict[str, Any]:
        """The number of entries and the last one, and the position of the file."""
        return {"entries": self.num_entries, "last": self._last, "position": self._file.position}

    def _begin(self, content: bytes) -> None:
        """Begin with the lines of an earlier run."""
        self._file.begin(content)
        self.num_entries, self._entries = content.count(b"\n"), []
        self._last = _entry(json.loads(content.splitlines()[-1])) if content else {}


def find_log(trainer: Trainer, name: str, *, reader: Extension) -> LogReport:
    """Return the log that another extension reads.

    Args:
        trainer: The trainer of both extensions.
        name: The name of the `LogReport`.
        reader: The extension that reads the log.

    Raises:
        TypeError: If no `LogReport` was added under this name.
    """
    extension = trainer.extensions.get(name)
    if not isinstance(extension, LogReport):
        rule = f"must name a LogReport that {reader.name} can read"
        raise TypeError(f"`log_report` {rule}, got {name!r}. Call `trainer.extend(LogReport())` as well.")
    return extension


def _read(trainer: Trainer, filename: str, saved: Mapping[str, Any]) -> bytes:
    """Read the lines of a saved state from the file of the run that saved it. Every rank must call this."""
    source, communicator, count = trainer.resumption, trainer.updater.communicator, saved["entries"]
    file = SideFile(trainer.out if source is None or source.same_run else source.path.parent.parent, filename)
    kept = None if saved["position"] is None else file.read_until(saved["position"])
    if kept is None:
        kept = _parse(file, count, saved["last"])
    # Ranks may see other folders, of which one may be new.
    found = communicator.exchange_json(kept.count(b"\n"))
    owner = found.index(max(found))
    if found[owner] < count and trainer.is_main:
        state = f"has {found[0]} of them" if kind_of(file.path) else "is absent"
        rule = f"{file.path} must have the {count} entries of the log up to the saved state, but it {state}."
        warn(f"{rule} The log begins with what there is.", SideFileWarning)
    if found == found[:1] * communicator.size:
        return kept
    return communicator.exchange(kept if owner == communicator.rank else b"")[owner]


def _parse(file: SideFile, count: int, last: LogEntry) -> bytes:
    """Return the lines up to a saved state of a log that has changed since, or has other times than that state."""
    entries = list[LogEntry]()
    file.read_lines(lambda values: entries.append(_entry(values)))
    # What follows was logged after the state was saved.
    entries = [entry for entry in entries[:count] if entry["iteration"] <= last["iteration"]]
    if last and (not entries or entries[-1]["iteration"] < last["iteration"]):
        entries.append(last)
    return b"".join(map(_line, entries))


def _line(entry: LogEntry) -> bytes:
    """Return an entry as a line of JSON."""
    # JSON has no NaN and no infinities, and other readers reject those that Python writes.
    finite = {key: value if math.isfinite(value) else str(value) for key, value in entry.items()}
    return json.dumps(finite).encode() + b"\n"


def _entry(values: Any) -> LogEntry:
    """Return the entry of a line; raise a ValueError or TypeError for another kind of value."""
    for name, value in values.items():
        if type(value) not in {int, float} and value not in {"nan", "inf", "-inf"}:
            raise ValueError(f"{name!r} must be a number, got {value!r:.60}")
    if type(values["iteration"]) is not int:
        raise ValueError(f"'iteration' must be an integer, got {values['iteration']!r:.60}")
    return {name: float(value) if isinstance(value, str) else value for name, value in values.items()}
