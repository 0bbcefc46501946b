"""Send the error of a rank to the others in place of the message that they wait for, and raise it there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.communicators import traceback_text
from lockstep.errors import PeerError, PeerInterrupt, SignalExit


def describe_error(error: BaseException, *, phase: str) -> dict[str, Any]:
    """Describe an error as a message that `raise_error` reads.

    Args:
        error: The error.
        phase: What this rank was doing.
    """
    return {
        "error": f"{type(error).__name__}: {error}",
        "traceback": traceback_text(error),
        "phase": phase,
        "interrupt": isinstance(error, KeyboardInterrupt),
        "stop": error.number if isinstance(error, SignalExit) else 0,
    }


def raise_error(rank: int, message: Mapping[str, Any]) -> None:
    """Raise the error that a rank describes in its message, if it does.

    Args:
        rank: The rank that sent the message.
        message: The message.

    Raises:
        SignalExit: If a signal on that rank ends the run.
        PeerInterrupt: If that rank was interrupted.
        PeerError: If it failed in another way.
    """
    if "error" not in message:
        return
    if message["stop"]:
        raise SignalExit(message["stop"])
    if message["interrupt"]:
        raise PeerInterrupt(f"Rank {rank} was interrupted.", rank=rank)
    raise PeerError(
        f"Rank {rank} raised {message['error']}\nIts own traceback:\n{message['traceback'].rstrip()}",
        rank=rank,
        phase=message["phase"],
        traceback=message["traceback"],
    )
