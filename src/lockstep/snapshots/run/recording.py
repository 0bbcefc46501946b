"""A writer that also returns the digests of what it has written."""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any

from lockstep.snapshots.format import Manifest
from lockstep.snapshots.run.collect import record_of
from lockstep.snapshots.run.digest_log import Record
from lockstep.snapshots.writing import SnapshotWriter


class RecordingWriter(SnapshotWriter):
    """Writes the snapshots of a run, and records their digests.

    Args:
        **options: The arguments of `SnapshotWriter`.
    """

    def __init__(self, **options: Any) -> None:
        self._records: SimpleQueue[Record] = SimpleQueue()
        super().__init__(**options)

    def take_records(self) -> list[Record]:
        """Return the digests of the snapshots that have become durable since the last call."""
        # Only this thread takes any out, so there are at least as many as the queue says.
        return [self._records.get() for _ in range(self._records.qsize())]

    def on_durable(self, manifest: Manifest) -> None:
        """Record the digests in the thread that writes, where this does not delay training."""
        self._records.put(record_of(manifest))
