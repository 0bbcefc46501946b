"""Let Ctrl-C through where a model computes or threads are waited for, and hold it everywhere else.

What is done around that (modes switched, streams opened, buffers and gradients written) then happens as a
whole or not at all.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # the module `signal` wraps it in enums, at ten times the cost
import threading
from _thread import get_ident
from abc import ABC, abstractmethod
from types import FrameType, TracebackType
from typing import Any, TypeVar

Self = TypeVar("Self", bound="DeferredSigint")


class DeferredSigint(ABC):
    """Take note of SIGINT inside of a ``with``; one that nobody delivered is delivered at its end.

    Works in the main thread only; elsewhere Python delivers no signals and this does nothing.
    """

    _handler: Any = None
    _pending = False

    def __enter__(self: Self) -> Self:
        if get_ident() == threading.main_thread().ident:
            handler = _signal.getsignal(_signal.SIGINT)
            if callable(handler):
                self._handler = handler
                _signal.signal(_signal.SIGINT, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handler is None:
            return
        _signal.signal(_signal.SIGINT, self._handler)
        if self._pending and error is None:
            self._handler(_signal.SIGINT, None)

    @abstractmethod
    def _note(self, number: int, frame: FrameType | None) -> None:
        """Hold a signal, or deliver it."""


class CallSigint(DeferredSigint):
    """Hold SIGINT for the length of a call, but for its windows."""

    def __init__(self) -> None:
        self._open = False
        self._thread = get_ident()

    @property
    def window(self) -> Window:
        """A context manager, entered by any thread around what may be interrupted; of effect in the main one.

        It is made anew for every caller: kept here, it would be a reference cycle, and every forward and
        backward would leave garbage that only the cycle collector frees.
        """
        return Window(self)

    def switch(self, *, opened: bool) -> None:
        """Open or shut the window, if this is the thread that gets signals; deliver what is held."""
        if self._handler is None or get_ident() != self._thread:
            return
        self._open = opened
        if opened and self._pending:
            self._pending = self._open = False
            self._handler(_signal.SIGINT, None)
            self._open = True  # the handler lets the work go on

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self._open:
            self._pending = True
            return
        self._open = False
        self._handler(number, frame)
        self._open = True


class Window:
    """Within it an interrupt is raised at once.

    Args:
        interrupts: What holds it outside.
    """

    __slots__ = ("_switch",)

    def __init__(self, interrupts: CallSigint) -> None:
        self._switch = interrupts.switch

    def __enter__(self) -> None:
        self._switch(opened=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._switch(opened=False)
