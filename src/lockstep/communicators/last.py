"""Let a process that ends by another rank's error end later than that rank."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Final

from lockstep.communicators.brief import ExceptHook, Kind
from lockstep.communicators.orphan import process_exists
from lockstep.communicators.watch import Watch
from lockstep.errors import PeerError

PATIENCE: Final = 20.0
"""Seconds that a rank on its way out may take for its threads, its connections and Python's own end."""
GLANCE: Final = 0.05
"""Seconds between two looks."""


@dataclass(frozen=True)
class EndsAfterCause:
    """Stays until the rank that failed has ended, for a launcher takes the first end it sees for the cause.

    The failed rank says so before it ends, and the others may be faster then. It exists until its launcher
    has asked for its exit code.

    Attributes:
        watch: Knows whether that rank is about to end by itself; for one that hangs nobody waits.
        processes: The process numbers of the ranks of this machine.
        otherwise: Shows the error first.
    """

    watch: Watch
    processes: Mapping[int, int]
    otherwise: ExceptHook

    def __call__(self, kind: Kind, error: BaseException, trace: TracebackType | None, /) -> None:
        """Show the error by which this process ends."""
        self.otherwise(kind, error, trace)
        cause = error.rank if isinstance(error, PeerError) and self.watch.cause_is_leaving else None
        if cause is not None and cause in self.processes:
            _await_end(self.processes[cause])


def _await_end(process: int) -> None:
    until = time.monotonic() + PATIENCE
    while process_exists(process) and time.monotonic() < until:
        time.sleep(GLANCE)
