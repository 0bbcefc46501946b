"""Heartbeats of the ranks, sent through the store by which the ranks have met.

Every rank writes a heartbeat once a second: a number, whether the rank waits for others, and its phase. It reads the
heartbeat of its neighbor, so that every rank is read by another one, however many there are. A rank whose call has
failed reads those of all others, and then a few missing ones are enough to call a rank dead.

Silence is measured by counting reads, not by the clock. A rank that was stopped itself therefore does not accuse
others when it continues.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from lockstep.communicators.failures.failure import IN_EVERY_PROCESS, Failure

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

INTERVAL: Final = 1.0
"""Seconds between two heartbeats of a rank."""
START_INTERVAL: Final = 0.025
"""The same until all ranks have started, so that none begins its work a second late."""
READS: Final = 3
"""Unchanged reads after which a rank counts as dead once a call has failed."""
LINGER: Final = 2.0
"""Seconds for which the rank that hosts the store stays after a failure, so that the others can read about it."""


class Beat(NamedTuple):
    """One heartbeat of a rank.

    Attributes:
        number: A number that changes with every heartbeat.
        waiting: Whether the rank waits for other ranks.
        phase: What the rank is doing, or did last if it has ended.
        ended: Whether the rank has ended in order.
    """

    number: int
    waiting: bool
    phase: str
    ended: bool = False


@dataclass(eq=False)
class Heartbeat:
    """A thread that writes the heartbeats of this rank and reads those of others.

    Args:
        store: A connection to the store that nothing else uses, because an answer may take long.
        rank: The rank of this process.
        size: The number of ranks.
        status: A function that returns whether this rank waits for others, and its phase.
        max_unchanged: After how many unchanged reads a rank counts as silent.
        store_rank: The rank that hosts the store; None if a launcher does.
        on_failure: Called with the first failure of the run, once this rank has read about it.

    Attributes:
        joined: An event that is set once all ranks have started, or one has failed.
        answered: An event that is set once all ranks were heard after a question, one has failed, or the store is gone.
        beats: The last heartbeat of each rank that was read; None for a rank that has not written one.
        failure: The first failure of the run, once this rank has read about it.
        rounds: The number of heartbeats that were written.
        store_lost: Whether the connection to the store is gone.
    """

    store: Store
    rank: int
    size: int
    status: Callable[[], tuple[bool, str]]
    max_unchanged: int
    store_rank: int | None
    on_failure: Callable[[Failure], None]

    def __post_init__(self) -> None:
        self.joined = threading.Event()
        self.answered = threading.Event()
        self.beats: dict[int, Beat | None] = {}
        self.failure: Failure | None = None
        self.rounds = 0
        self.store_lost = False
        self._unchanged_reads: dict[int, int] = {}
        self._others = [other for other in range(self.size) if other != self.rank]
        # The host of the store is read by every rank: its end takes the store, and with it all reports, away.
        host = self.rank if self.store_rank is None else self.store_rank
        self._neighbors = sorted({(self.rank + 1) % self.size, host} - {self.rank})
        self._unheard: set[int] = set()
        self._first_answers: dict[int, Beat | None] = {}
        self._own_failure: Failure | None = None
        self._stopping = False
        self._wake = threading.Event()
        # The thread is a daemon, because a call to a store that does not answer may never return, and Python joins all
        # other threads before it ends.
        self._thread = threading.Thread(target=self._run, name="lockstep heartbeat", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def ask(self) -> None:
        """Read the heartbeats of all ranks, because a call has failed; `answered` tells when they were heard."""
        self.answered.clear()
        self._first_answers.clear()
        self._unheard = set(self._others)
        self._wake.set()
        if not self._thread.is_alive():
            self.answered.set()

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
            self.store.add("came", 1)
            while self._round():
                self._wake.wait(INTERVAL if self.joined.is_set() else START_INTERVAL)
                self._wake.clear()
            self._linger()
        except RuntimeError:
            # The store cannot be reached any more, so the process that hosted it is gone.
            self.store_lost = True
        self.answered.set()

    def _round(self) -> bool:
        """Write one heartbeat, and read about failures and those of others; return whether another round follows."""
        self.rounds += 1
        # The last heartbeat says that this rank has ended: without it the silence would look like a failure.
        is_last = self._stopping
        self.store.set(f"beat/{self.rank}", json.dumps(Beat(self.rounds, *self.status(), is_last)))
        if not self.joined.is_set() and self.store.add("came", 0) >= self.size:
            self.joined.set()
        asked = sorted(self._unheard)
        for rank in asked or self._neighbors:
            self._read_beat(rank, is_asked=bool(asked))
        if self.failure is None:
            self._find_failure()
        if asked and not self._unheard:
            self.answered.set()
        return not is_last

    def _read_beat(self, rank: int, *, is_asked: bool) -> None:
        """Read a heartbeat, and count how often it was the same in a row."""
        key = f"beat/{rank}"
        # `get` would wait for a key that is absent.
        beat = Beat(*json.loads(self.store.get(key))) if self.store.check([key]) else None
        is_same = rank in self.beats and beat == self.beats[rank]
        self._unchanged_reads[rank] = self._unchanged_reads[rank] + 1 if is_same else 0
        self.beats[rank] = beat
        # The first one may be older than the question.
        if is_asked and (beat is None or not (beat.ended or beat == self._first_answers.setdefault(rank, beat))):
            self._unheard.discard(rank)

    def _find_failure(self) -> None:
        """Publish a failure that this rank knows of, or read about the one that another rank has published."""
        found = self._own_failure or next(filter(None, map(self._failure_of, self.beats)), None)
        if found is not None:
            # This writes only if the key is absent: the first failure is the cause, and later ones follow from it.
            told = self.store.compare_set("failure", "", found.to_text())
        elif self.store.check(["failure"]):
            told = self.store.get("failure")
        else:
            return
        self.failure = Failure.from_bytes(told)
        self.store.add("seen", 1)
        self.on_failure(self.failure)
        self.joined.set()
        self.answered.set()

    def _failure_of(self, rank: int) -> Failure | None:
        """Return a report about a rank if its heartbeats are missing."""
        beat, reads, is_asked = self.beats[rank], self._unchanged_reads[rank], rank in self._unheard
        # `Watch.wait_for_all` limits how long a rank may take to start.
        if beat is None:
            return None
        if beat.ended:
            # Ending is no failure unless a call of another rank failed because of it.
            what = "has ended while other ranks waited for it"
            return Failure(rank, what, beat.phase, exiting=True, remedy=IN_EVERY_PROCESS) if is_asked else None
        if is_asked and reads >= READS:
            return Failure(rank, "has died, or cannot be reached", beat.phase)
        return Failure(rank, describe_silence(reads), beat.phase) if reads >= self.max_unchanged else None

    def _linger(self) -> None:
        """Wait until the others have read about a failure, if the store ends with this process."""
        if self.store_rank != self.rank or self.failure is None:
            return
        # The failed rank may be gone and is not expected to read, unless it is this one.
        readers = self.size - (self.failure.rank != self.rank)
        deadline = time.monotonic() + LINGER
        while self.store.add("seen", 0) < readers and time.monotonic() < deadline:
            time.sleep(START_INTERVAL)


def describe_silence(reads: int) -> str:
    """Return what is known of a rank that was not heard in so many reads."""
    return f"has been silent for {reads * INTERVAL:g} s: it was stopped, or cannot be reached"
