"""Digests of the training state by update: log them, and compare them after a restart, over ranks and between two runs.

The file ``digests.jsonl`` has a header with the names of the tensors, and a line per logged update::

    {"conditions": "9f2c...", "tensors": ["models.main.0.weight", ...]}
    {"update": 1200, "digest": "54a945c5...", "tensors": "1f00c37b..."}

`digest` is that of a snapshot of the update. `tensors` has the first 8 hexadecimal digits of the SHA-256 of each of the
tensors. Two runs are compared by their logs and the manifests of their snapshots, without reading a tensor, and the
ranks of a run by what a thread has computed meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from lockstep.communicators import Communicator
from lockstep.digest import combine, entries
from lockstep.errors import DisagreementError, few, printable
from lockstep.side_files import SideFile
from lockstep.snapshots.content import Content, training_of
from lockstep.snapshots.snapshot import list_snapshots
from lockstep.snapshots.updater_state import compare_fields

FILENAME: Final = "digests.jsonl"
DIGITS: Final = 8
"""The hexadecimal digits by which a line represents a tensor. The digest represents all bits."""


class Record(NamedTuple):
    """The digests of one update.

    Attributes:
        update: The number of updates.
        digest: The digest of the training state.
        tensors: The first digits of the SHA-256 of each tensor, by name.
    """

    update: int
    digest: str
    tensors: Mapping[str, str]


def record_of(state: Content) -> Record:
    """Return the digests of the training state of a content or of a snapshot.

    Args:
        state: The content, whose tensors are read; or the manifest of a snapshot, which has their digests.
    """
    found = list(entries(training_of(state)))
    named = {".".join(map(str, entry.path[1:])): entry.about[2][:DIGITS] for entry in found if entry.kind == "tensor"}
    return Record(state.progress["update"], combine(found), dict(sorted(named.items())))


class DigestLog:
    """The digests of a run, in memory and in its file.

    Args:
        out: The folder of the run.
        conditions: A digest of the recipe and the kernels, on which the bits depend.
        resumed_at: The update from which the run continues; None if it starts anew, with a new log.
        required: Whether a record that cannot be written raises instead of warning.

    Nothing is written before the first record.

    Raises:
        SideFileError: If the file is damaged or no regular file.
    """

    def __init__(self, out: Path, *, conditions: str, resumed_at: int | None, required: bool = False) -> None:
        self._file = SideFile(out, FILENAME, required=required)
        self._conditions = conditions
        self._header: dict[str, Any] = {}
        self._file.check()
        found = [] if resumed_at is None else _read(self._file)
        # Under other conditions other bits are right.
        kept = [each for each in found if each[0] == conditions or each[1].update <= (resumed_at or 0)]
        self._records = {record.update: record for _, record in kept}
        self._file.begin(b"".join(self._lines(*each) for each in kept))

    def expect(self, records: Iterable[Record]) -> None:
        """Add records from elsewhere, such as snapshots written just before a kill, unless the log has them.

        Args:
            records: The records, made under the conditions of this run.
        """
        for each in records:
            if each.update not in self._records:
                self._records[each.update] = each
                self._file.add(self._lines(self._conditions, each))

    def record(self, record: Record) -> str | None:
        """Log an update, unless the log has it with the same digest.

        Args:
            record: The digests of the update.

        Returns:
            A message about the difference, if the log has the update with another digest.
        """
        before = self._records.get(record.update)
        if before is not None and before.digest == record.digest:
            return None
        self._records[record.update] = record
        self._file.append(self._lines(self._conditions, record))
        if before is None:
            return None
        # What follows a difference differs too, so that only the first one is reported.
        self._records = {update: each for update, each in self._records.items() if update <= record.update}
        return _difference(before, record)

    def close(self) -> None:
        """Write what could not be written before, durably."""
        self._file.close()

    def _lines(self, conditions: str, record: Record) -> bytes:
        """Return the line of a record, with a header before it if the last one does not fit."""
        before, self._header = self._header, {"conditions": conditions, "tensors": list(record.tensors)}
        line = {"update": record.update, "digest": record.digest, "tensors": "".join(record.tensors.values())}
        lines = [line] if before == self._header else [self._header, line]
        return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


def _difference(before: Record, again: Record) -> str:
    """Describe how the second result of an update differs from the first."""
    where = "every tensor is equal, but counters or options differ"
    if changes := compare_fields(before.tensors, again.tensors):
        first, named = changes[0], few([repr(each.name) for each in changes], 1)
        where = f"the tensor {named} differs (SHA-256 {first.saved}..., now {first.own}...)"
    return (
        f"Update {again.update} was repeated after a restart with another result: {where}. The hardware made an error, "
        "or the result depends on something that is neither saved nor seeded."
    )


def read_digest_log(out: Path) -> dict[int, Record]:
    """Read the digests of a run by update; of an update that is logged twice, the last one.

    Args:
        out: The folder of the run.

    Raises:
        SideFileError: If the log is damaged or cannot be read.
    """
    return {record.update: record for _, record in _read(SideFile(out, FILENAME))}


def _read(file: SideFile) -> list[tuple[str, Record]]:
    """Read the records of a file with their conditions."""
    found: list[tuple[str, Record]] = []
    header: tuple[str, list[str]] = ("", [])

    def take(values: dict[str, Any]) -> None:
        nonlocal header
        if "update" not in values:
            header = (str(values["conditions"]), list(map(str, values["tensors"])))
            return
        digits = values["tensors"]
        pieces = [digits[start : start + DIGITS] for start in range(0, len(digits), DIGITS)]
        record = Record(int(values["update"]), str(values["digest"]), dict(zip(header[1], pieces, strict=True)))
        found.append((header[0], record))

    file.read_lines(take)
    return found


REMEDY = (
    "The memory or the processor of a rank has made an error, or other code has written to the state on one rank. "
    "Snapshots that are not known to be equal on all ranks are renamed; resume from the one before."
)


class Agreement:
    """Compares the digests of the snapshots of a run over all ranks.

    No rank waits for a digest: they ask each other one update after a snapshot, then after two more, four more and
    so on, until all of them have computed it. After the next snapshot they begin to ask about as late as they ended.

    Args:
        communicator: The communicator of the run.
        verified: Called with each snapshot of which all ranks have the same bits, and the number of ranks.
    """

    def __init__(self, communicator: Communicator, verified: Callable[[Record, int], object]) -> None:
        self._communicator, self._verified = communicator, verified
        self._records: dict[int, Record] = {}
        self._open: int | None = None
        # In updates: until they ask again, between the last time and the next, since the snapshot, and what that took.
        self._left = self._pause = self._passed = 0
        self._took = 1

    def open(self, update: int) -> None:
        """Begin to ask for a snapshot, which all ranks have copied after the same update."""
        if self._communicator.size == 1:
            return
        if self._open is None:
            # One less each time, because digests that were late once need not be so again.
            self._took = self._left = max(1, self._took - 1)
            self._pause, self._passed = 1, 0
        self._open = update

    def add(self, record: Record) -> None:
        """Add the digests of a snapshot that this rank has computed. A single rank compares none, and keeps none."""
        if self._communicator.size > 1:
            self._records[record.update] = record

    def compare(self, *, now: bool = False) -> None:
        """Compare what all ranks have computed. Every rank must call this after every update.

        Args:
            now: Whether to ask in any case, because the run ends.

        Raises:
            DisagreementError: On every rank, if they differ. It names the rank, the tensor and the update.
            PeerError: If another rank has failed.
        """
        self._left -= 1
        self._passed += 1
        if self._open is None or (self._left > 0 and not now):
            return
        self._pause = self._left = 2 * self._pause
        own = {update: record.digest for update, record in self._records.items()}
        found = self._communicator.exchange_json(own)
        # All ranks read the same messages, so all of them act alike.
        for update in sorted(map(int, set.intersection(*map(set, found)))):
            record = self._records[update]
            if len({each[str(update)] for each in found}) > 1:
                raise self._disagreement(record)
            self._verified(record, self._communicator.size)
            self._records = {number: each for number, each in self._records.items() if number > update}
            # Where a newer one is asked for already, they go on as often as before.
            self._pause = self._left = 1
            if update == self._open:
                self._open, self._took = None, self._passed

    def _disagreement(self, record: Record) -> DisagreementError:
        """Find out which rank and which tensor differ. Every rank must call this."""
        values = {**record.tensors, "a counter, an option or a position": record.digest}
        found = self._communicator.exchange_json(values)
        rank = next(rank for rank, each in enumerate(found) if each != found[0])
        name = compare_fields(found[rank], found[0])[0].name
        return DisagreementError(
            f"Rank {rank} must have rank 0's state after update {record.update}, but it has other bits in {name}. "
            f"{REMEDY}",
            rank=rank,
            subject=name,
            update=record.update,
        )


@dataclass(frozen=True)
class Comparison:
    """The comparison of two runs.

    Attributes:
        common: The updates that both runs have logged, ascending.
        equal: The last update up to which all digests are equal; None if there is none.
        first: The first update that differs; None if all are equal.
        differing: The tensors that differ after this update. Empty if only counters or options do.
        recipe: The fields of the recipe that differ, if both runs have snapshots.
        kernel_class: The properties of the kernels that differ, if both runs have snapshots.
    """

    common: tuple[int, ...]
    equal: int | None
    first: int | None
    differing: tuple[str, ...]
    recipe: tuple[str, ...]
    kernel_class: tuple[str, ...]

    def result(self, limit: int = 10) -> str:
        """Return a line about the digests of two runs that have any in common, and one about the tensors.

        Args:
            limit: The number of tensors that are named.
        """
        count = f"{len(self.common)} updates that both runs have logged"
        if self.first is None:
            return f"Equal: all {count}, {self.common[0]} to {self.common[-1]}."
        since = "" if self.equal is None else f" Update {self.equal} is equal."
        differing = self.listed(self.differing, limit) or "none; counters, options or positions differ"
        return f"Different: update {self.first} is the first to differ, of {count}.{since}\nTensors: {differing}."

    @staticmethod
    def listed(names: Sequence[str], limit: int = 10) -> str:
        """Return names for a sentence, and how many more there are.

        Args:
            names: The names.
            limit: The number of names that are named.

        >>> Comparison.listed(["a", "b", "c"], 2), Comparison.listed([])
        ('a, b and 1 more', '')
        """
        return printable(few(names, limit))


def compare_runs(first: str | Path, second: str | Path) -> Comparison:
    """Compare the digests of two runs, update by update.

    Args:
        first: The folder of one run.
        second: The folder of the other one.
    """
    outs = (Path(first), Path(second))
    manifests = [[each.manifest for each in list_snapshots(out) if each.manifest is not None] for out in outs]
    # A manifest has whole digests of the same state, so that either will do; the log has more updates.
    records = [
        {**{each.update: record_of(each) for each in found}, **read_digest_log(out)}
        for out, found in zip(outs, manifests, strict=True)
    ]
    common = tuple(sorted(records[0].keys() & records[1].keys()))
    differs = next((each for each in common if records[0][each].digest != records[1][each].digest), None)
    changes = [] if differs is None else compare_fields(*(found[differs].tensors for found in records))
    # The fields in which the newest snapshots differ.
    fields = {}
    for name in ("recipe", "kernel_class"):
        pair = [getattr(found[-1], name) for found in manifests] if all(manifests) else [{}, {}]
        fields[name] = tuple(each.name for each in compare_fields(*pair))
    return Comparison(
        common=common,
        equal=max((each for each in common if differs is None or each < differs), default=None),
        first=differs,
        differing=tuple(each.name for each in changes),
        **fields,
    )
