"""Gather what a run has left in its folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from lockstep import snapshots
from lockstep.html_report.log import Log, read_log
from lockstep.side_files import SideFile
from lockstep.snapshots import Found, Manifest

LOG: Final = "log.jsonl"
RECORD: Final = "run.jsonl"


@dataclass(frozen=True)
class RecordedInterval:
    """What `RunRecord` has recorded of some updates.

    Attributes:
        update: The last of them.
        loss_scale: The loss scale after them.
        retries: The number of attempts after the first of an update.
        measured: The number of updates that were measured.
        seconds: The seconds that these took by phase, for each rank.
        devices: The seconds that these took by phase, for each device of each rank.
    """

    update: int
    loss_scale: float
    retries: int
    measured: int
    seconds: list[dict[str, float]]
    devices: list[list[dict[str, float]]]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> RecordedInterval:
        """Return the interval in a line of the record."""
        return cls(
            int(values["update"]),
            float(values["loss_scale"]),
            int(values["retries"]),
            int(values["measured"]),
            [_seconds(rank["seconds"]) for rank in values["ranks"]],
            [[_seconds(device) for device in rank["devices"]] for rank in values["ranks"]],
        )


@dataclass(frozen=True)
class Session:
    """A run from a start or resume to the next, as `RunRecord` has recorded it.

    Attributes:
        update: The update that it began after.
        time: When it began.
        versions: The versions of lockstep, torch and Python.
        resumed_from: The snapshot that it resumed from; empty if it did not.
        ranks: The host and the devices of each rank.
        recipe: The recipe by field, as it was last recorded.
        kernel_class: The properties of the kernels.
        intervals: Its intervals.
        end: How it ended; empty if it was killed or has not ended.
    """

    update: int
    time: str
    versions: str
    resumed_from: str
    ranks: list[tuple[str, list[str]]]
    recipe: dict[str, Any]
    kernel_class: dict[str, Any]
    intervals: list[RecordedInterval] = field(default_factory=list)
    end: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Session:
        """Return the session in a line of the record."""
        return cls(
            int(values["update"]),
            str(values["time"]),
            f"lockstep {values['lockstep']}, torch {values['torch']}, Python {values['python']}",
            str(values["resumed_from"] or ""),
            [(str(rank["host"]), list(map(str, rank["devices"]))) for rank in values["ranks"]],
            dict(values["recipe"]),
            dict(values["kernel_class"]),
        )


@dataclass(frozen=True)
class RunData:
    """What a run has left in its folder.

    Attributes:
        path: The folder.
        name: What the page calls the run.
        log: The log; None if there is none.
        sessions: What `RunRecord` has recorded; empty without it.
        digests: The digests of the training state by update.
        snapshots: The snapshots, in ascending order of updates.
    """

    path: Path
    name: str
    log: Log | None
    sessions: list[Session]
    digests: dict[int, str]
    snapshots: list[Found]

    @property
    def recipe(self) -> dict[str, Any]:
        """The recipe by field: that which was recorded last, or that of the newest snapshot; empty if unknown."""
        if self.sessions:
            return self.sessions[-1].recipe
        # As JSON, in which the recorder has written it, lists stand for tuples.
        newest = self._newest
        return {} if newest is None else dict(json.loads(json.dumps(newest.recipe, default=str)))

    @property
    def kernel_class(self) -> dict[str, Any]:
        """The properties of the kernels: those that were recorded last; empty if unknown."""
        if self.sessions:
            return self.sessions[-1].kernel_class
        return {} if self._newest is None else dict(self._newest.kernel_class)

    @property
    def _newest(self) -> Manifest | None:
        manifests = [found.manifest for found in self.snapshots if found.manifest is not None]
        return manifests[-1] if manifests else None

    @property
    def final_intervals(self) -> list[RecordedInterval]:
        """The intervals without those that a later session has repeated."""
        found: list[RecordedInterval] = []
        for session in self.sessions:
            found = [interval for interval in found if interval.update <= session.update] + session.intervals
        return found

    def is_empty(self) -> bool:
        """Return whether the folder has nothing of a run."""
        return self.log is None and not (self.sessions or self.digests or self.snapshots)


def read_run(path: Path, *, log: str = LOG) -> RunData:
    """Read the files of a run. No tensor is read.

    Args:
        path: The folder of the run.
        log: The name of its log.

    Raises:
        SideFileError: If a file cannot be read, or is no regular file, or if the log of digests is damaged.
    """
    found = snapshots.list(path)
    manifests = [each.manifest for each in found if each.manifest is not None]
    logged = {update: record.digest for update, record in snapshots.read_digest_log(path).items()}
    digests = dict(sorted({**{each.update: each.training for each in manifests}, **logged}.items()))
    return RunData(path, path.resolve().name, read_log(path / log), _read_record(path / RECORD), digests, found)


def _read_record(path: Path) -> list[Session]:
    """Read what `RunRecord` has written; lines that are not its, or were cut, are left out."""
    sessions: list[Session] = []

    def take(line: Mapping[str, Any]) -> None:
        ((kind, values),) = line.items()
        if kind == "session":
            sessions.append(Session.of(values))
        elif sessions and kind == "interval":
            sessions[-1].intervals.append(RecordedInterval.of(values))
        elif sessions and kind == "end":
            sessions[-1].end.update(values)
            sessions[-1].recipe.update(values.get("recipe", {}))

    SideFile(path.parent, path.name).read_lines(take, strict=False)
    return sessions


def _seconds(values: Mapping[str, Any]) -> dict[str, float]:
    return {str(name): float(value) for name, value in values.items()}
