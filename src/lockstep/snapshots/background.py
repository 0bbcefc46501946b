"""Copy the state of a run, and process the copies in a thread while training goes on."""

from __future__ import annotations

import os
import sys
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from threading import Condition, get_native_id
from types import TracebackType
from typing import Any, Final, NamedTuple

import torch

from lockstep.errors import OrderError, SnapshotWarning
from lockstep.snapshots.commit import Buffers, Staged, stage
from lockstep.snapshots.content import Content
from lockstep.snapshots.digest_log import Record

NICENESS: Final = 10
"""By how much the priority of the thread that writes is lower than that of training.

With a snapshot every 10 updates of 2 million parameters and both of two cores busy, it makes training about 8 % slower
instead of 12 % (`benchmarks/snapshots.py`).
"""


class _Job(NamedTuple):
    """A copied snapshot that is to be processed.

    Attributes:
        staged: The snapshot.
        buffers: The buffers that hold its tensors.
        copies: The copies of its tensors.
        must: Whether a newer one may not replace it.
    """

    staged: Staged
    buffers: Buffers
    copies: Sequence[torch.Tensor]
    must: bool


class BackgroundWriter(ABC):
    """Copies states, and processes the copies in a thread.

    One can be processed while another one waits. A newer one replaces the one that waits, so that training never waits
    for the disk, except for those that must be processed. Methods are to be called from one thread.

    Args:
        run_id: The name of the run.

    Attributes:
        replaced: The number of states that were not processed because a newer or more important one was.
        records: The digests of the states that it has processed.
        newest_update: The update of the newest of them; None if there is none.
    """

    newest_update: int | None = None

    def __init__(self, run_id: str) -> None:
        self.replaced = 0
        self.records: SimpleQueue[Record] = SimpleQueue()
        self._run_id = run_id
        # Python ends only after the thread of an executor has finished, so a snapshot is durable then.
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="lockstep-snapshots", initializer=_lower_priority)
        self._closed = False
        # The thread and its callers share what follows, under this condition.
        self._changed = Condition()
        self._jobs: deque[_Job] = deque()
        self._free = [Buffers(), Buffers()]
        self._messages: list[str] = []
        self._error: BaseException | None = None

    def save(self, content: Content, *, reasons: Iterable[str] = (), must: bool = False) -> None:
        """Copy a content and process it in the background.

        Args:
            content: The content. When this returns, its tensors may change.
            reasons: Why the snapshot is written.
            must: Whether it is processed in any case. Otherwise it may be replaced by a newer one while it waits. If
                two that must be processed are under way, this waits for the first one.

        Raises:
            TypeError: If the content holds something that a snapshot cannot hold.
            ValueError: If the content is not of this run.
            SnapshotError: If snapshots are required and the last three attempts have failed.
        """
        if self._closed:
            raise OrderError("`save` must be called before `close`.")
        if content.run_id != self._run_id:
            raise ValueError(f"`content.run_id` must be {self._run_id!r}, got {content.run_id!r}.")
        # Before anything that waits could be replaced, so that a content that is refused replaces nothing.
        staged = stage(content, reasons)
        self.report()
        buffers = self._acquire(must=must)
        if buffers is None:
            return
        try:
            copies = buffers.copy(staged.tensors)
        except BaseException:
            with self._changed:
                self._free.append(buffers)
            raise
        with self._changed:
            self._jobs.append(_Job(staged, buffers, copies, must))
        self._executor.submit(self._process_next)

    def wait(self) -> None:
        """Wait until every state is processed.

        Raises:
            SnapshotError: If snapshots are required and the last three attempts have failed.
        """
        # The thread does one thing after the other.
        self._executor.submit(int).result()
        self.report()

    def close(self) -> None:
        """Wait until every state is processed, and end the thread. Further calls do nothing."""
        if not self._closed:
            self._executor.shutdown()
            self._closed = True
            self.report()

    def take_records(self) -> list[Record]:
        """Return the digests that have been computed since the last call."""
        # Only this thread takes any out, so there are at least as many as the queue says.
        return [self.records.get() for _ in range(self.records.qsize())]

    def report(self) -> None:
        """Warn of what went wrong since the last call, and raise what the thread has raised."""
        with self._changed:
            messages, self._messages = self._messages, []
            error, self._error = self._error, None
        for message in messages:
            warnings.warn(message, SnapshotWarning, stacklevel=4)
        if error is not None:
            raise error

    @abstractmethod
    def process(self, staged: Staged, copies: Sequence[torch.Tensor]) -> list[str]:
        """Process one state in the thread, and return what went wrong.

        Args:
            staged: The state.
            copies: The copies of its tensors.
        """

    def __enter__(self) -> Any:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _acquire(self, *, must: bool) -> Buffers | None:
        """Return buffers for a copy, or None if those that wait are more important than it."""
        with self._changed:
            while not self._free:
                # Both buffers are in use, so at least one snapshot waits.
                replaceable = next((job for job in self._jobs if not job.must), None)
                if replaceable is not None:
                    self.replaced += 1
                    self._jobs.remove(replaceable)
                    return replaceable.buffers
                if not must:
                    self.replaced += 1
                    return None
                self._changed.wait()
            return self._free.pop()

    def _process_next(self) -> None:
        """Process what waits the longest, unless a newer one has replaced it."""
        with self._changed:
            if not self._jobs:
                return
            job = self._jobs.popleft()
        messages, error = list[str](), None
        try:
            messages = self.process(job.staged, job.copies)
        except BaseException as raised:  # noqa: BLE001 - raised again by the next call
            error = raised
        with self._changed:
            self._free.append(job.buffers)
            self._messages += messages
            self._error = self._error or error
            self._changed.notify_all()


def _lower_priority() -> None:
    """Lower the priority of the calling thread below that of training, on Linux, where each thread has its own.

    Hashing takes a core for about a millisecond per megabyte. A thread of training that waits for the interpreter's
    lock while this one holds it leaves its core to this one. Only other programs that keep all cores busy may delay
    both.
    """
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)
