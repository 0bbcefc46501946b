"""Requests by signals to stop a run, which end it after the current update.

A handler only records the signal. The run looks at the record where its state is that of a finished update: between two
updates, between the batches of an evaluation, and while it waits for data. Work in a handler itself could meet a lock
that the interrupted code holds, or weights of which only some have moved.
"""

from __future__ import annotations

import errno
import mmap
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final, TypeVar

import torch.utils.data

from lockstep.errors import SignalExit

T = TypeVar("T")

NAMES: Final = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")
SIGNALS: Final = [getattr(signal, name) for name in NAMES if hasattr(signal, name)]
"""The signals that end a run after the current update. Windows has no SIGHUP and no SIGUSR1."""


class StopRequest:
    """The request to stop the run of this process.

    Attributes:
        received: The number of the first signal that this process has received; 0 for none.
        agreed: The number of the signal that all ranks know of, at the same point of their runs; 0 for none.
        alone: Whether this process is the whole run, so that what it has received is agreed.
        waits: Whether the main thread waits for data; a signal then raises at once. An attribute, because it is set in
            every update.
        holds_interrupts: Whether SIGINT only leads to a record, so that no code needs to defer it.
    """

    def __init__(self) -> None:
        self.received = 0
        self.agreed = 0
        self.alone = True
        self.holds_interrupts = False
        self.waits = False
        self._interrupted = False
        self._runs = 0
        # Those in the main thread, which can handle signals.
        self._depth = 0
        self._process = 0
        self._previous: dict[int, Any] = {}
        # Shared with forked processes, so that workers know when the run that shields them has ended.
        self._is_over: mmap.mmap | None = None

    @property
    def installed(self) -> bool:
        """Whether signals are handled."""
        return self._depth > 0

    def install(self, *, alone: bool) -> bool:
        """Begin a run, which handles signals and learns of those of other ranks until it calls `uninstall`.

        Signals that are ignored stay ignored, and so do handlers that Python did not set.

        Args:
            alone: Whether this process is the whole run.

        Returns:
            Whether signals are handled. Only the main thread can do that.
        """
        if self._runs == 0:
            self.received = self.agreed = 0
            self._interrupted = self.waits = False
            self.alone = alone
        in_main_thread = threading.current_thread() is threading.main_thread()
        # Before anything is counted, because the handler of SIGINT that is replaced first may raise until then.
        if in_main_thread and self._depth == 0:
            self._set_handlers()
        self._runs += 1
        self._depth += in_main_thread
        return in_main_thread

    def uninstall(self) -> int:
        """End a run, and restore the handlers from before `install` if it is the last one.

        Returns:
            The number of the first signal that this process has received, up to the moment at which its handler was
            restored; 0 for none.
        """
        self._runs -= 1
        if threading.current_thread() is threading.main_thread():
            self._depth -= 1
            if self._depth == 0:
                self._restore_handlers()
        received = self.received
        if self._runs == 0:
            self.received = self.agreed = 0
        return received

    def _set_handlers(self) -> None:
        self._process, self._is_over, self._previous = os.getpid(), mmap.mmap(-1, 1), {}
        # SIGINT first, as in the list: once its handler is replaced, nothing raises here.
        for number in SIGNALS:
            if signal.getsignal(number) not in {None, signal.SIG_IGN}:
                # Recorded first: a signal may arrive as soon as the handler is set.
                self._previous[number] = signal.getsignal(number)
                signal.signal(number, self.handle)
        # A handler of the user may raise, which must not happen while weights move.
        self.holds_interrupts = self._previous.get(signal.SIGINT) is signal.default_int_handler

    def _restore_handlers(self) -> None:
        self.holds_interrupts = False
        if self._is_over is not None:
            self._is_over[0] = 1
            self._is_over = None
        # SIGINT last, because its handler may raise as soon as it is restored.
        for number, previous in reversed(self._previous.items()):
            # A handler that was set during the run stays.
            if signal.getsignal(number) == self.handle:
                signal.signal(number, previous)

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Record a signal, and call the handler that was there before.

        A second SIGINT ends the process at once.

        Args:
            number: The number of the signal.
            frame: The frame that was interrupted.

        Raises:
            SignalExit: If this process waits for data, which may take any time.
        """
        if os.getpid() != self._process:
            self._handle_in_child(number)
            return
        # A handler of the user may print.
        leave_closed_terminal()
        if number == signal.SIGINT and self._interrupted:
            _end_by(number)
        self._interrupted |= number == signal.SIGINT
        self.received = self.received or number
        if self.alone:
            self.agreed = self.received
        previous = self._previous.get(number)
        if callable(previous) and previous is not signal.default_int_handler:
            previous(number, frame)
        if self.waits:
            self.end_wait()

    def end_wait(self) -> None:
        """End a wait for data because of a signal.

        Raises:
            SignalExit: In every case.
        """
        self.waits = False
        raise SignalExit(self.received or self.agreed)

    def follows(self, error: BaseException) -> bool:
        """Return whether a signal ends the run in place of an error: one of printing to a closed terminal.

        A process can notice that its terminal has been closed before it gets SIGHUP.
        """
        return self.installed and isinstance(error, OSError) and leave_closed_terminal()

    def interruptible(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield batches; a signal raises while one of them is waited for.

        Args:
            batches: The batches.

        Raises:
            SignalExit: If there is a signal.
        """
        iterator = iter(batches)
        while True:
            self.waits = True
            try:
                # After the line above, so that no signal is missed in between.
                if self.received or self.agreed:
                    self.end_wait()
                batch = next(iterator)
            except StopIteration:
                return
            finally:
                self.waits = False
            yield batch

    def _handle_in_child(self, number: int) -> None:
        """Handle a signal in a forked process: workers that load data ignore it as long as the run needs them."""
        if torch.utils.data.get_worker_info() is None or self._is_over is None or self._is_over[0]:
            _end_by(number)


@contextmanager
def interrupting() -> Iterator[None]:
    """Raise a `KeyboardInterrupt` in place of the `SignalExit` of Ctrl-C in an interactive session.

    A `SystemExit` would end the session, with all of its objects.
    """
    try:
        yield
    except SignalExit as error:
        # The prompt, which Python and IPython define only where someone types.
        if error.number == signal.SIGINT and hasattr(sys, "ps1"):
            raise KeyboardInterrupt(str(error)) from error
        raise


def leave_closed_terminal() -> bool:
    """Discard from now on what this process prints, if its terminal has been closed.

    Printing raises an error there, which would end a run before its state is written.

    Returns:
        Whether the terminal has been closed since the last call.
    """
    closed = False
    for descriptor in (1, 2):
        try:
            # Of all that may be open there, only a closed terminal refuses to write nothing.
            os.write(descriptor, b"")
        except OSError as error:
            if error.errno == errno.EIO:
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
                closed = True
    return closed


STOP: Final = StopRequest()
"""The request of this process. There is only one, because signals are sent to processes."""


def shield_worker(worker: int) -> None:  # noqa: ARG001 - PyTorch passes it
    """Ignore signals in a worker process until the run that needs it ends.

    A worker that was not forked does not know when the run ends, and ignores them until it is killed.

    Args:
        worker: The number of the worker.
    """
    for number in SIGNALS:
        handler = signal.getsignal(number)
        if handler in {signal.SIG_DFL, signal.default_int_handler}:
            signal.signal(number, signal.SIG_IGN)
        elif handler == STOP.handle:
            # Set again, because the worker's loop has set a handler of PyTorch's in C, of which Python does not know.
            signal.signal(number, handler)


def _end_by(number: int) -> None:
    """End this process at once, as a signal does that is not handled."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
