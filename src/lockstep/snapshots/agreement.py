"""Compare the digests of snapshots over ranks, from the hashes that a thread has computed meanwhile."""

from __future__ import annotations

import json
from collections.abc import Callable

from lockstep.communicators import Communicator
from lockstep.errors import DisagreementError
from lockstep.snapshots.digest_log import Record

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
        self._communicator = communicator
        self._verified = verified
        self._records: dict[int, Record] = {}
        self._open: int | None = None
        # In updates: until they ask again, between the last time and the next, since the snapshot, and what that took.
        self._left = self._pause = self._passed = 0
        self._took = 1

    def open(self, update: int) -> None:
        """Begin to ask for a snapshot, which all ranks have copied after the same update."""
        if self._open is None:
            # One less each time, because digests that were late once need not be so again.
            self._took = self._left = max(1, self._took - 1)
            self._pause, self._passed = 1, 0
        self._open = update

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._communicator.size

    def add(self, record: Record) -> None:
        """Add the digests of a snapshot that this rank has computed."""
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
        own = json.dumps({update: record.digest for update, record in self._records.items()})
        found = [json.loads(each) for each in self._communicator.exchange(own.encode())]
        # All ranks read the same messages, so all of them act alike.
        for update in sorted(map(int, set.intersection(*map(set, found)))):
            record = self._records[update]
            if len({each[str(update)] for each in found}) > 1:
                raise self._disagreement(record)
            self._verified(record, self.size)
            self._records = {number: each for number, each in self._records.items() if number > update}
            # Where a newer one is asked for already, they go on as often as before.
            self._pause = self._left = 1
            if update == self._open:
                self._open, self._took = None, self._passed

    def _disagreement(self, record: Record) -> DisagreementError:
        """Find out which rank and which tensor differ. Every rank must call this."""
        values = json.dumps({**record.tensors, "a counter, an option or a position": record.digest})
        found = [json.loads(each) for each in self._communicator.exchange(values.encode())]
        rank = next(rank for rank, each in enumerate(found) if each != found[0])
        name = Record(0, "", found[rank]).differing(Record(0, "", found[0]))[0]
        return DisagreementError(
            f"Rank {rank} must have rank 0's state after update {record.update}, but it has other bits in {name}. "
            f"{REMEDY}",
            rank=rank,
            subject=name,
            update=record.update,
        )
