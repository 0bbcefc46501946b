"""End with the process that started this one, even if that is killed."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Mapping
from typing import Final

from lockstep.errors import OrderError

AGENT: Final = "LOCKSTEP_AGENT"
"""A variable that holds the process number of the agent."""
PR_SET_PDEATHSIG: Final = 1
"""The number by which Linux knows the wish; see prctl(2)."""


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
    """Tell whether there is a process of that number, whosever it is."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # there is one, of another user's
        pass
    return True
