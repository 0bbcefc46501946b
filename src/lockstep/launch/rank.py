"""The main function of a launched process: join the other ranks, call the user's function, report the outcome."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing import set_start_method
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from lockstep.communicators import TIMEOUT_ENV, RunEnvironment, end_with_parent, use_loopback
from lockstep.errors import PeerError, PeerInterrupt

UNGUARDED_HINT = (
    " If its output says that a process was started while another was starting, the call of `launch` belongs under "
    '`if __name__ == "__main__":`.'
)
"""What to add about a process that exited with code 1: that is how an unguarded script ends."""


@dataclass(frozen=True)
class RankOutcome:
    """How one rank ended. If only `rank` is set, the rank had not ended when the others were stopped.

    Attributes:
        rank: The rank.
        value: What `main` returned.
        error: The type and the message of the error; empty if none was raised.
        traceback: The traceback of the error as text.
        peer: The rank that the error blames, if it is another one.
        phase: What the failed rank was doing, if that is known.
        exit_code: The exit code of a process that ended without sending an outcome; below 0 for a signal's number.
    """

    rank: int
    value: Any = None
    error: str = ""
    traceback: str = ""
    peer: int | None = None
    phase: str = ""
    exit_code: int | None = None

    @property
    def failed(self) -> bool:
        """Whether the rank raised an error or ended without an outcome."""
        return bool(self.error) or self.exit_code is not None

    @property
    def blamed(self) -> int:
        """The rank that caused this outcome."""
        return self.rank if self.peer is None else self.peer

    def describe(self) -> str:
        """Return a sentence that says how the rank ended, followed by the traceback if there is one."""
        if self.error:
            return f"Rank {self.rank} raised {self.error}\n\n{self.traceback}"
        if self.exit_code is None:
            return f"Rank {self.rank} had not ended when the others were stopped."
        if self.exit_code < 0:
            return f"Rank {self.rank} was killed by {signal.Signals(-self.exit_code).name}."
        exited = f"Rank {self.rank} exited with code {self.exit_code} before `main` returned."
        return exited + (UNGUARDED_HINT if self.exit_code == 1 else "")


def first_cause(outcomes: Iterable[RankOutcome]) -> RankOutcome | None:
    """Find the failure that caused the others.

    Args:
        outcomes: The outcomes of all ranks.

    Returns:
        The outcome of a rank that raised its own error, else of a rank that ended without an outcome, else of
        a rank that blames another one; None if no rank failed.

    >>> raised, blaming = RankOutcome(1, error="ValueError: no"), RankOutcome(0, error="PeerError: rank 1", peer=1)
    >>> first_cause([blaming, raised]).rank
    1
    """
    failed = [outcome for outcome in outcomes if outcome.failed]
    # Time does not count: the failed rank tells the others before it ends, so one of them may end first.
    ranked = sorted(failed, key=lambda outcome: (outcome.peer is not None, not outcome.error))
    return ranked[0] if ranked else None


def run_rank(
    place: RunEnvironment, timeout: float, method: str | None, call: bytes, *, lifeline: Connection, report: Connection
) -> None:
    """Call the user's function in this process, and send the outcome to the launching process.

    Args:
        place: The place of this process among the ranks.
        timeout: Seconds that a rank waits for another before it raises.
        method: The start method of multiprocessing to set; None for the default of the platform.
        call: The function and its arguments, pickled.
        lifeline: A pipe that ends when the launching process has ended.
        report: The pipe to which one pickled `RankOutcome` is written.
    """
    set_start_method(method, force=True)
    # The launching process learns of the end of this one from the pipe, so a forked worker must not keep it open.
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=report.close)
    end_with_parent()
    # The thread is for systems that cannot end a process with its parent, and for a parent that had ended before the
    # call.
    threading.Thread(target=_end_with, args=(lifeline,), name="lockstep lifeline", daemon=True).start()
    os.environ.update(place.variables() | {TIMEOUT_ENV: str(timeout)})
    use_loopback(os.environ)
    # The ranks share the cores of this machine.
    torch.set_num_threads(1)
    outcome, exit_code = _outcome(place.rank, call)
    report.send_bytes(outcome)
    report.close()
    if dist.is_initialized() and exit_code == 0:
        dist.destroy_process_group()
    sys.exit(exit_code)


def _end_with(lifeline: Connection) -> None:
    """Wait until the launching process has ended, and end this process at once."""
    try:
        lifeline.recv_bytes()
    except (EOFError, OSError):
        # `sys.exit` would end only this thread.
        os._exit(1)


def _outcome(rank: int, call: bytes) -> tuple[bytes, int]:
    """Call the function, and return the pickled outcome and the exit code of this process."""
    try:
        main, args = pickle.loads(call)  # noqa: S301 - from the launching process, by a pipe
        return pickle.dumps(RankOutcome(rank, value=main(*args))), 0
    except SystemExit as error:
        if not error.code:
            return pickle.dumps(RankOutcome(rank)), 0
        return pickle.dumps(_raised(rank, error)), error.code if isinstance(error.code, int) else 1
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - reported to the launching process, which raises
        # Python does the same for an error that ends a script, and the watch reports it to the other ranks at the end.
        sys.last_value = error
        return pickle.dumps(_raised(rank, error)), 1


def _raised(rank: int, error: BaseException) -> RankOutcome:
    """Return the outcome of a rank that raised an error."""
    # The error is sent as text, because it may not be picklable, or its class not be importable in the launching
    # process.
    peer = error.rank if isinstance(error, PeerError | PeerInterrupt) and error.rank != rank else None
    phase = error.phase if isinstance(error, PeerError) else ""
    return RankOutcome(
        rank,
        error=f"{type(error).__name__}: {error}",
        traceback="".join(traceback.format_exception(error)),
        peer=peer,
        phase=phase,
    )
