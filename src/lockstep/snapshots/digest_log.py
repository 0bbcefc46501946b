"""Log digests of the training state, and check updates that are repeated after a restart against them.

The file ``digests.jsonl`` has a header with the names of the tensors, and a line per logged update::

    {"conditions": "9f2c...", "tensors": ["models.main.0.weight", ...]}
    {"update": 1200, "digest": "54a945c5...", "tensors": "1f00c37b..."}

`digest` is that of a snapshot of the update. `tensors` has the first 8 hexadecimal digits of the SHA-256 of each of the
tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from lockstep.digest import combine, entries
from lockstep.side_files import SideFile
from lockstep.snapshots.content import Content, training_of

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

    @classmethod
    def of(cls, update: int, digest: str, tensors: Mapping[str, str]) -> Record:
        """Return a record of whole digests."""
        return cls(update, digest, {name: each[:DIGITS] for name, each in tensors.items()})

    def differing(self, other: Record) -> list[str]:
        """List the tensors that only one of two records has, or that differ, in the order of this one."""
        names = {**self.tensors, **other.tensors}
        return [name for name in names if self.tensors.get(name) != other.tensors.get(name)]


def record_of(state: Content) -> Record:
    """Return the digests of the training state of a content or of a snapshot.

    Args:
        state: The content, whose tensors are read; or the manifest of a snapshot, which has their digests.
    """
    found = list(entries(training_of(state)))
    named = {".".join(map(str, entry.path[1:])): entry.about[2] for entry in found if entry.kind == "tensor"}
    return Record.of(state.progress["update"], combine(found), dict(sorted(named.items())))


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
        self._header: tuple[str, tuple[str, ...]] | None = None
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
        lines: list[dict[str, Any]] = []
        header = (conditions, tuple(record.tensors))
        if header != self._header:
            lines.append({"conditions": conditions, "tensors": list(record.tensors)})
            self._header = header
        digits = "".join(record.tensors.values())
        lines.append({"update": record.update, "digest": record.digest, "tensors": digits})
        return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


def _difference(before: Record, again: Record) -> str:
    """Describe how the second result of an update differs from the first."""
    where = "every tensor is equal, but counters or options differ"
    if differing := before.differing(again):
        name = differing[0]
        old, new = (each.tensors.get(name, "nothing") for each in (before, again))
        more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
        where = f"the tensor {name!r}{more} differs (SHA-256 {old}..., now {new}...)"
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
