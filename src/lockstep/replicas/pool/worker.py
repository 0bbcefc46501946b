"""A thread that lives as long as its replica and runs one job at a time.

Jobs are handed over by a pair of raw locks: on two cores that costs a third of a condition variable and
a quarter of a future, and a signal interrupts the wait on a raw lock without losing the job.
"""

from __future__ import annotations

import ctypes
import os
import sys
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


KEPT: Final = 2**30
"""Bytes of free memory at the end of an arena that are kept."""

AHEAD: Final = 2**26
"""Bytes by which an arena grows at least; as much as a thread's arena has in one piece."""

LARGEST: Final = 2**25
"""Bytes from which a block is a mapping of its own, given back when it is free; the most that can be set."""

M_TRIM_THRESHOLD: Final = -1
M_TOP_PAD: Final = -2
M_MMAP_THRESHOLD: Final = -3
USERS_WORDS: Final = (
    "GLIBC_TUNABLES",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "MALLOC_TRIM_THRESHOLD_",
)


def keep_freed_memory() -> bool:
    """Ask the C library to keep freed memory; for the whole process, and for good.

    Nothing is asked where the user has said in the environment how memory is to be kept
    (`MALLOC_TRIM_THRESHOLD_` and its like), or where the C library is not glibc.

    Returns:
        Whether the library agreed.
    """
    if sys.platform != "linux" or any(word in os.environ for word in USERS_WORDS):
        return False
    library = ctypes.CDLL(None)
    try:
        mallopt = library.mallopt
    except AttributeError:
        return False
    settings = ((M_TRIM_THRESHOLD, KEPT), (M_TOP_PAD, AHEAD), (M_MMAP_THRESHOLD, LARGEST))
    answers = [mallopt(name, value) for name, value in settings]
    return answers == [1, 1, 1]
