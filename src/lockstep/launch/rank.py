"""What a launched process does: take its place among the ranks, call the function, tell how it went."""

from __future__ import annotations

import os
import pickle
import socket
import sys
import threading
import traceback
from multiprocessing import set_start_method
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from lockstep.communicators import TIMEOUT, RunEnvironment, end_with_parent
from lockstep.errors import PeerError, PeerInterrupt
from lockstep.launch.outcome import Outcome


def run_rank(
    place: RunEnvironment, timeout: float, method: str | None, call: bytes, *, lifeline: Connection, report: Connection
) -> None:
    """Call the function in this process, and tell the launching one what came of it.

    Args:
        place: This process's place among the ranks.
        timeout: Seconds that a rank waits for another.
        method: The start method of processes to be set for multiprocessing; None for the platform's.
        call: The function and its arguments, pickled.
        lifeline: At its end once the launching process has ended.
        report: Takes one `Outcome`, pickled.
    """
    set_start_method(method, force=True)
    # The launching process reads the end of this one from the pipe, which a forked worker must not keep open.
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=report.close)
    end_with_parent()  # and where the system does not know how, or it has ended already, by a thread
    threading.Thread(target=_end_with, args=(lifeline,), name="lockstep lifeline", daemon=True).start()
    os.environ.update(place.variables() | {TIMEOUT: str(timeout)})
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback_interface())
    torch.set_num_threads(1)
    outcome, exit_code = _outcome(place.rank, call)
    report.send_bytes(outcome)
    report.close()
    if dist.is_initialized() and exit_code == 0:
        dist.destroy_process_group()
    sys.exit(exit_code)


def _end_with(lifeline: Connection) -> None:
    """End this process at once when the launching one is gone, which may have had no time to say so."""
    try:
        lifeline.recv_bytes()
    except (EOFError, OSError):
        os._exit(1)


def _outcome(rank: int, call: bytes) -> tuple[bytes, int]:
    """Call the function; give the pickled outcome, and the process's exit code."""
    try:
        main, args = pickle.loads(call)  # noqa: S301 - from the launching process, by a pipe
        return pickle.dumps(Outcome(rank, value=main(*args))), 0
    except SystemExit as error:
        if not error.code:
            return pickle.dumps(Outcome(rank)), 0
        return pickle.dumps(_raised(rank, error)), error.code if isinstance(error.code, int) else 1
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - told to the launching process, which raises
        # As Python does for a script's last error; the watch tells the other ranks of it at the end.
        sys.last_value = error
        return pickle.dumps(_raised(rank, error)), 1


def _raised(rank: int, error: BaseException) -> Outcome:
    peer = error.rank if isinstance(error, PeerError | PeerInterrupt) and error.rank != rank else None
    phase = error.phase if isinstance(error, PeerError) else ""
    return Outcome(
        rank,
        error=f"{type(error).__name__}: {error}",
        traceback="".join(traceback.format_exception(error)),
        peer=peer,
        phase=phase,
    )


def loopback_interface() -> str:
    """Give the name of the interface that no other machine can reach."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name in {"lo", "lo0"}), "lo")
