"""Count the updates that moved the weights, also where only the device knows which did."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class AppliedUpdates:
    """A count that is read when somebody looks.

    Attributes:
        known: What the host knows of it.
        unread: What a device adds to that: 0-d, an integer.

    >>> applied = AppliedUpdates(1).one_more(unless=torch.tensor(1.0))
    >>> applied.count
    1
    """

    known: int = 0
    unread: torch.Tensor | None = None

    @property
    def count(self) -> int:
        """How many there were; waits for the device if the last are counted there."""
        if self.unread is not None:
            self.known += int(self.unread)
            self.unread = None
        return self.known

    def one_more(self, *, unless: torch.Tensor) -> AppliedUpdates:
        """Return the count after an update of which only the device knows whether it was left out.

        Args:
            unless: 0-d, on a device; above 0 where it was. Nothing waits for it.
        """
        one = (unless == 0).long()
        return AppliedUpdates(self.known, one if self.unread is None else self.unread.to(one.device) + one)
