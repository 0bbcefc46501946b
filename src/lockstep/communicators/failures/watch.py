"""Notice that another rank has failed, wherever it was, and say which and why.

A rank that raises tells the others of it at its end, traceback and all. One that dies or is stopped tells
nothing; its neighbour misses its beats. Then every rank breaks its own process group, so that a call that
waits for the failed rank returns, and raises a `PeerError` in its place.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Final

import torch.distributed as dist

from lockstep.communicators.environment import launcher_keeps_store
from lockstep.communicators.failures.failure import Failure, break_group
from lockstep.communicators.failures.heartbeat import ALERT_LOOKS, ALERT_ROUNDS, INTERVAL, Heartbeat, silence
from lockstep.errors import PeerError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

START: Final = "start-up"
_NOTHING: Final[AbstractContextManager[None]] = nullcontext()


class Watch:
    """Of a process that is alone: there is nobody to watch.

    Attributes:
        doing: What this rank is doing, for the others to read; set by whoever does it. An attribute, for a
            method would be called several times in each shard.
    """

    def __init__(self) -> None:
        self.doing = ""

    @property
    def cause_is_leaving(self) -> bool:
        """Whether a rank is known to have failed whose process ends by itself, or has ended."""
        return False

    def check(self) -> None:
        """Raise if another rank is known to have failed.

        Raises:
            PeerError: One has.
        """

    def tell(self, error: BaseException) -> None:
        """Let the other ranks know that this one has failed; needless where the process ends by it."""

    def waiting(self) -> AbstractContextManager[None]:
        """Surround a call that waits for other ranks, so that they know who is waiting and who is not.

        Raises:
            PeerError: One of them is known to have failed.
        """
        return _NOTHING

    def explain(self) -> PeerError | None:
        """Find out which rank a call has failed for; takes a few seconds.

        Returns:
            What to raise instead of the call's own error; None where no rank is known to have failed.
        """
        return None

    def protect(self, group: dist.ProcessGroup) -> None:
        """Take in a process group whose calls are to return when a rank fails."""

    def close(self) -> None:
        """Say that this rank has ended, and watch no longer. Calls after the first do nothing."""


class PeerWatch(Watch):
    """Of one of several processes: two threads that sleep nearly all the time.

    Args:
        store: Where the ranks find each other; must know how to clone itself.
        rank: This rank.
        size: How many ranks there are, at least 2.
        timeout: Seconds that a rank waits for another. A third of it is how long one may be silent.
        keeper: The rank whose process keeps the store; None where a launcher's does.
    """

    def __init__(self, store: Store, rank: int, size: int, *, timeout: float = 60.0, keeper: int | None = 0) -> None:
        self.doing = START
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._keeper = keeper
        self._groups: list[dist.ProcessGroup] = []
        self._failure: Failure | None = None
        self._found = threading.Event()
        self._closing = threading.Event()
        self._call = _Call(self)
        self._patience = max(ALERT_LOOKS, round(timeout / 3 / INTERVAL))
        number = store.add(f"watches/{rank}", 1)
        self._pulse = Heartbeat(
            dist.PrefixStore(f"watch/{number}", store.clone()),  # type: ignore[attr-defined]
            rank,
            size,
            news=lambda: (self._call.waiting, self.doing),
            patience=self._patience,
            keeper=keeper,
        )
        self._judge = threading.Thread(target=self._keep_watch, name="lockstep watch", daemon=True)
        threading._register_atexit(_close_at_exit, weakref.ref(self))  # type: ignore[attr-defined]
        self._pulse.start()
        self._judge.start()

    @property
    def cause_is_leaving(self) -> bool:
        """Whether the rank that failed ends by itself; see `Watch.cause_is_leaving`."""
        return self._failure is not None and self._failure.leaving

    def check(self) -> None:
        """Raise if another rank is known to have failed; see `Watch.check`."""
        if self._failure is not None and self._failure.rank != self._rank:
            raise self._failure.error()

    def tell(self, error: BaseException) -> None:
        """Let the other ranks know that this one has failed; see `Watch.tell`."""
        self._pulse.tell(Failure.raised(self._rank, error, self.doing))

    def waiting(self) -> AbstractContextManager[None]:
        """Surround a call that waits for other ranks; see `Watch.waiting`."""
        return self._call

    def explain(self) -> PeerError | None:
        """Find out which rank a call has failed for; see `Watch.explain`."""
        self._pulse.alarm()
        self._found.wait(ALERT_ROUNDS * INTERVAL)
        if self._failure is not None:
            return self._failure.error()
        late = f"has not come for {self._timeout:g} s, but is alive"
        for rank, beat in dict(self._pulse.beats).items():  # looked at since the alarm
            if beat is not None and not beat.waiting:
                return Failure(rank, late, beat.phase).error()
        return None

    def gather(self) -> None:
        """Wait until every rank has come.

        Raises:
            PeerError: One has not within the time, or has failed.
        """
        deadline = time.monotonic() + self._timeout
        while not self._pulse.everyone.wait(INTERVAL / 10):
            self.check()
            if time.monotonic() > deadline:
                self._pulse.alarm()
                self._pulse.surveyed.wait(ALERT_ROUNDS * INTERVAL)
                absent = next((rank for rank, beat in self._pulse.beats.items() if beat is None), None)
                raise Failure(absent, f"has not come within {self._timeout:g} s", START).error()

    def protect(self, group: dist.ProcessGroup) -> None:
        """Take in a process group; see `Watch.protect`."""
        self._groups.append(group)

    def close(self) -> None:
        """Watch no longer; see `Watch.close`."""
        if not self._closing.is_set():
            self._closing.set()
            self._pulse.stop()
            self._judge.join()
            self._groups.clear()  # nobody is to end them later than their owner

    def _keep_watch(self) -> None:
        """Wait for a failure, and break what waits for the failed rank."""
        rounds = looks = 0
        while not self._closing.wait(INTERVAL):
            looks = looks + 1 if rounds == self._pulse.rounds else 0
            rounds = self._pulse.rounds
            failure = self._pulse.failure or self._judge_keeper(looks)
            if failure is not None:
                self._failure = failure
                for group in self._groups:
                    break_group(group)
                self._found.set()
                return

    def _judge_keeper(self, looks: int) -> Failure | None:
        """Judge whoever keeps the store by its answers, for they are what the pulse may be waiting for.

        Args:
            looks: How often the pulse was found where it was before.
        """
        beat = None if self._keeper is None else self._pulse.beats.get(self._keeper)
        phase = "" if beat is None else beat.last_phase
        if self._pulse.lost:
            what = "has ended, and with it the store that it kept"
            gone = Failure(self._keeper, what, phase, leaving=True)
            return gone if self._pulse.alert else None
        if looks >= (ALERT_LOOKS if self._pulse.alert else self._patience):
            return Failure(self._keeper, silence(looks), phase)
        return None


class _Call(AbstractContextManager[None]):
    """The time in which a rank waits for others; one object for all calls, a tenth of a generator's cost."""

    __slots__ = ("_watch", "waiting")

    def __init__(self, watch: PeerWatch) -> None:
        self._watch = watch
        self.waiting = False

    def __enter__(self) -> None:
        self._watch.check()
        self.waiting = True

    def __exit__(self, *_: object) -> None:
        self.waiting = False


def watch_group(group: dist.ProcessGroup, timeout: float) -> Watch:
    """Watch the ranks of a process group that somebody else has opened."""
    if group.size() == 1:
        return Watch()
    keeper = None if launcher_keeps_store(os.environ) else 0
    return PeerWatch(group.get_group_store(), group.rank(), group.size(), timeout=timeout, keeper=keeper)


def _close_at_exit(reference: weakref.ref[PeerWatch]) -> None:
    """Tell the others of the error by which this process ends, if it ends by one of its own."""
    watch = reference()
    if watch is None:
        return
    error = vars(sys).get("last_value")
    if isinstance(error, BaseException) and not isinstance(error, PeerError):
        watch.tell(error)
    watch.close()
