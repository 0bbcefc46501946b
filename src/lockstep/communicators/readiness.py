"""Which buckets have all they need, told by one thread to another."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Collection, Sequence

from lockstep.errors import OrderError


class Readiness:
    """Buckets that become ready as the tensors they need are brought.

    Args:
        needs: The tensors that each bucket waits for.

    >>> readiness = Readiness([{2, 1}, {1, 0}, set()])
    >>> readiness.brought(2)
    >>> readiness.brought(1)
    >>> [readiness.is_ready(bucket) for bucket in range(3)]
    [True, False, True]
    """

    def __init__(self, needs: Sequence[Collection[int]]) -> None:
        self._given_up = False
        self._ready = [threading.Event() for _ in needs]
        self._left = [len(each) for each in needs]
        self._waiting: defaultdict[int, list[int]] = defaultdict(list)
        for bucket, each in enumerate(needs):
            if not each:
                self._ready[bucket].set()
            for index in each:
                self._waiting[index].append(bucket)

    def brought(self, index: int) -> None:
        """Count a tensor in; called by one thread only."""
        for bucket in self._waiting[index]:
            self._left[bucket] -= 1
            if self._left[bucket] == 0:
                self._ready[bucket].set()

    def is_ready(self, bucket: int) -> bool:
        """Tell whether all that a bucket needs has been brought."""
        return self._ready[bucket].is_set() and not self._given_up

    def wait(self, bucket: int) -> None:
        """Wait until all that a bucket needs has been brought.

        Raises:
            OrderError: Nothing more will be.
        """
        self._ready[bucket].wait()
        if self._given_up:
            raise OrderError("Everything announced must be brought before Python ends.")

    def give_up(self) -> None:
        """Let nobody wait any longer."""
        self._given_up = True
        for each in self._ready:
            each.set()
