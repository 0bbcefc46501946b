"""End the processes of a run in order: with their launcher, and after the rank that failed."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Final, TypeAlias

from lockstep.communicators.environment import shutdown_timeout_for
from lockstep.communicators.failures.watch import Watch
from lockstep.errors import OrderError, PeerError
from lockstep.stopping import STOP

AGENT_ENV: Final = "LOCKSTEP_AGENT"
"""The variable that holds the process ID of the agent of `lockstep run`."""
AGENT_INTERVAL: Final = 0.5
"""Seconds between two checks whether the agent exists."""
PR_SET_PDEATHSIG: Final = 1
"""The option of Linux's prctl(2) that sets the signal sent to a process when its parent ends."""
EXIT_TIMEOUT: Final = 20.0
"""Seconds that a failed rank may take to end its threads, its connections and the interpreter."""
POLL_INTERVAL: Final = 0.05
"""Seconds between two checks whether a process still exists."""

ExceptHook: TypeAlias = Callable[[type[BaseException], BaseException, TracebackType | None], object]
"""The type of `sys.excepthook`."""


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Ask the system to send this process a signal when the thread that started it ends, by default to kill it.

    Only Linux can do that; elsewhere nothing happens. The kernel sends the signal, so it also reaches a process
    that hangs or is stopped. You may call this more than once.

    Args:
        number: The number of the signal.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


class AgentDeadline:
    """Gives this process time to write its state when the agent of `lockstep run` is killed, until it is closed.

    The system then sends SIGTERM, which the process handles, instead of SIGKILL. A thread ends the process if that
    takes longer than the agent itself would have waited. It does so at once after Ctrl-C, because the agent ends by
    a second one.

    Args:
        variables: The environment variables, such as `os.environ`. Without those of an agent nothing happens.
    """

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._closed = threading.Event()
        self._agent = os.getppid()
        self._thread: threading.Thread | None = None
        if variables.get(AGENT_ENV) != str(self._agent):
            return
        seconds = shutdown_timeout_for(variables)
        end_with_parent(signal.SIGTERM)
        self._thread = threading.Thread(target=self._watch_agent, args=(seconds,), name="lockstep agent", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Restore that this process is killed together with its agent."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            end_with_parent()

    def _watch_agent(self, seconds: float) -> None:
        while not self._closed.wait(AGENT_INTERVAL):
            if os.getppid() != self._agent:
                if STOP.received == signal.SIGINT or not self._closed.wait(seconds):
                    os.kill(os.getpid(), signal.SIGKILL)
                return


def end_with_agent(variables: Mapping[str, str]) -> None:
    """Ask the system to end this process together with the agent of `lockstep run` that started it.

    An agent that ends by itself, or by a signal that it can catch, ends its processes first. This call covers the
    signals that cannot be caught. It does nothing for a process that was started by another program in between.

    Args:
        variables: The environment variables, such as `os.environ`.

    Raises:
        ValueError: If the variable ``LOCKSTEP_AGENT`` does not hold a process ID.
        OrderError: If the agent has ended already.
    """
    given = variables.get(AGENT_ENV, "0")
    if not given.isdecimal():
        raise ValueError(f"The variable {AGENT_ENV} must be a process ID, got {given!r}.")
    agent = int(given)
    if not agent:
        return
    if os.getppid() == agent:
        end_with_parent()
    # The check must follow the request: otherwise an agent that ends in between would go unnoticed.
    if not process_exists(agent):
        raise OrderError(
            f"The agent of `lockstep run` that started this process, {agent}, has ended. Start the run again."
        )


def process_exists(process: int) -> bool:
    """Return whether a process with this ID exists, no matter which user owns it."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        # The process exists, but belongs to another user.
        pass
    return True


@dataclass(frozen=True)
class PeerErrorHook:
    """A `sys.excepthook` for ranks that end because another rank of the same machine has failed.

    It shortens the `PeerError` to one line, because the failed rank prints its own error in full on the same
    console. It also lets the failed rank end first. A launcher takes the first process that ends for the cause,
    and other ranks may be faster than the failed one, which reports its error to them before it ends. A process
    exists until its launcher has read its exit code.

    Attributes:
        rank: The rank of this process.
        processes: The process IDs of the other ranks of this machine, by rank.
        watch: The watch that knows whether the failed rank is about to end. The hook does not wait for one that hangs.
        next_hook: The hook that shows all other errors.
    """

    rank: int
    processes: Mapping[int, int]
    watch: Watch
    next_hook: ExceptHook

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Show the error that ends this process, and wait for the failed rank if there is one."""
        failed_rank = error.rank if isinstance(error, PeerError) else None
        process = None if failed_rank is None else self.processes.get(failed_rank)
        # If the error has no traceback, the failed rank may have printed nothing, so the whole error is shown.
        if isinstance(error, PeerError) and process is not None and error.traceback:
            headline = str(error).partition("\n")[0]
            sys.stderr.write(f"[rank{self.rank}]: {kind.__name__}: {headline}\n")
        else:
            self.next_hook(kind, error, trace)
        if process is not None and self.watch.failed_rank_is_exiting:
            deadline = time.monotonic() + EXIT_TIMEOUT
            while process_exists(process) and time.monotonic() < deadline:
                time.sleep(POLL_INTERVAL)
