"""Hold Ctrl-C while the weights move, so that it never leaves half an update behind."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # the module `signal` wraps it in enums, at ten times the cost
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


class HeldInterrupts:
    """Take note of SIGINT during an update, and raise it where nothing has changed yet.

    The first Ctrl-C asks the replicas to stop at their next shard. A second one, given by somebody who
    does not want to wait for that, is raised at once, unless the weights are already moving. Works in the
    main thread only; elsewhere Python delivers no signals and this does nothing.

    Args:
        on_interrupt: Called at the first Ctrl-C; must be quick.
    """

    def __init__(self, on_interrupt: Callable[[], None]) -> None:
        self._on_interrupt = on_interrupt
        self._handler: Any = None
        self._pending = False
        self._committing = False

    def __enter__(self) -> HeldInterrupts:
        if threading.current_thread() is threading.main_thread():
            handler = _signal.getsignal(_signal.SIGINT)
            if callable(handler):
                self._handler = handler
                _signal.signal(_signal.SIGINT, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handler is not None:
            _signal.signal(_signal.SIGINT, self._handler)
            if self._pending and error is None:
                self._handler(_signal.SIGINT, None)

    def check(self) -> bool:
        """Deliver an interrupt that came since; called where nothing has changed yet.

        Returns:
            Whether one came whose handler lets the work go on; shards may have been left out by then.
        """
        came, self._pending = self._pending, False
        if came:
            self._handler(_signal.SIGINT, None)
        return came

    def commit(self) -> None:
        """Hold every interrupt from here to the end."""
        self.check()
        self._committing = True

    def hold(self) -> None:
        """Hold every interrupt from here to the end, one that came already among them."""
        self._committing = True

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._pending and not self._committing:
            self._pending = False
            self._handler(number, frame)
            return
        self._pending = True
        self._on_interrupt()
