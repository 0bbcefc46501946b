"""A thread that lives as long as its replica and runs one job at a time.

Jobs are handed over by a pair of raw locks: on two cores that costs a third of a condition variable and
a quarter of a future, and a signal interrupts the wait on a raw lock without losing the job.
"""

from __future__ import annotations

import threading
import weakref
from _thread import allocate_lock
from collections.abc import Callable
from typing import Final

import torch

Job = Callable[[], None]

GLANCE: Final = 0.1
"""Seconds after which a thread that waits looks whether it was interrupted: `_thread.interrupt_main`, and on
Windows Ctrl-C, do not end a wait."""


class Mailbox:
    """What a worker and its thread share; the thread holds nothing else, so the worker can be collected."""

    __slots__ = ("__weakref__", "begin", "done", "error", "job")

    def __init__(self) -> None:
        self.job: Job | None = None
        self.error: BaseException | None = None
        self.begin = allocate_lock()
        self.done = allocate_lock()
        self.begin.acquire()
        self.done.acquire()

    def close(self) -> None:
        """Let the thread end after the job it has begun; one that it has not begun is dropped."""
        self.job = None
        if self.begin.locked():
            self.begin.release()


class Worker:
    """A thread of its own for one replica; `begin` a job, then `wait` for it.

    Args:
        name: The thread's name, as debuggers and error reports show it.
    """

    def __init__(self, name: str) -> None:
        self._mailbox = Mailbox()
        # Not a daemon: one that is inside a kernel at exit aborts the process. The thread is told to end
        # before Python joins it, earlier than `atexit` functions run; concurrent.futures does the same.
        self._thread = threading.Thread(target=_serve, args=(self._mailbox,), name=name, daemon=False)
        threading._register_atexit(_close_at_exit, weakref.ref(self._mailbox))  # type: ignore[attr-defined]
        self._finalizer = weakref.finalize(self, self._mailbox.close)
        self._finalizer.atexit = False
        self._thread.start()

    def close(self) -> None:
        """Let the thread end after the job that it may be doing; a worker nobody holds does so itself."""
        self._finalizer()

    def begin(self, job: Job) -> None:
        """Hand over a job; the one before must have been waited for."""
        self._mailbox.job = job
        self._mailbox.begin.release()

    def wait(self, seconds: float) -> BaseException | None:
        """Wait for the end of the job, but no longer than some seconds.

        Returns:
            What the job raised.

        Raises:
            TimeoutError: It has not ended.
        """
        mailbox = self._mailbox
        while not mailbox.done.acquire(timeout=min(max(seconds, 0.0), GLANCE)):
            seconds -= GLANCE
            if seconds <= 0.0:
                raise TimeoutError
        error, mailbox.error = mailbox.error, None
        return error


def _serve(mailbox: Mailbox) -> None:
    """Run job after job until there is none, all on one intra-op thread."""
    torch.set_num_threads(1)
    while True:
        mailbox.begin.acquire()
        job = mailbox.job
        if job is None:
            return
        try:
            job()
        except BaseException as error:  # noqa: BLE001 - carried to the thread that waits, which raises it
            mailbox.error = error
        mailbox.job = job = None
        mailbox.done.release()


def _close_at_exit(reference: weakref.ref[Mailbox]) -> None:
    mailbox = reference()
    if mailbox is not None:
        mailbox.close()
