"""How a rank ended, and which end of several was the first cause of the others."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

UNGUARDED = (
    " If it said that a process was started while another was starting, the call of `launch` belongs under "
    '`if __name__ == "__main__":`.'
)


@dataclass(frozen=True)
class Outcome:
    """How one rank ended; with nothing but `rank`, that it had not ended when the others were stopped.

    Attributes:
        rank: Whose end it is.
        value: What `main` returned.
        error: The error's type and message; empty where none was raised.
        traceback: The error's traceback as text.
        peer: The rank that the error blames, if it is another's.
        phase: What the failed rank was doing, if that is known.
        exit_code: Of a process that ended without a word; below 0 for a signal's number.
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
        """Whether it ended by anything but returning."""
        return bool(self.error) or self.exit_code is not None

    @property
    def blamed(self) -> int:
        """The rank whose failure this is."""
        return self.rank if self.peer is None else self.peer

    def describe(self) -> str:
        """Say it in a sentence, followed by the traceback if there is one."""
        if self.error:
            return f"Rank {self.rank} raised {self.error}\n\n{self.traceback}"
        if self.exit_code is None:
            return f"Rank {self.rank} had not ended when the others were stopped."
        if self.exit_code < 0:
            return f"Rank {self.rank} was killed by {signal.Signals(-self.exit_code).name}."
        exited = f"Rank {self.rank} exited with code {self.exit_code} before `main` returned."
        return exited + (UNGUARDED if self.exit_code == 1 else "")


def first_cause(outcomes: Iterable[Outcome]) -> Outcome | None:
    """Give the failure that the others follow from; None where all ranks returned.

    A rank's own error explains most, then an end without a word, then one rank's report about another.

    >>> raised, told = Outcome(1, error="ValueError: no"), Outcome(0, error="PeerError: rank 1", peer=1)
    >>> first_cause([told, raised]).rank
    1
    """
    failed = [outcome for outcome in outcomes if outcome.failed]
    ranked = sorted(failed, key=lambda outcome: (outcome.peer is not None, not outcome.error))
    return ranked[0] if ranked else None
