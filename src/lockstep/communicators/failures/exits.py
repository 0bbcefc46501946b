"""How the processes of a run end: with who started them, after the rank that failed, in few words."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Final, TypeAlias

from lockstep.communicators.failures.watch import Watch
from lockstep.errors import OrderError, PeerError

AGENT: Final = "LOCKSTEP_AGENT"
"""A variable that holds the process number of the agent."""
PR_SET_PDEATHSIG: Final = 1
"""The number by which Linux knows the wish; see prctl(2)."""
PATIENCE: Final = 20.0
"""Seconds that a rank on its way out may take for its threads, its connections and Python's own end."""
GLANCE: Final = 0.05
"""Seconds between two looks."""

ExceptHook: TypeAlias = Callable[[type[BaseException], BaseException, TracebackType | None], object]
"""As `sys.excepthook`."""


def end_with_parent() -> None:
    """Have the system kill this process when the thread that started it has ended; again is harmless.

    It is Linux that does it: not a process that is stuck, nor one that is stopped, stays behind. Elsewhere
    nothing is done.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def end_with_agent(variables: Mapping[str, str]) -> None:
    """Have this process end with the agent of `lockstep run` that started it.

    An agent that ends by itself, or by a signal that can be caught, ends its processes first. This is for the
    other ways. A process that some other program started between the two is that program's.

    Args:
        variables: As `os.environ`.

    Raises:
        ValueError: The variable is no number.
        OrderError: The agent has ended already.
    """
    given = variables.get(AGENT, "0")
    if not given.isdecimal():
        raise ValueError(f"The variable {AGENT} must be the number of a process, got {given!r}.")
    agent = int(given)
    if not agent:
        return
    if os.getppid() == agent:
        end_with_parent()
    if not process_exists(agent):  # asked only now, for it may have ended while the wish was made
        raise OrderError(
            f"The agent of `lockstep run` that started this process, {agent}, has ended. Start the run again."
        )


def process_exists(process: int) -> bool:
    """Return whether there is a process of that number, whosever it is."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # there is one, of another user's
        pass
    return True


@dataclass(frozen=True)
class PeerErrorHook:
    """Ends this process by the error of another rank of this machine: in a line, and after that rank.

    That rank shows the error in full on the same console. A launcher takes the first end that it sees for the
    cause; the failed rank tells the others before it ends, and they may be faster then. Its process exists
    until the launcher has asked for its exit code.

    Attributes:
        rank: This rank.
        processes: The process numbers of the other ranks of this machine.
        watch: Knows whether the failed rank is about to end by itself; for one that hangs nobody waits.
        otherwise: Shows all other errors.
    """

    rank: int
    processes: Mapping[int, int]
    watch: Watch
    otherwise: ExceptHook

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Show the error by which this process ends."""
        cause = error.rank if isinstance(error, PeerError) else None
        process = None if cause is None else self.processes.get(cause)
        if isinstance(error, PeerError) and process is not None and error.traceback:
            headline = str(error).partition("\n")[0]
            sys.stderr.write(f"[rank{self.rank}]: {kind.__name__}: {headline}\n")
        else:
            self.otherwise(kind, error, trace)
        if process is not None and self.watch.cause_is_leaving:
            until = time.monotonic() + PATIENCE
            while process_exists(process) and time.monotonic() < until:
                time.sleep(GLANCE)
