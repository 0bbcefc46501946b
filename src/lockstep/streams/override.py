"""Give every thread a random stream of its own, so that several can compute shards at once."""

from __future__ import annotations

import threading
from types import TracebackType

import torch

from lockstep.errors import LockstepError, OrderError
from lockstep.streams.kernels import random_kernels, redirect, restore
from lockstep.streams.seeds import SEEDS, check_seed
from lockstep.streams.state import ThreadAwareState
from lockstep.streams.thread import THREAD


class StreamOverrideError(LockstepError, RuntimeError):
    """This torch does not let threads have streams; shards that draw must run one at a time per process."""


class _Installation:
    """The override itself: one for the process, there while anybody owns it."""

    def __init__(self) -> None:
        # Reentrant: the garbage collector may run in any line below, and with it the `discard` of an owner
        # that was forgotten.
        self._lock = threading.RLock()
        self._owners: set[StreamOverride] = set()
        self.library: torch.library.Library | None = None
        self._state = ThreadAwareState()

    def owned_by(self, owner: StreamOverride) -> bool:
        return owner in self._owners

    def add(self, owner: StreamOverride) -> None:
        with self._lock:
            self._owners.add(owner)
            if self.library is None:
                try:
                    self._change_torch()
                except BaseException:
                    self._owners.discard(owner)
                    raise

    def discard(self, owner: StreamOverride) -> None:
        with self._lock:
            self._owners.discard(owner)
            if not self._owners:
                self._change_back()

    def _change_torch(self) -> None:
        try:
            self.library = redirect(random_kernels())
            self._state.install()
        except BaseException as error:
            self._owners.clear()
            self._change_back()
            if not isinstance(error, (AttributeError, KeyError, RuntimeError, TypeError)):
                raise
            reason = f"Threads cannot have random streams with torch {torch.__version__}: {error}."
            raise StreamOverrideError(f"{reason} Compute one shard at a time in each process.") from error

    def _change_back(self) -> None:
        library, self.library = self.library, None
        self._state.remove()
        if library is not None:
            restore(library)


# torch has one dispatcher a process, so there is one of these.
_INSTALLATION = _Installation()


class StreamOverride:
    """One owner's claim that threads draw from streams of their own.

    The first owner changes torch for the whole process, the last one to leave changes it back. While
    it is there, the random CPU operations of a thread inside a `shard_stream` draw from that stream, and
    `torch.get_rng_state`, `set_rng_state`, `manual_seed`, `seed`, `initial_seed`, `torch.random.fork_rng`
    and activation checkpointing act on it. A generator passed explicitly is respected, unless it is
    the default one. Outside of streams nothing changes, but a random operation costs some 3 µs more.

    Methods called on ``torch.default_generator`` itself, and extensions that draw past torch's operators,
    reach the default generator even inside a stream; a `DefaultGeneratorGuard` finds what they draw.

    Install and remove it while no thread is computing: torch's tables must not change under a call. A
    backward pass belongs into the thread and the stream of its forward. CPU work is done there
    anyway; for CUDA it takes ``torch.autograd.set_multithreading_enabled(False)``.

    Determinism: a stream gives the bits of the default generator seeded alike.

    >>> before = torch.get_rng_state()
    >>> with StreamOverride(), shard_stream(7):
    ...     drawn = torch.rand(3)
    >>> torch.equal(torch.get_rng_state(), before)
    True
    >>> torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(7)))
    True
    """

    __slots__ = ()

    @property
    def installed(self) -> bool:
        """Whether this owner holds the override."""
        return _INSTALLATION.owned_by(self)

    def install(self) -> None:
        """Take hold of the override; a second time changes nothing.

        Raises:
            StreamOverrideError: It cannot be installed; nothing has changed.
        """
        _INSTALLATION.add(self)

    def remove(self) -> None:
        """Let go of the override; a second time changes nothing."""
        _INSTALLATION.discard(self)

    def __enter__(self) -> StreamOverride:
        self.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


class shard_stream:  # noqa: N801 - reads as a verb where it is used, like torch.no_grad
    """Let the calling thread's random CPU operations draw from one stream, from its start, inside a ``with``.

    Inside another one the inner stream is drawn from; the outer one then goes on where it was.

    Args:
        seed: The stream, as `stream_seed` gives it; in 0..2³²-1.

    Raises:
        ValueError: The seed is out of range.
        OrderError: On entering, while no `StreamOverride` is installed.
    """

    __slots__ = ("_seed",)

    def __init__(self, seed: int) -> None:
        if not 0 <= seed < SEEDS:
            check_seed(seed)
        self._seed = seed

    def __enter__(self) -> None:
        if _INSTALLATION.library is None:
            raise OrderError("A `StreamOverride` must be installed before a `shard_stream` is entered.")
        depth = THREAD.depth
        if depth == len(THREAD.generators):
            THREAD.generators.append(torch.Generator())
        generator = THREAD.generators[depth]
        generator.manual_seed(self._seed)
        THREAD.depth = depth + 1
        THREAD.generator = generator

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        THREAD.depth = depth = THREAD.depth - 1
        THREAD.generator = THREAD.generators[depth - 1] if depth else None
