"""Errors and warnings for what only this library can know.

Invalid arguments raise `ValueError` or `TypeError`, as everywhere in Python. The classes here are for what no check
of arguments can find: a replica or another process that failed, processes that disagree, a gradient that stayed
non-finite, calls out of order, and a saved state that does not fit.
"""

import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Final

import torch


def printable(text: str) -> str:
    r"""Return a text in which characters that a terminal would obey, such as escapes, are written as escape sequences.

    Args:
        text: The text, which may have been read from a file.

    >>> printable("a\x1b[2J")
    'a\\x1b[2J'
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def few(names: Sequence[str], most: int = 3) -> str:
    """Return the first of some names for a sentence, and how many more there are.

    Args:
        names: The names.
        most: The number of names that are listed at most.

    >>> few(["a", "b", "c"], 2), few([], 2)
    ('a, b and 1 more', '')
    """
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn, and name the innermost line outside of this package and of PyTorch that has led to it.

    Args:
        message: The message.
        category: The class of the warning.
    """
    frame, level = sys._getframe(1), 2  # noqa: SLF001 - `inspect.stack` reads the source of every frame
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith(("lockstep.", "torch.")):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


MEMORY_MESSAGES: Final = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
"""Parts of the messages of a `RuntimeError` by which torch says so: of the CPU's allocator (that of Windows second), of
accelerators whose error has no class of its own, and of libraries that allocate memory themselves."""


def is_memory_error(error: BaseException | None) -> bool:
    """Return whether an error, or one that caused it, says that memory does not suffice.

    Args:
        error: The error; None for none.

    >>> is_memory_error(torch.OutOfMemoryError()), is_memory_error(MemoryError()), is_memory_error(ValueError())
    (True, True, False)
    """
    while error is not None:
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            return True
        if isinstance(error, RuntimeError) and any(each in str(error) for each in MEMORY_MESSAGES):
            return True
        error = error.__cause__
    return False


class LockstepError(Exception):
    """The base class of the errors below, by which you can catch all of them."""


class OrderError(LockstepError, RuntimeError):
    """A method was called before another one that it depends on, or after the end."""


class EndOfDataError(LockstepError, RuntimeError):
    """The iterator ended before the run; the state is that after the last update.

    That of `update` is also a `StopIteration`, so that a loop may end by it.
    """


class PortableKernelsError(LockstepError, RuntimeError):
    """This machine, this build of torch or an operation has no portable kernels, or they were chosen too late."""


class ReplicaError(LockstepError, RuntimeError):
    """The computation of a shard raised an error, which is the ``__cause__``, or its thread did not end in time.

    Attributes:
        device: The device of the replica that failed, as text.
        shard: The index of the shard that it was computing; None if that is not known.
    """

    def __init__(self, message: str, *, device: str, shard: int | None) -> None:
        super().__init__(message)
        self.device = device
        self.shard = shard


class ReplicaInterrupt(KeyboardInterrupt):
    """Ctrl-C was pressed while devices were computing. Code that catches `KeyboardInterrupt` catches it as well.

    Attributes:
        devices: The devices that were computing, as text.
    """

    def __init__(self, message: str, *, devices: list[str]) -> None:
        super().__init__(message)
        self.devices = devices


class NonFiniteError(LockstepError, ArithmeticError):
    """The gradient of a batch was not finite, and no further attempt was possible. The weights are unchanged.

    Attributes:
        parameter: The name of the first parameter whose gradient is not finite.
        tries: The number of attempts for this batch.
    """

    def __init__(self, message: str, *, parameter: str, tries: int) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.tries = tries


