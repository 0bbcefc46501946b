"""Detect that another rank has failed, wherever this process is, and report which rank and why.

A rank that raises reports its error, with the traceback, to the others when it ends. A rank that dies or is stopped
cannot report anything; its neighbor misses its heartbeats. Every rank then aborts its own process groups, so that
a call that waits for the failed rank returns, and raises a `PeerError` instead of that call's own error.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final

import torch.distributed as dist

from lockstep.communicators.environment import launcher_hosts_store
from lockstep.communicators.failures.failure import Failure, abort_group
from lockstep.communicators.failures.heartbeat import INTERVAL, READS, Beat, Heartbeat, describe_silence
from lockstep.errors import PeerError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

START: Final = "start-up"
"""The phase of a rank until its first update."""
ANSWER_READS: Final = 2 * READS
"""Intervals after which the store itself counts as silent; a rank that is dead was found before."""


class Watch(AbstractContextManager[None]):
    """The watch of one process over the others of its run, by threads that sleep nearly all the time.

    See `Heartbeat` for the thread. A second one finds that the store does not answer, because a call to it has no
    timeout. Without arguments, it is the watch of a process that runs alone: there are no other ranks, so there are no
    threads, and no method finds anything.

    Args:
        store: The store by which the ranks have met; it must have a `clone` method. None for a process alone.
        rank: The rank of this process.
        size: The number of ranks.
        timeout: Seconds that a rank waits for another. A rank may be silent for a third of it.
        store_rank: The rank whose process hosts the store; None if a launcher's process does.

    Attributes:
        phase: What this rank is doing, for the others to read. Code that enters a phase sets it. It is an
            attribute because a method would be called several times per shard.
    """

    def __init__(
        self,
        store: Store | None = None,
        rank: int = 0,
        size: int = 1,
        *,
        timeout: float = 60,
        store_rank: int | None = 0,
    ) -> None:
        self.phase = "" if store is None else START
        self._rank = rank
        self._timeout = timeout
        self._store_rank = store_rank
        self._groups: list[dist.ProcessGroup] = []
        self._failure: Failure | None = None
        self._failing = threading.Lock()
        self._failure_found = threading.Event()
        self._is_waiting = False
        self._calls = 0
        self._closed = threading.Event()
        self._heartbeat: Heartbeat | None = None
        if store is None:
            return
        # Several watches may use a store one after the other, each with separate keys. All ranks create their watches
        # in the same order, so they count alike.
        number = store.add(f"watches/{rank}", 1)
        # A short timeout must not make this limit lower than that after a question.
        max_unchanged = max(READS, round(timeout / 3 / INTERVAL))
        self._heartbeat = Heartbeat(
            # The clone is a separate connection: a call that waits for an answer blocks all others on the same
            # connection.
            dist.PrefixStore(f"watch/{number}", store.clone()),  # type: ignore[attr-defined]
            rank,
            size,
            status=lambda: (self._is_waiting, self.phase),
            max_unchanged=max_unchanged,
            store_rank=store_rank,
            on_failure=self._fail,
        )
        # Python calls this before it joins its threads, unlike `atexit` functions. The reference is weak, so that a
        # closed watch is freed.
        threading._register_atexit(_close_at_exit, weakref.ref(self))  # type: ignore[attr-defined]
        self._heartbeat.start()
        threading.Thread(
            target=self._watch_store, args=(self._heartbeat, max_unchanged), name="lockstep store", daemon=True
        ).start()

    @property
    def failed_rank_is_exiting(self) -> bool:
        """Whether a rank is known to have failed whose process ends by itself, or has ended."""
        return self._failure is not None and self._failure.exiting

    def check(self) -> None:
        """Raise an error if another rank is known to have failed.

        Raises:
            PeerError: If another rank has failed.
        """
        if self._failure is not None and self._failure.rank != self._rank:
            raise self._failure.error()

    def report_failure(self, error: BaseException) -> None:
        """Report to the other ranks that this one has failed; not needed if the error ends the process."""
        if self._heartbeat is not None:
            self._heartbeat.publish_failure(Failure.raised(self._rank, error, self.phase))

    def waiting(self) -> AbstractContextManager[None]:
        """Return a context for a call that waits for other ranks, so that they know which ranks wait.

        Raises:
            PeerError: On entering, if another rank is known to have failed.
        """
        # One object serves all calls, at a tenth of the cost of a generator-based context manager.
        return self

    def __enter__(self) -> None:
        # A call that starts now could only fail or time out.
        self.check()
        self._calls += 1
        self._is_waiting = True

    def __exit__(self, *_: object) -> None:
        self._is_waiting = False

    def explain(self) -> PeerError | None:
        """Find the rank because of which a call has failed. This takes up to a few seconds.

        Returns:
            The error to raise instead of the call's own; None if no rank is known to have failed.
        """
        beats = self._ask()
        if self._failure is not None:
            return self._failure.error()
        late = f"is alive, but has not joined the call within {self._timeout:g} s"
        # All ranks are alive and were heard since. The rank that does not wait for others is missing in the call.
        for rank, beat in beats.items():
            if beat is not None and not beat.waiting:
                return Failure(rank, late, beat.phase).error()
        return None

    def wait_for_all(self) -> None:
        """Wait until every rank has started.

        Raises:
            PeerError: If a rank has not started within the timeout, or has failed.
        """
        joined = self._heartbeat is None or self._heartbeat.joined.wait(self._timeout)
        beats = {} if joined else self._ask()
        self.check()
        if not joined:
            absent = next((rank for rank, beat in beats.items() if beat is None), None)
            raise Failure(absent, f"has not started within {self._timeout:g} s", START).error()

    def add_group(self, group: dist.ProcessGroup) -> None:
        """Register a process group, whose calls are to return when a rank fails."""
        self._groups.append(group)

    def close(self) -> None:
        """Report that this rank has ended, and stop watching. Calls after the first do nothing."""
        self._closed.set()
        if self._heartbeat is not None:
            self._heartbeat.stop()
        # A group must end when torch.distributed destroys it, so no reference to it may remain here.
        self._groups.clear()

    def _watch_store(self, heartbeat: Heartbeat, max_unchanged: int) -> None:
        """Fail if the store is silent for as long as a rank may be, and a call waits for other ranks.

        Without a call that waits, nothing needs the store. Silence is counted in looks, as `Heartbeat` does, so that a
        process that was stopped itself accuses no rank when it continues.
        """
        silent = waits = rounds = calls = 0
        while silent < max_unchanged or waits < READS:
            if self._closed.wait(INTERVAL) or heartbeat.store_lost:
                return
            silent = silent + 1 if heartbeat.rounds == rounds else 0
            waits = waits + 1 if self._is_waiting and self._calls == calls else 0
            rounds, calls = heartbeat.rounds, self._calls
        self._fail(Failure(self._store_rank, describe_silence(silent), self._phase_of_host(heartbeat)))

    def _phase_of_host(self, heartbeat: Heartbeat) -> str:
        beat = None if self._store_rank is None else heartbeat.beats.get(self._store_rank)
        return "" if beat is None else beat.phase

    def _ask(self) -> dict[int, Beat | None]:
        """Hear all ranks, and return their heartbeats; a store that does not answer is a failure of its host."""
        if self._heartbeat is None:
            return {}
        if self._failure is None:
            self._heartbeat.ask()
            is_answered = self._heartbeat.answered.wait(ANSWER_READS * INTERVAL)
            phase = self._phase_of_host(self._heartbeat)
            if self._heartbeat.store_lost:
                what = "has ended, and with it the store that it hosted"
                self._fail(Failure(self._store_rank, what, phase, exiting=True))
            elif not is_answered:
                self._fail(Failure(self._store_rank, describe_silence(ANSWER_READS), phase))
        # Copied, because the thread may add a rank in the meantime.
        return dict(self._heartbeat.beats)

    def _fail(self, failure: Failure) -> None:
        """Remember the first failure, and abort the groups that wait for the failed rank."""
        with self._failing:
            if self._failure is not None:
                return
            # The failure must be known before the groups are aborted: a call that raises then asks `explain` for the
            # reason.
            self._failure = failure
        for group in self._groups:
            abort_group(group)
        self._failure_found.set()


def watch_group(group: dist.ProcessGroup, timeout: float) -> Watch:
    """Return a watch over the ranks of a process group that was opened by other code.

    Args:
        group: The process group.
        timeout: Seconds that a rank waits for another.
    """
    if group.size() == 1:
        return Watch()
    store_rank = None if launcher_hosts_store(os.environ) else 0
    return Watch(group.get_group_store(), group.rank(), group.size(), timeout=timeout, store_rank=store_rank)


def _close_at_exit(reference: weakref.ref[Watch]) -> None:
    """Report the error that ends this process to the other ranks, unless it came from one of them."""
    watch = reference()
    if watch is None:
        return
    # Python sets this attribute when an error has ended the script.
    error = vars(sys).get("last_value")
    if isinstance(error, BaseException) and not isinstance(error, PeerError):
        watch.report_failure(error)
    watch.close()
