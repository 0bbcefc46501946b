"""Compute as another place would: in another thread, with other numbers in fresh memory, and without caches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from functools import _lru_cache_wrapper, partial
from math import inf
from typing import Any, Final

import torch

from lockstep.errors import DeterminismWarning, is_memory_error, warn
from lockstep.replicas import FreshMemory, ThreadSettings, Worker, inherited, is_memory_limited
from lockstep.state import temporarily
from lockstep.updaters.detectors import defining_modules

LIBRARIES: Final = frozenset({"torch", "lockstep", "builtins"})
"""Packages whose caches hold nothing of a shard."""

UNREPEATABLE: Final = frozenset({None, "gelsy"})
"""Drivers of `torch.linalg.lstsq` on CPUs that start with pivots from memory that torch has not set. No other kernel of
CPUs gives other bits in every call without being known to `torch.use_deterministic_algorithms`."""


class _Watch(FreshMemory):
    """Fills fresh memory, and warns of the function that is known to be not repeatable."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function."""
        made = super().__torch_function__(func, types, args, kwargs)
        if func is torch.linalg.lstsq and made.solution.is_cpu and (kwargs or {}).get("driver") in UNREPEATABLE:
            warn(
                "`torch.linalg.lstsq` with the driver 'gelsy', which is the default on CPUs, gives other bits in every "
                "call. The determinism guarantee does not cover it. Pass driver='gels' for matrices of full rank, or "
                "driver='gelsd'.",
                DeterminismWarning,
            )
        return made


def run_as_elsewhere(
    work: Callable[[], None], users: Iterable[object], device: torch.device, *, in_thread: bool
) -> None:
    """Run the work of one shard as another place would, and warn if it raises there.

    Args:
        work: The function to call.
        users: Functions and objects of the user. Cached functions of the modules that define them are called anew.
        device: The device that the work uses.
        in_thread: Whether to run it in a new thread, under the settings of this one. Where the memory of the process is
            limited it runs in this thread all the same: Python waits forever for a thread that gets no memory in its
            first lines.
    """
    accelerators = [] if device.type == "cpu" else [device]
    settings = ThreadSettings.capture([device.type], accelerators, training=True)

    def run() -> None:
        how = "in another thread, " * in_thread + "without caches and with other numbers in uninitialised memory"
        with warning_of_errors(how), inherited(settings), _Watch(), without_caches(users):
            work()

    if not in_thread or settings.kept or is_memory_limited():
        run()
        return
    worker = Worker(f"lockstep-0-{device}")
    try:
        worker.submit(partial(copy_context().run, run))
        error = worker.wait(inf)
    finally:
        worker.close()
    worker.join()
    if error is not None:
        raise error


@contextmanager
def warning_of_errors(how: str) -> Iterator[None]:
    """Warn of an error of a second computation; the first has raised none, so the update goes on.

    Args:
        how: How the shard is computed once more.
    """
    try:
        yield
    except Exception as error:  # noqa: BLE001 - as above
        # The second computation needs more memory than the first, whose results are still there.
        if not is_memory_error(error):
            warn(
                f"A shard was computed once more, {how}, and raised {type(error).__name__}: {error}. On another device "
                "or rank, or after a resume, it may do so as well. `audit_every=0` leaves this out.",
                DeterminismWarning,
            )


@contextmanager
def without_caches(users: Iterable[object]) -> Iterator[None]:
    """Replace the cached functions of modules by those that they wrap, so that no cache is read, filled or emptied."""
    names = defining_modules(users)
    modules = [sys.modules[name] for name in names if name in sys.modules and name.split(".")[0] not in LIBRARIES]
    with ExitStack() as stack:
        for module in modules:
            cached = {name: each for name, each in vars(module).items() if isinstance(each, _lru_cache_wrapper)}
            wrapped: dict[str, Any] = {name: each.__wrapped__ for name, each in cached.items()}
            stack.enter_context(temporarily(module, **wrapped))
        yield
