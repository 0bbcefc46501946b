"""The conversation of the ranks about their well-being, over the store where they have found each other.

Every rank writes a beat a few times a second: a number, whether it waits for others, and its phase. It reads
the beat of its neighbour, so that somebody reads each, whatever their number, and hears alarms: of a
connection that broke, after which a few missing beats are enough, and of a failure that somebody knows.
Silence is counted in a rank's own looks, not by its clock: who was stopped himself accuses nobody afterwards.
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
"""Seconds between two beats."""
ALERT_LOOKS: Final = 12
"""How many looks without a beat tell a dead rank once a connection has broken: three seconds."""
ALERT_ROUNDS: Final = ALERT_LOOKS + 4
"""How many rounds an alarm lasts."""
FAREWELL: Final = 2.0
"""Seconds that the keeper of the store stays at its end, for the others to read of a failure."""
ENDED: Final = "ended"


@dataclass(frozen=True)
class Beat:
    """What a rank says of itself.

    Attributes:
        number: Another one with every beat.
        waiting: Whether it is waiting for other ranks.
        phase: What it is doing; `ENDED` and what it was doing, of one that has.

    >>> Beat.from_bytes(Beat(7, True, "data loading").to_text().encode())
    Beat(number=7, waiting=True, phase='data loading')
    """

    number: int
    waiting: bool
    phase: str

    @classmethod
    def from_bytes(cls, data: bytes) -> Beat:
        """Read what `to_text` wrote."""
        number, waiting, phase = data.decode().split(" ", 2)
        return cls(int(number), waiting == "1", phase)

    def to_text(self) -> str:
        """Write it as a line."""
        return f"{self.number} {int(self.waiting)} {self.phase}"

    @property
    def ended(self) -> bool:
        """Whether the rank has ended in order."""
        return self.phase.startswith(ENDED)

    @property
    def last_phase(self) -> str:
        """What it is doing, or was doing when it ended."""
        return self.phase.removeprefix(ENDED).strip()


class Heartbeat:
    """A thread that beats for this rank, and listens to others.

    Args:
        store: A connection of its own, for an answer may be long in coming.
        rank: This rank.
        size: How many ranks there are.
        news: Gives whether this rank is waiting, and its phase.
        patience: After how many looks without a beat a rank counts as silent.
        keeper: The rank that keeps the store; None where a launcher does.

    Attributes:
        everyone: Set once all ranks have come.
        surveyed: Set once all ranks have been looked at after an alarm.
        beats: The last beat of each rank that was looked at; None of one that never beat.
        failure: What has failed, once that is known.
        rounds: How often the thread has been round.
        lost: Whether the store is gone.
        alert: How many rounds are left in which a few looks without a beat tell a dead rank.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        news: Callable[[], tuple[bool, str]],
        patience: int,
        keeper: int | None,
    ) -> None:
        self.everyone = threading.Event()
        self.surveyed = threading.Event()
        self.beats: dict[int, Beat | None] = {}
        self.failure: Failure | None = None
        self.rounds = 0
        self.lost = False
        self.alert = 0
        self._looks: dict[int, int] = {}
        self._store = store
        self._rank = rank
        self._size = size
        self._news = news
        self._patience = patience
        self._keeper = keeper
        self._others = [other for other in range(size) if other != rank]
        self._neighbours = sorted({(rank + 1) % size, rank if keeper is None else keeper} - {rank})
        self._alarms = 0
        self._alarming = False
        self._own: Failure | None = None
        self._stopping = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lockstep pulse", daemon=True)

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()

    def alarm(self) -> None:
        """Have all ranks look for a dead one, and soon: a connection has broken."""
        self.alert = ALERT_ROUNDS
        self.surveyed.clear()
        self._alarming = True
        self._wake.set()

    def tell(self, failure: Failure) -> None:
        """Let all ranks know of a failure, unless they know of another already."""
        self._own = failure
        self._wake.set()

    def stop(self) -> None:
        """Say that this rank has ended, and end the thread unless it is stuck."""
        self._stopping = True
        self._wake.set()
        self._thread.join(FAREWELL + 1)

    def _run(self) -> None:
        try:
            self._store.add("came", 1)
            while not self._stopping:
                self._round()
                self._wake.wait(INTERVAL if self.everyone.is_set() else INTERVAL / 10)
                self._wake.clear()
            self._round()
            self._say_farewell()
        except RuntimeError:  # the connection to the store is gone, and so is whoever keeps it
            self.lost = True

    def _round(self) -> None:
        """Beat, and look around."""
        self.rounds += 1
        waiting, phase = self._news()
        phase = f"{ENDED} {phase}" if self._stopping else phase
        self._store.set(f"beat/{self._rank}", Beat(self.rounds, waiting, phase).to_text())
        if not self.everyone.is_set() and self._store.add("came", 0) >= self._size:
            self.everyone.set()
        self._speak()
        self._listen()
        self.alert = max(0, self.alert - 1)
        for rank in self._others if self._alarming else self._neighbours:
            self._look_at(rank)
        if self._alarming:
            self.surveyed.set()
            self._alarming = self.alert > 0
        if self.failure is None and self._own is None:
            self._own = self._judge()
            if self._own is not None:
                self._wake.set()

    def _speak(self) -> None:
        """Tell of a failure that this rank knows, and ring the alarm if that was asked for."""
        if self._own is not None and self.failure is None:
            self._store.compare_set("failure", "", self._own.to_text())
            self._alarms = self._store.add("alarms", 1) - 1
        elif self._alarming and self.alert == ALERT_ROUNDS:
            self._alarms = self._store.add("alarms", 1)

    def _listen(self) -> None:
        """Take in alarms, and the failure that one may be about."""
        alarms = self._store.add("alarms", 0)
        if alarms == self._alarms:
            return
        self._alarms = alarms
        self.alert = ALERT_ROUNDS
        if self.failure is None and self._store.check(["failure"]):
            self.failure = Failure.from_bytes(self._store.get("failure"))
            self._store.add("seen", 1)

    def _look_at(self, rank: int) -> None:
        key = f"beat/{rank}"
        beat = Beat.from_bytes(self._store.get(key)) if self._store.check([key]) else None
        same = rank in self.beats and beat == self.beats[rank]
        self._looks[rank] = self._looks[rank] + 1 if same else 0
        self.beats[rank] = beat

    def _judge(self) -> Failure | None:
        """Name the first of the ranks that is missed, if one is."""
        for rank, beat in self.beats.items():
            looks = self._looks[rank]
            if beat is None:
                continue  # it may still come
            if beat.ended:
                if self._alarming:
                    what = "has ended, and others were waiting for it"
                    return Failure(rank, what, beat.last_phase, leaving=True)
            elif self.alert and looks >= ALERT_LOOKS:
                return Failure(rank, "has died, or cannot be reached", beat.phase)
            elif looks >= self._patience:
                return Failure(rank, silence(looks), beat.phase)
        return None

    def _say_farewell(self) -> None:
        """Stay for the others to read of a failure, where the store ends with this process."""
        if self._keeper != self._rank or self.failure is None:
            return
        readers = self._size - (self.failure.rank != self._rank)
        deadline = time.monotonic() + FAREWELL
        while self._store.add("seen", 0) < readers and time.monotonic() < deadline:
            time.sleep(INTERVAL / 10)


def silence(looks: int) -> str:
    """Say what is known of a rank that was looked at in vain."""
    return f"has been silent for {looks * INTERVAL:g} s: it was stopped, or cannot be reached"