class DisagreementError(LockstepError, RuntimeError):
    """Ranks differ in something that must be the same on all of them.

    Attributes:
        rank: The first rank that differs from rank 0.
        subject: What differs: the name of a tensor, or of a field of the configuration.
        update: The number of updates after which the difference was found; None if it does not depend on updates.
    """

    def __init__(self, message: str, *, rank: int, subject: str, update: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.subject = subject
        self.update = update


class FaultError(LockstepError, RuntimeError):
    """A device or a connection has given wrong bits: a shard or a message was checked, and the check failed.

    Nothing of the update has been applied.

    Attributes:
        update: The number of updates that were done; None if that is not known.
        shard: The index of the shard; None if it is not about one.
        rank: The rank that is wrong; None if that could not be decided.
        device: The device that is wrong, as text; None if that could not be decided.
    """

    def __init__(
        self,
        message: str,
        *,
        update: int | None = None,
        shard: int | None = None,
        rank: int | None = None,
        device: str | None = None,
    ) -> None:
        super().__init__(message)
        self.update = update
        self.shard = shard
        self.rank = rank
        self.device = device


class WorkerError(LockstepError, RuntimeError):
    """A process that loads data was killed, or is stopped. The state is that after the last update."""


class PartError(LockstepError, RuntimeError):
    """A part of a dataset cannot be read, holds other samples than when it was counted, or has a bad record."""


class PeerError(LockstepError, RuntimeError):
    """Another rank failed. The state of this rank is that after the last update.

    Attributes:
        rank: The rank that failed; None if only a broken connection shows that one did.
        phase: What that rank was doing, if that is known.
        traceback: The traceback of that rank as text; empty if it could not send one.
    """

    def __init__(self, message: str, *, rank: int | None, phase: str = "", traceback: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.phase = phase
        self.traceback = traceback


class PeerInterrupt(KeyboardInterrupt):
    """Ctrl-C was pressed on another rank, so this rank stops as well, in its state after the last update.

    Code that catches `KeyboardInterrupt` catches it as well.

    Attributes:
        rank: The rank that was interrupted.
    """

    def __init__(self, message: str, *, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class SignalExit(SystemExit):
    """A signal has ended the run after a finished update, and a snapshot of that update is durable.

    Nothing needs to catch it: Python then ends with 128 plus the number of the signal as exit code, as a shell reports
    a process that a signal has ended.

    Attributes:
        number: The number of the signal.
        name: The name of the signal, such as ``"SIGTERM"``.
    """

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number
        self.name = signal.Signals(number).name

    def __str__(self) -> str:
        return f"The run was ended by {self.name}."


class StateError(LockstepError, ValueError):
    """A saved state does not fit the object that it is loaded into. Nothing has been changed."""


class NonFiniteWarning(UserWarning):
    """An update was skipped because its gradient was not finite, or its loss is not finite although its gradient is.

    It is given once per updater.
    """


class SnapshotError(LockstepError, RuntimeError):
    """A snapshot cannot be written, or what is on the disk is not a whole snapshot.

    Attributes:
        file: The name of the file in the folder of the snapshot; None if it is not about a file.
        tensor: The name of the tensor in that file; None if it is not about a tensor.
        expected: The digest that the manifest names, if digests differ.
        found: The digest of what is on the disk, if digests differ.
        damaged: Whether the snapshot is known not to be whole. Otherwise it may be whole where it can be read.
    """

    def __init__(
        self,
        message: str,
        *,
        file: str | None = None,
        tensor: str | None = None,
        expected: str | None = None,
        found: str | None = None,
        damaged: bool = True,
    ) -> None:
        super().__init__(printable(message))
        self.file = file
        self.tensor = tensor
        self.expected = expected
        self.found = found
        self.damaged = damaged


class SnapshotWarning(UserWarning):
    """A snapshot could not be written or read, and the run goes on with the others."""


class SideFileError(LockstepError, RuntimeError):
    """A file beside the snapshots, such as the log, is damaged or no regular file, or is required but not writable."""


class SideFileWarning(UserWarning):
    """A file beside the snapshots, such as the log, is not complete; the run goes on."""


class RandomStreamWarning(UserWarning):
    """Random numbers were drawn from a source that belongs to no shard.

    If the source is torch's default generator, shards run one after the other from then on, with the same result. If it
    is Python's `random` or ``numpy.random``, the result depends on where shards are computed.
    """


class DeterminismWarning(UserWarning):
    """The result of a run may depend on more than its recipe.

    It may not be that of an uninterrupted run on equal kernels, or it depends on where shards are computed, because a
    value outside of the model changed meanwhile, or because a shard that was computed twice gave two results.
    """


class ReplayWarning(UserWarning):
    """Batches are loaded again and discarded, because their source cannot start in the middle."""


def collect_error(call: Callable[[], object]) -> list[BaseException]:
    """Call a function of the user; return what it raised, if anything, so that the caller can raise it later."""
    try:
        call()
    except BaseException as error:  # noqa: BLE001 - raised by the caller when the time has come
        return [error]
    return []
