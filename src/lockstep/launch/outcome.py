"""How a rank ended, and which of several failures caused the others."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

UNGUARDED_HINT = (
    " If its output says that a process was started while another was starting, the call of `launch` belongs under "
    '`if __name__ == "__main__":`.'
)
"""What to add about a process that exited with code 1: that is how an unguarded script ends."""


@dataclass(frozen=True)
class Outcome:
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


def first_cause(outcomes: Iterable[Outcome]) -> Outcome | None:
    """Find the failure that caused the others.

    Args:
        outcomes: The outcomes of all ranks.

    Returns:
        The outcome of a rank that raised its own error, else of a rank that ended without an outcome, else of
        a rank that blames another one; None if no rank failed.

    >>> raised, blaming = Outcome(1, error="ValueError: no"), Outcome(0, error="PeerError: rank 1", peer=1)
    >>> first_cause([blaming, raised]).rank
    1
    """
    failed = [outcome for outcome in outcomes if outcome.failed]
    # Time does not count: the failed rank tells the others before it ends, so one of them may end first.
    ranked = sorted(failed, key=lambda outcome: (outcome.peer is not None, not outcome.error))
    return ranked[0] if ranked else None
