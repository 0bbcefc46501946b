"""Count the updates that moved the weights, also where only the device knows which did."""

from __future__ import annotations

import torch


class AppliedUpdates:
    """A count that names its successor, and is read when somebody looks.

    Args:
        count: What the host knows of it.
        unread: What a device adds to that: 0-d, an integer.

    >>> applied = AppliedUpdates().one_more(unless=None).one_more(unless=torch.tensor(1.0))
    >>> applied.count
    1
    """

    def __init__(self, count: int = 0, unread: torch.Tensor | None = None) -> None:
        self._count = count
        self._unread = unread

    @property
    def count(self) -> int:
        """How many there were; waits for the device if the last are counted there."""
        if self._unread is not None:
            self._count += int(self._unread)
            self._unread = None
        return self._count

    def one_more(self, *, unless: torch.Tensor | None) -> AppliedUpdates:
        """Count an update.

        Args:
            unless: 0-d, on a device; above 0 where it was left out after all. Nothing waits for it.
        """
        if unless is None:
            return AppliedUpdates(self._count + 1, self._unread)
        one = (unless == 0).long()
        return AppliedUpdates(self._count, one if self._unread is None else self._unread.to(one.device) + one)
