"""The report about a failed rank, and how calls that wait for that rank are ended."""

from __future__ import annotations

import json
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist

from lockstep.errors import PeerError

MAX_TRACEBACK_LENGTH: Final = 20_000
"""Characters. Of a longer traceback only the end is sent, which tells most about the error."""
IN_EVERY_PROCESS: Final = (
    "What processes do together, such as lockstep.snapshots.save or trainer.predict, must be called in every process, "
    "and not under `if trainer.is_main:`; rank 0 writes."
)
"""What to do where other ranks wait for a rank, or have received something else from it than they expected."""
UNUSED_TAG: Final = 0x4C53
"""A tag under which no message is ever sent."""


@dataclass(frozen=True)
class Failure:
    """A report about a rank that failed.

    Attributes:
        rank: The rank that failed; None if only a broken connection shows that one did.
        what: What happened, to follow the words "Rank 3", as in "raised ValueError: no".
        phase: What the rank was doing according to its last heartbeat; empty if there was none.
        traceback: The traceback of its error as text; empty if the rank could not send one.
        exiting: Whether its process has ended or is about to end by itself.
        remedy: What to do about it, as a sentence; empty if that is not known.
    """

    rank: int | None
    what: str
    phase: str = ""
    traceback: str = ""
    exiting: bool = False
    remedy: str = ""

    @classmethod
    def raised(cls, rank: int, error: BaseException, phase: str) -> Failure:
        """Describe an error that this rank raised itself."""
        return cls(rank, f"raised {type(error).__name__}: {error}", phase, traceback_text(error), exiting=True)

    @classmethod
    def from_bytes(cls, data: bytes) -> Failure:
        """Create the report that `to_text` wrote."""
        return cls(**json.loads(data))

    def to_text(self) -> str:
        """Return the report as JSON."""
        return json.dumps(asdict(self))

    def error(self) -> PeerError:
        """Return the error that the other ranks raise."""
        who = "Another rank" if self.rank is None else f"Rank {self.rank}"
        phase = f" It was last heard in the phase {self.phase!r}." if self.phase else ""
        trace = f"\n\nIts own traceback:\n{self.traceback}" if self.traceback else ""
        remedy = f" {self.remedy}" if self.remedy else ""
        message = f"{who} {self.what}.{phase}{remedy}{trace}"
        return PeerError(message, rank=self.rank, phase=self.phase, traceback=self.traceback)


def traceback_text(error: BaseException) -> str:
    """Return the traceback of an error as text for the other ranks, which is cut to `MAX_TRACEBACK_LENGTH`."""
    return "".join(traceback.format_exception(error))[-MAX_TRACEBACK_LENGTH:]


def is_of_transport(error: RuntimeError) -> bool:
    """Return whether an error of a collective call may come from another rank, or from the connection to it.

    torch also raises `RuntimeError` for a call that this rank cannot make, which says nothing about the others: without
    NumPy, for arguments that do not fit, or if there is no such network interface.
    """
    message = str(error)
    # The errors of gloo have no class of their own. All have the place in its source, except for those after a timeout.
    of_gloo = any(text in message for text in ("gloo/", "caused pair closure", "timed out"))
    return isinstance(error, dist.DistError) or (of_gloo and "enforce fail" not in message)


def abort_group(group: dist.ProcessGroup) -> None:
    """Abort a process group: every call that waits in it raises, and so do later calls.

    Args:
        group: The process group.
    """
    backends = dist.get_backend_config(group)
    if "nccl" in backends:
        group._get_backend(torch.device("cuda")).abort()  # noqa: SLF001 - the only way to it
    if "gloo" in backends:
        # Gloo's own `abort` does not end calls that wait already. A receive that times out does: it closes all
        # connections of the group. So one is started here that no rank answers, and its timeout is expected.
        peer = (group.rank() + 1) % group.size()
        with suppress(RuntimeError):
            group.recv([torch.empty(1)], peer, UNUSED_TAG).wait(timedelta(milliseconds=1))
