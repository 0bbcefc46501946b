"""A worker thread that lives as long as its replica, and a setting of the C library for memory that workers free.

Jobs and their ends are handed over through `queue.SimpleQueue`, which takes less time than a future, and whose wait a
signal interrupts without losing what is handed over.

By default, glibc returns large blocks to the system as soon as they are free. Gradients and activations are large, so
every update would cause thousands of page faults, most of them in worker threads, whose arenas are trimmed the most. On
two cores this took a tenth of the time of an update, which `keep_freed_memory` saves.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import sys
import threading
import weakref
from collections.abc import Callable
from contextvars import Context
from queue import Empty, SimpleQueue
from typing import Final, Literal, TypeAlias

import torch

Job = Callable[[], None]

INTERRUPT_CHECK_SECONDS: Final = 0.1
"""The interval at which a waiting thread wakes up to receive interrupts: `_thread.interrupt_main`, and Ctrl-C on
Windows, do not end a wait."""

TRIM_THRESHOLD: Final = 2**30
"""The number of free bytes at the end of an arena that are kept."""

TOP_PAD: Final = 2**26
"""The number of bytes by which an arena grows at least, which is the size of one piece of the arena of a thread."""

MMAP_THRESHOLD: Final = 2**25
"""The size from which a block gets a mapping of its own, which is returned when it is freed. Larger values are not
accepted."""

# The numbers of the parameters of mallopt, from malloc.h.
M_TRIM_THRESHOLD: Final = -1
M_TOP_PAD: Final = -2
M_MMAP_THRESHOLD: Final = -3

MALLOC_VARIABLES: Final = (
    *("GLIBC_TUNABLES", "MALLOC_MMAP_THRESHOLD_"),
    *("MALLOC_TOP_PAD_", "MALLOC_TRIM_THRESHOLD_"),
)
"""The environment variables in which a user can configure the same settings."""


Timeout: TypeAlias = "float | Literal['auto'] | None"
"""Seconds after which a device counts as hung; "auto" watches the threads of all devices but the first."""

AUTO_TIMEOUT_SECONDS: Final = 1800.0
"""The number of seconds that "auto" waits for a thread, as long as DistributedDataParallel waits for a process."""


class Worker:
    """A thread for one replica, which runs one job at a time.

    Call `submit` with a job, and then `wait` for its end. The thread ends when the worker is garbage collected.

    Args:
        name: The name of the thread, as debuggers and error messages show it.
    """

    def __init__(self, name: str) -> None:
        _renew_autograd_engine(os.getpid())
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._ends: SimpleQueue[BaseException | None] = SimpleQueue()
        # The thread refers to the queues only, so that the worker can be garbage collected while the thread waits.
        # Not a daemon: a daemon thread that is inside a kernel when Python exits aborts the process. The thread is
        # told to end before Python joins it, which is earlier than `atexit` functions run. concurrent.futures uses
        # the same private function.
        self._thread = threading.Thread(target=_serve, args=(self._jobs, self._ends), name=name, daemon=False)
        self._finalizer = weakref.finalize(self, self._jobs.put, None)
        threading._register_atexit(self._finalizer)  # type: ignore[attr-defined]
        # In an empty context: where threads inherit contexts, as in free-threaded Python, this thread would otherwise
        # keep what the context of its creator refers to as long as it lives.
        Context().run(self._thread.start)

    def close(self) -> None:
        """End the thread after the job that it is running. Calling this again has no effect."""
        self._finalizer()

    def submit(self, job: Job) -> None:
        """Start a job in the thread. The previous job must have been waited for.

        Args:
            job: The function to call.
        """
        self._jobs.put(job)

    def wait(self, seconds: float) -> BaseException | None:
        """Wait until the job has finished.

        Args:
            seconds: The number of seconds after which to stop waiting.

        Returns:
            The error that the job raised, or None.

        Raises:
            TimeoutError: If the job has not finished in time.
        """
        while True:
            try:
                return self._ends.get(timeout=min(max(seconds, 0.0), INTERRUPT_CHECK_SECONDS))
            except Empty:
                seconds -= INTERRUPT_CHECK_SECONDS
                if seconds <= 0.0:
                    raise TimeoutError from None


def seconds_of(timeout: Timeout) -> float:
    """Return the number of seconds to wait."""
    if timeout is None:
        return math.inf
    if timeout == "auto":
        return AUTO_TIMEOUT_SECONDS
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f'`timeout` must be a number of seconds, "auto" or None, got {timeout!r}.')
    if not timeout > 0:
        raise ValueError(f"`timeout` must be above 0 seconds, got {timeout}.")
    return timeout


def keep_freed_memory() -> bool:
    """Configure the C library to keep freed memory, for the whole process and permanently.

    Nothing is changed if the user has configured this in the environment (`MALLOC_TRIM_THRESHOLD_` and similar
    variables), or if the C library is not glibc.

    Returns:
        Whether the C library accepted the settings.
    """
    if sys.platform != "linux" or any(word in os.environ for word in MALLOC_VARIABLES):
        return False
    library = ctypes.CDLL(None)
    try:
        mallopt = library.mallopt
    except AttributeError:
        # musl has no mallopt.
        return False
    settings = ((M_TRIM_THRESHOLD, TRIM_THRESHOLD), (M_TOP_PAD, TOP_PAD), (M_MMAP_THRESHOLD, MMAP_THRESHOLD))
    answers = [mallopt(name, value) for name, value in settings]
    return answers == [1, 1, 1]


@functools.cache
def _renew_autograd_engine(process: int) -> None:  # noqa: ARG001 - the key of the cache
    """Prepare autograd for several threads in a process that was forked.

    After a fork torch destroys its engine and builds another one when an operation first asks for it, without a lock.
    Two threads that ask at the same time end the process (`PythonEngine::get_python_engine`,
    torch/csrc/autograd/python_engine.cpp, torch 2.13).

    Args:
        process: The ID of this process, for which this is done once.
    """
    torch.autograd.Variable._execution_engine.is_checkpoint_valid()  # noqa: SLF001 - there is no other way


def _serve(jobs: SimpleQueue[Job | None], ends: SimpleQueue[BaseException | None]) -> None:
    """Run job after job on one intra-op thread, until there is none."""
    torch.set_num_threads(1)
    while (job := jobs.get()) is not None:
        end: BaseException | None = None
        try:
            job()
        except BaseException as error:  # noqa: BLE001 - carried to the thread that waits, which raises it
            end = error
        # Dropped before the caller goes on: a job refers to the batch and its graphs.
        del job
        ends.put(end)
        del end
