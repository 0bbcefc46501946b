"""Heartbeats of the ranks, sent through the store by which the ranks have met.

Every rank writes a heartbeat a few times per second: a number, whether the rank waits for others, and its phase.
It reads the heartbeat of its neighbour, so that every rank is read by another one, however many there are. It also
polls for alarms. An alarm is raised after a connection broke, and then a few missing heartbeats are enough to call
a rank dead; or it announces a failure that some rank knows of.

Silence is measured by counting reads, not by the clock. A rank that was stopped itself therefore does not accuse
others when it continues.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from lockstep.communicators.failures.failure import Failure

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

INTERVAL: Final = 0.25
"""Seconds between two heartbeats of a rank."""
ALERT_READS: Final = 12
"""Unchanged reads after which a rank counts as dead once a connection has broken: three seconds."""
ALERT_ROUNDS: Final = ALERT_READS + 4
"""Rounds of the thread for which an alarm lasts."""
LINGER: Final = 2.0
"""Seconds for which the rank that hosts the store stays after a failure, so that the others can read about it."""
ENDED: Final = "ended"
"""The prefix of the phase of a rank that has ended in order."""


@dataclass(frozen=True)
class Beat:
    """One heartbeat of a rank.

    Attributes:
        number: A number that changes with every heartbeat.
        waiting: Whether the rank waits for other ranks.
        phase: What the rank is doing. For a rank that has ended: `ENDED`, a space and what it did last.

    >>> Beat.from_bytes(Beat(7, True, "data loading").to_text().encode())
    Beat(number=7, waiting=True, phase='data loading')
    """

    number: int
    waiting: bool
    phase: str

    @classmethod
    def from_bytes(cls, data: bytes) -> Beat:
        """Create the heartbeat that `to_text` wrote."""
        number, waiting, phase = data.decode().split(" ", 2)
        return cls(int(number), waiting == "1", phase)

    def to_text(self) -> str:
        """Return the heartbeat as one line of text."""
        return f"{self.number} {int(self.waiting)} {self.phase}"

    @property
    def ended(self) -> bool:
        """Whether the rank has ended in order."""
        return self.phase.startswith(ENDED)

    @property
    def last_phase(self) -> str:
        """What the rank is doing, or did last if it has ended."""
        return self.phase.removeprefix(ENDED).strip()


class Heartbeat:
    """A thread that writes the heartbeats of this rank and reads those of others.

    Args:
        store: A connection to the store that nothing else uses, because an answer may take long.
        rank: The rank of this process.
        size: The number of ranks.
        status: A function that returns whether this rank waits for others, and its phase.
        max_unchanged: After how many unchanged reads a rank counts as silent.
        store_rank: The rank that hosts the store; None if a launcher does.

    Attributes:
        all_joined: An event that is set once all ranks have started.
        all_read: An event that is set once the heartbeats of all ranks have been read after an alarm.
        beats: The last heartbeat of each rank that was read; None for a rank that has not written one.
        failure: The first failure of the run, once this rank has read about it.
        rounds: The number of rounds the thread has made. It does not change while the store does not answer.
        store_lost: Whether the connection to the store is gone.
        alert: For how many more rounds `ALERT_READS` unchanged reads are enough to call a rank dead.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        status: Callable[[], tuple[bool, str]],
        max_unchanged: int,
        store_rank: int | None,
    ) -> None:
        self.all_joined = threading.Event()
        self.all_read = threading.Event()
        self.beats: dict[int, Beat | None] = {}
        self.failure: Failure | None = None
        self.rounds = 0
        self.store_lost = False
        self.alert = 0
        self._unchanged_reads: dict[int, int] = {}
        self._store = store
        self._rank = rank
        self._size = size
        self._status = status
        self._max_unchanged = max_unchanged
        self._store_rank = store_rank
        self._others = [other for other in range(size) if other != rank]
        # The host of the store is read by every rank: its end takes the store, and with it all reports, away.
        self._neighbours = sorted({(rank + 1) % size, rank if store_rank is None else store_rank} - {rank})
        self._alarms_seen = 0
        self._alarming = False
        self._own_failure: Failure | None = None
        self._stopping = False
        self._wake = threading.Event()
        # The thread is a daemon, because a call to a store that does not answer may never return, and Python joins all
        # other threads before it ends.
        self._thread = threading.Thread(target=self._run, name="lockstep heartbeat", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def alarm(self) -> None:
        """Ask all ranks to look for a dead rank soon, because a connection has broken."""
        self.alert = ALERT_ROUNDS
        self.all_read.clear()
        self._alarming = True
        self._wake.set()

    def publish_failure(self, failure: Failure) -> None:
        """Report a failure to all ranks, unless another failure is known already."""
        self._own_failure = failure
        self._wake.set()

    def stop(self) -> None:
        """Write that this rank has ended, and stop the thread unless it waits for the store."""
        self._stopping = True
        self._wake.set()
        # The thread itself may linger for a while. The wait is limited, because the store may never answer.
        self._thread.join(LINGER + 1)

    def _run(self) -> None:
        try:
            self._store.add("came", 1)
            while not self._stopping:
                self._round()
                # Rounds are shorter at the start, so that no rank begins its work a quarter of a second late.
                self._wake.wait(INTERVAL if self.all_joined.is_set() else INTERVAL / 10)
                self._wake.clear()
            # One more round writes that this rank has ended: without it the silence would look like a failure.
            self._round()
            self._linger()
        except RuntimeError:
            # The store cannot be reached any more, so the process that hosted it is gone.
            self.store_lost = True

    def _round(self) -> None:
        """Write one heartbeat, and read alarms and the heartbeats of others."""
        self.rounds += 1
        waiting, phase = self._status()
        phase = f"{ENDED} {phase}" if self._stopping else phase
        self._store.set(f"beat/{self._rank}", Beat(self.rounds, waiting, phase).to_text())
        if not self.all_joined.is_set() and self._store.add("came", 0) >= self._size:
            self.all_joined.set()
        self._send_alarms()
        self._receive_alarms()
        self.alert = max(0, self.alert - 1)
        for rank in self._others if self._alarming else self._neighbours:
            self._read_beat(rank)
        if self._alarming:
            self.all_read.set()
            self._alarming = self.alert > 0
        if self.failure is None and self._own_failure is None:
            self._own_failure = self._find_failure()
            if self._own_failure is not None:
                self._wake.set()

    def _send_alarms(self) -> None:
        """Publish a failure that this rank knows of, or the alarm that was asked for."""
        if self._own_failure is not None and self.failure is None:
            # This writes only if the key is absent: the first failure is the cause, and later ones follow from it.
            self._store.compare_set("failure", "", self._own_failure.to_text())
            # The count is lowered by one, so that this rank also receives its own alarm and reads which failure was
            # first.
            self._alarms_seen = self._store.add("alarms", 1) - 1
        elif self._alarming and self.alert == ALERT_ROUNDS:
            self._alarms_seen = self._store.add("alarms", 1)

    def _receive_alarms(self) -> None:
        """Read whether there are new alarms, and the failure that one of them may announce."""
        alarms = self._store.add("alarms", 0)
        if alarms == self._alarms_seen:
            return
        self._alarms_seen = alarms
        self.alert = ALERT_ROUNDS
        # `get` would wait for a key that is absent.
        if self.failure is None and self._store.check(["failure"]):
            self.failure = Failure.from_bytes(self._store.get("failure"))
            self._store.add("seen", 1)

    def _read_beat(self, rank: int) -> None:
        key = f"beat/{rank}"
        beat = Beat.from_bytes(self._store.get(key)) if self._store.check([key]) else None
        unchanged = rank in self.beats and beat == self.beats[rank]
        self._unchanged_reads[rank] = self._unchanged_reads[rank] + 1 if unchanged else 0
        self.beats[rank] = beat

    def _find_failure(self) -> Failure | None:
        """Return a report about the first rank whose heartbeats are missing, or None."""
        for rank, beat in self.beats.items():
            reads = self._unchanged_reads[rank]
            if beat is None:
                # The rank has not started yet. `PeerWatch.wait_for_all` limits how long that may take.
                continue
            if beat.ended:
                # Ending is no failure unless a call of another rank failed because of it.
                if self._alarming:
                    what = "has ended while other ranks waited for it"
                    return Failure(rank, what, beat.last_phase, exiting=True)
            elif self.alert and reads >= ALERT_READS:
                return Failure(rank, "has died, or cannot be reached", beat.phase)
            elif reads >= self._max_unchanged:
                return Failure(rank, describe_silence(reads), beat.phase)
        return None

    def _linger(self) -> None:
        """Wait until the others have read about a failure, if the store ends with this process."""
        if self._store_rank != self._rank or self.failure is None:
            return
        # The failed rank may be gone and is not expected to read, unless it is this one.
        readers = self._size - (self.failure.rank != self._rank)
        deadline = time.monotonic() + LINGER
        while self._store.add("seen", 0) < readers and time.monotonic() < deadline:
            time.sleep(INTERVAL / 10)


def describe_silence(reads: int) -> str:
    """Return what is known of a rank whose heartbeat has not changed for so many reads."""
    return f"has been silent for {reads * INTERVAL:g} s: it was stopped, or cannot be reached"
