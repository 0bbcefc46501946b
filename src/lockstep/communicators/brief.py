"""Let one console show an error once, though every rank ends by it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from lockstep.errors import PeerError

Kind = type[BaseException]


class ExceptHook(Protocol):
    """As `sys.excepthook`."""

    def __call__(self, kind: Kind, error: BaseException, trace: TracebackType | None, /) -> object:
        """Show the error by which a process ends."""


@dataclass(frozen=True)
class BriefPeerErrors:
    """Shows an error of another rank in a line, where that rank shows it in full on the same console.

    Attributes:
        rank: This rank.
        local_size: How many ranks share the console: those of one machine, whose numbers follow each other.
        otherwise: Shows all other errors.
    """

    rank: int
    local_size: int
    otherwise: ExceptHook

    def __call__(self, kind: Kind, error: BaseException, trace: TracebackType | None, /) -> None:
        """Show the error by which this process ends."""
        if isinstance(error, PeerError) and error.traceback and self._is_here(error.rank):
            headline = str(error).partition("\n")[0]
            sys.stderr.write(f"[rank{self.rank}]: {kind.__name__}: {headline}\n")
        else:
            self.otherwise(kind, error, trace)

    def _is_here(self, rank: int | None) -> bool:
        return rank is not None and rank // self.local_size == self.rank // self.local_size
