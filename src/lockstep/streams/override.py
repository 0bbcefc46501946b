"""Assign a random stream to each thread, so that several threads can compute shards at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from typing import Any, ClassVar

import torch

from lockstep.errors import LockstepError, OrderError
from lockstep.streams.seeds import NUM_SEEDS, check_seed
from lockstep.streams.state import DEFAULT_GENERATOR, THREAD_STREAMS, default_addresses, replace_names

_DISPATCH_KEY = "BackendSelect"


def random_kernels() -> dict[str, int]:
    """Return the operators of the installed torch that have a CPU kernel and accept a generator.

    Returns:
        By name, with the overload behind a dot, the index of the argument ``generator``.

    >>> random_kernels()["bernoulli_.float"]
    2
    """
    # Listed from the dispatcher instead of written down, so that no kernel of another version of torch is missed.
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("CPU")  # noqa: SLF001 - no public way
    positions = {name: _generator_position(name) for name in sorted(registered) if name.startswith("aten::")}
    return {name.removeprefix("aten::"): index for name, index in positions.items() if index is not None}


@cache  # of a thousand operators, whose schemas do not change, for each updater that begins
def _generator_position(name: str) -> int | None:
    operator, _, overload = name.partition(".")
    arguments = torch._C._get_schema(operator, overload).arguments  # noqa: SLF001 - no public way
    return next((index for index, each in enumerate(arguments) if "Generator" in str(each.type)), None)


def _redirect(undo: ExitStack) -> None:
    """Redirect all random operators to the stream of the calling thread, and register how to undo it.

    Raises:
        RuntimeError: If another library has registered one of the operators for the same dispatch key.
    """
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]  # torch's gap
    # Deleting the library has the same effect, but only after the last reference to it is gone.
    undo.callback(library._destroy)  # noqa: SLF001 - the only way
    for name, position in random_kernels().items():
        # A second registration would replace the first one without an error and break the other library.
        if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", _DISPATCH_KEY):  # noqa: SLF001 - no public way
            raise RuntimeError(f"another library has registered aten::{name} for {_DISPATCH_KEY}")
        call = _with_generator(name, position)
        library.impl(name, call, _DISPATCH_KEY, with_keyset=True)  # type: ignore[no-untyped-call]  # torch's gap


def _with_generator(name: str, position: int) -> Callable[..., Any]:
    """Return the function that fills in the generator of the thread and passes the call on."""
    operator, _, overload = name.partition(".")
    redispatch = getattr(getattr(torch.ops.aten, operator), overload or "default").redispatch
    # All keys below `BackendSelect`, so that redispatching goes on where the call was intercepted.
    below = torch._C._dispatch_keyset_full_after(torch.DispatchKey.BackendSelect)  # noqa: SLF001 - no public way
    cpu = torch.DispatchKey.CPU
    default, addresses = DEFAULT_GENERATOR, default_addresses()

    # Every random operation of the process calls this function, so each line of it has a cost.
    def call(keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        stream = THREAD_STREAMS.generator
        positional = len(args) > position
        given = args[position] if positional else kwargs.get("generator")
        if given is None:
            # Calls for other devices also pass here, and a CPU generator would be an error there.
            chosen = stream if stream is not None and keyset.has(cpu) else None
        elif given._cdata in addresses:  # noqa: SLF001 - the only identity it has
            # An explicit default generator means "the generator in effect here", as modules and `torch.random` pass it.
            # Any other generator was chosen by the user.
            chosen = default if stream is None else stream
        else:
            chosen = given
        if positional:
            args = (*args[:position], chosen, *args[position + 1 :])
        else:
            kwargs["generator"] = chosen
        return redispatch(keyset & below, *args, **kwargs)

    return call


class StreamOverrideError(LockstepError, RuntimeError):
    """The installed torch does not support a stream per thread, so shards that draw must run one at a time."""


class StreamOverride:
    """An override that makes the random CPU operations of each thread draw from the stream of that thread.

    The first owner changes torch for the whole process, and the last one to leave restores it. While the override is
    installed, the random CPU operations of a thread inside a `shard_stream` draw from that stream, and
    `torch.get_rng_state`, `set_rng_state`, `manual_seed`, `seed`, `initial_seed`, `torch.random.fork_rng`, methods of
    ``torch.default_generator`` and activation checkpointing act on it. A generator that is passed explicitly is used as
    it is, unless it is the default one. Outside of streams nothing changes, except that a random operation takes about
    3 µs longer.

    Code that has kept a reference to the default generator from before, and extensions that draw without an operator
    of torch, reach it even inside a stream. `DefaultGeneratorGuard` detects such draws.

    Install and remove the override while no thread is computing, because the tables of torch must not change during a
    call. Run a backward pass in the thread and in the stream of its forward pass. For CPU work this is the default. For
    CUDA it requires ``torch.autograd.set_multithreading_enabled(False)``.

    Determinism: A stream gives the same bits as the default generator with the same seed.

    >>> before = torch.get_rng_state()
    >>> with StreamOverride(), shard_stream(7):
    ...     drawn = torch.rand(3)
    >>> torch.equal(torch.get_rng_state(), before)
    True
    >>> torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(7)))
    True
    """

    __slots__ = ()

    # The dispatcher of torch exists once per process, and so do these. The lock is reentrant: the garbage collector can
    # run at any line below, and with it the finalizer that removes an owner that was not removed explicitly.
    _lock: ClassVar = threading.RLock()
    _owners: ClassVar[set[StreamOverride]] = set()
    _undo: ClassVar[ExitStack | None] = None

    @property
    def installed(self) -> bool:
        """Whether this owner has installed the override."""
        return self in self._owners

    def install(self) -> None:
        """Install the override. Calling it again has no effect.

        Raises:
            StreamOverrideError: If the override cannot be installed. Nothing has changed in that case.
        """
        with self._lock:
            # Added before the installation, so that a finalizer that runs during it does not find an empty set and
            # uninstall.
            self._owners.add(self)
            if StreamOverride._undo is None:
                try:
                    with ExitStack() as stack:
                        _redirect(stack)
                        replace_names(stack)
                        StreamOverride._undo = stack.pop_all()
                except BaseException as error:
                    # No owner may claim an override that is not installed.
                    self._owners.clear()
                    if not isinstance(error, (AttributeError, KeyError, RuntimeError, TypeError)):
                        raise
                    reason = f"Threads cannot have random streams with torch {torch.__version__}: {error}."
                    raise StreamOverrideError(f"{reason} Compute one shard at a time in each process.") from error

    def remove(self) -> None:
        """Remove the override, unless it has other owners. Calling it again has no effect."""
        with self._lock:
            self._owners.discard(self)
            undo = StreamOverride._undo
            if not self._owners and undo is not None:
                StreamOverride._undo = None
                undo.close()

    def __enter__(self) -> StreamOverride:
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class shard_stream:  # noqa: N801 - reads as a verb where it is used, like torch.no_grad
    """Open a stream, from its beginning, for the random CPU operations of the calling thread.

    Used as a context manager. In a nested use the inner stream is drawn from, and the outer one continues afterwards
    where it was.

    Args:
        seed: The seed of the stream, in 0..2³²-1, as `stream_seed` returns it.

    Raises:
        ValueError: If the seed is out of range.
        OrderError: On entering, if no `StreamOverride` is installed.
    """

    __slots__ = ("_outer", "_seed")

    def __init__(self, seed: int) -> None:
        if not 0 <= seed < NUM_SEEDS:
            check_seed(seed)
        self._seed = seed
        self._outer: list[torch.Generator | None] = []

    def __enter__(self) -> None:
        if StreamOverride._undo is None:  # noqa: SLF001 - of this module; a call would cost as much as the rest
            raise OrderError("A `StreamOverride` must be installed before a `shard_stream` is entered.")
        self._outer.append(THREAD_STREAMS.generator)
        THREAD_STREAMS.generator = torch.Generator().manual_seed(self._seed)

    def __exit__(self, *_: object) -> None:
        THREAD_STREAMS.generator = self._outer.pop()
