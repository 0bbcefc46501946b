"""Defer Ctrl-C, except while a model computes or while threads are waited for.

Everything else that a call does (switching modes, opening streams, writing buffers and gradients) then happens either
completely or not at all.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` converts to enums, which takes ten times as long
import threading
from _thread import get_ident
from abc import ABC, abstractmethod
from types import FrameType
from typing import Any, TypeVar

from lockstep.stopping import STOP

Self = TypeVar("Self", bound="DeferredSigint")


class DeferredSigint(ABC):
    """A context manager that defers SIGINT. A signal that has not been delivered is delivered at the end.

    It only has an effect in the main thread, because Python delivers no signals to other threads.
    """

    _handler: Any = None
    _pending = False

    def __enter__(self: Self) -> Self:
        if get_ident() == threading.main_thread().ident:
            handler = _signal.getsignal(_signal.SIGINT)
            # A handler that is not callable (SIG_IGN, SIG_DFL, or one set by C code) cannot be called later, so it
            # stays.
            # Nor does the handler of a run that ends by itself after the update: it raises nothing.
            if callable(handler) and not (STOP.holds_interrupts and handler == STOP.handle):
                self._handler = handler
                _signal.signal(_signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if self._handler is None:
            return
        # The original handler comes first: a signal that arrives between the two lines is then delivered at once.
        _signal.signal(_signal.SIGINT, self._handler)
        # An error that is already on its way must not be replaced by a KeyboardInterrupt.
        if self._pending and error is None:
            self._handler(_signal.SIGINT, None)

    @abstractmethod
    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal by deferring or delivering it.

        Args:
            number: The number of the signal.
            frame: The frame that was interrupted.
        """


class CallSigint(DeferredSigint):
    """A context manager that defers SIGINT for the duration of a call, except inside of its interruptible sections."""

    def __init__(self) -> None:
        self._open = False
        self._thread = get_ident()

    @property
    def interruptible(self) -> InterruptibleSection:
        """A new context manager for a section that may be interrupted.

        Any thread may enter it, but it only has an effect in the main thread. Keeping one section in this object would
        be a reference cycle, so that every forward and backward would leave garbage that only the cycle collector
        frees.
        """
        return InterruptibleSection(self)

    def switch(self, *, opened: bool) -> None:
        """Open or close the section, if the calling thread receives signals, and deliver a deferred signal on opening.

        Args:
            opened: Whether to open the section.
        """
        if self._handler is None or get_ident() != self._thread:
            return
        self._open = opened
        if opened and self._pending:
            # Closed while the handler runs, so that a second signal does not interrupt it.
            self._pending = self._open = False
            self._handler(_signal.SIGINT, None)
            # Reached only if the handler did not raise, which means that the work goes on.
            self._open = True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self._open:
            self._pending = True
            return
        self._open = False
        # The handler usually raises. If it does not, the work goes on and the section is open again.
        self._handler(number, frame)
        self._open = True


class InterruptibleSection:
    """A section inside of which an interrupt is raised immediately.

    Args:
        interrupts: The object that defers interrupts outside of the section.
    """

    __slots__ = ("_switch",)

    def __init__(self, interrupts: CallSigint) -> None:
        # Only the bound method, looked up once: sections are entered once per shard.
        self._switch = interrupts.switch

    def __enter__(self) -> None:
        self._switch(opened=True)

    def __exit__(self, *_: object) -> None:
        self._switch(opened=False)
