"""Let Python end though sums are under way that nobody will finish."""

from __future__ import annotations

import threading
import weakref
from typing import Protocol


class Background(Protocol):
    """What a thread of its own works for, that Python would wait for at its end."""

    def give_up(self) -> None:
        """Let the thread end; called at Python's end, by the main thread."""


class Underway:
    """Gives up, when Python ends, what threads are doing in the background.

    An error between the beginning of a sum and its end may leave a thread that waits for what nobody brings.
    """

    def __init__(self) -> None:
        self._works = weakref.WeakSet[Background]()
        # Python joins its threads before `atexit` functions run, and calls these before that.
        threading._register_atexit(_give_up, weakref.ref(self))  # type: ignore[attr-defined]

    def add(self, work: Background) -> None:
        """Take in what has a thread; it is let go of by itself."""
        self._works.add(work)

    def give_up(self) -> None:
        """Let all threads end."""
        for work in list(self._works):
            work.give_up()


def _give_up(reference: weakref.ref[Underway]) -> None:
    underway = reference()
    if underway is not None:
        underway.give_up()
