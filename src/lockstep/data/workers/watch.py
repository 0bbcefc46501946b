"""Read batches from worker processes, and name a worker that was killed or is stopped."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Final

from lockstep.errors import WorkerError

POLL_INTERVAL: Final = 5.0
"""Seconds between two checks of the workers while a batch is waited for."""
STOPPED_TIMEOUT: Final = 20.0
"""Seconds of waiting after which a stopped worker ends the run, as a stopped rank does."""
EXIT_TIMEOUT: Final = 1.0
"""Seconds that a process whose connections have ended may take to end itself."""
LOST: Final = "DataLoader worker (pid"
"""How the message begins with which PyTorch reports that a worker has ended; the error has no class of its own."""


def watched(stream: Iterator[Any]) -> Iterator[Any]:
    """Return an iterator that checks the workers of a DataLoader while it waits for them; another one as it is.

    The returned iterator raises a `WorkerError` if a worker was killed, or has been stopped for a while.

    Args:
        stream: The iterator of any source of batches.
    """
    workers = getattr(stream, "_workers", ())
    if not workers:
        return stream
    _find_in_waits()
    return _checked(stream, workers)


def _checked(stream: Iterator[Any], workers: Any) -> Iterator[Any]:
    """Yield batches, and check the workers that load them."""
    wait = _Wait([worker.pid for worker in workers])
    # A thread, because PyTorch may wait for a worker in a read from a socket, which has no time limit.
    watching = threading.Thread(target=wait.watch, name="lockstep loader watch", daemon=True)
    watching.start()
    try:
        while True:
            wait.since = time.monotonic()
            try:
                batch = next(stream)
            except StopIteration:
                return
            except (RuntimeError, ConnectionError, EOFError) as error:
                how = wait.found(workers, error)
                if not how:
                    raise
                raise WorkerError(f"{how} The state is that after the last update.") from error
            wait.since = None
            yield batch
    finally:
        wait.ended.set()
        watching.join()


class _Wait:
    """A wait for batches, during which stopped workers are killed, so that it ends.

    Attributes:
        since: The time at which the wait began; None while there is none.
        killed: The process IDs of the workers that were killed.
        ended: Set when there are no more waits.
    """

    def __init__(self, processes: Sequence[int]) -> None:
        self._processes = processes
        self.since: float | None = None
        self.killed: list[int] = []
        self.ended = threading.Event()

    def found(self, workers: Any, error: Exception) -> str:
        """Return how a worker was lost, if an error says so.

        Args:
            workers: The worker processes.
            error: The error that a wait for a batch has raised.
        """
        if self.killed:
            return (
                f"A process that loads data (pid {self.killed[0]}) was stopped, and no batch arrived for "
                f"{STOPPED_TIMEOUT:g} s. It was killed. Start the run again."
            )
        remedy = "If memory ran out, use fewer workers or smaller batches."
        if str(error).startswith(LOST):
            return f"A process that loads data has ended: {str(error).strip()} {remedy}"
        if isinstance(error, ConnectionError | EOFError):
            # The connection ends a moment before the process does.
            deadline = time.monotonic() + EXIT_TIMEOUT
            while time.monotonic() < deadline:
                for worker in workers:
                    if not worker.is_alive():
                        code = worker.exitcode
                        return f"A process that loads data (pid {worker.pid}) has ended, exit code {code}. {remedy}"
                time.sleep(EXIT_TIMEOUT / 100)
        return ""

    def watch(self) -> None:
        """Kill workers that are stopped after a long wait. It is the only way to end a stopped process."""
        stopped: set[int] = set()
        while not self.ended.wait(POLL_INTERVAL):
            # Twice, because after Ctrl-Z this process may go on before its workers do.
            before, stopped = stopped, set(filter(_is_stopped, self._processes))
            since = self.since
            if since is not None and time.monotonic() - since >= STOPPED_TIMEOUT:
                for process in before & stopped:
                    self.killed.append(process)
                    with suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)


def _is_stopped(process: int) -> bool:
    """Return whether a process is stopped by a signal. Only Linux can tell."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    # The name in parentheses may contain anything.
    return stat.rpartition(")")[2].split()[0] == "T"


def _find_in_waits() -> None:
    """Keep PyTorch from raising the death of a worker wherever the main thread is, such as while weights move.

    A wait for data finds it: at once if a batch of the worker is on its way, and otherwise within 5 s.
    """
    number = getattr(signal, "SIGCHLD", None)
    if number is None or threading.current_thread() is not threading.main_thread():
        return
    handler = signal.getsignal(number)
    if not callable(handler) or not getattr(handler, "__module__", "").startswith("torch.utils.data"):
        return

    def handle(number: int, frame: FrameType | None) -> None:
        with suppress(RuntimeError):
            handler(number, frame)

    signal.signal(number, handle)
