"""What a rank lets the others know about a failure, and how calls end that wait for a lost rank."""

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

LONGEST: Final = 20_000
"""Characters of a traceback that travel: its end, which says most."""
NOBODYS_TAG: Final = 0x4C53
"""A tag that no message has."""


@dataclass(frozen=True)
class Failure:
    """What became of a rank.

    Attributes:
        rank: Whose failure it is; None where only a connection tells that one failed.
        what: Follows the words "Rank 3", as in "raised ValueError: no".
        phase: What it was doing when it was last heard; empty where it never was.
        traceback: Of its error, as text; empty where it could not send one.
        leaving: Whether its process is on its way to its end, if not there already.
    """

    rank: int | None
    what: str
    phase: str = ""
    traceback: str = ""
    leaving: bool = False

    @classmethod
    def raised(cls, rank: int, error: BaseException, phase: str) -> Failure:
        """Describe an error of this rank's own."""
        text = "".join(traceback.format_exception(error))
        return cls(rank, f"raised {type(error).__name__}: {error}", phase, text[-LONGEST:], leaving=True)

    @classmethod
    def from_bytes(cls, data: bytes) -> Failure:
        """Read what `to_text` wrote."""
        return cls(**json.loads(data))

    def to_text(self) -> str:
        """Write it as JSON."""
        return json.dumps(asdict(self))

    def error(self) -> PeerError:
        """Give the error that it is for the other ranks."""
        who = "Another rank" if self.rank is None else f"Rank {self.rank}"
        doing = f" It was last heard in the phase {self.phase!r}." if self.phase else ""
        trace = f"\n\nIts own traceback:\n{self.traceback}" if self.traceback else ""
        message = f"{who} {self.what}.{doing}{trace}"
        return PeerError(message, rank=self.rank, phase=self.phase, traceback=self.traceback)


def break_group(group: dist.ProcessGroup) -> None:
    """Make every call that waits in a process group raise, now and from now on.

    NCCL has a call for that. Gloo's `abort` leaves waiting calls as they are; but a receive that runs out of
    time closes all connections of its group, so one is begun that nobody will ever answer.
    """
    backends = dist.get_backend_config(group)
    if "nccl" in backends:
        group._get_backend(torch.device("cuda")).abort()  # noqa: SLF001 - the only way to it
    if "gloo" in backends:
        peer = (group.rank() + 1) % group.size()
        with suppress(RuntimeError):  # that it runs out of time is what it is for
            group.recv([torch.empty(1)], peer, NOBODYS_TAG).wait(timedelta(milliseconds=1))
