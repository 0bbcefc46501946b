"""Compute as another place would: in another thread, with other numbers in fresh memory, and without caches."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from functools import _lru_cache_wrapper, partial
from math import inf
from types import ModuleType
from typing import Any, Final

import torch

from lockstep.errors import DeterminismWarning
from lockstep.replicas import FreshMemory, ThreadSettings, Worker, inherited
from lockstep.updaters.detectors import defining_modules

LIBRARIES: Final = frozenset({"torch", "lockstep", "builtins"})
"""Packages whose caches hold nothing of a shard."""


def run_as_elsewhere(
    work: Callable[[], None], users: Iterable[object], device: torch.device, *, in_thread: bool
) -> None:
    """Run the work of one shard as another place would, and warn if it raises there.

    Args:
        work: The function to call.
        users: Functions and objects of the user. Cached functions of the modules that define them are called anew.
        device: The device that the work uses.
        in_thread: Whether to run it in a new thread, under the settings of this one.
    """
    accelerators = [] if device.type == "cpu" else [device]
    settings = ThreadSettings.capture([device.type], accelerators, training=True)

    def run() -> None:
        try:
            with inherited(settings), FreshMemory(), _without_caches(users):
                work()
        except Exception as error:  # noqa: BLE001 - the first computation has raised none, so the update goes on
            warnings.warn(
                f"A shard was computed once more, {'in another thread, ' if in_thread else ''}without cached results "
                f"and with other numbers in memory that is not initialised, and raised {type(error).__name__}: "
                f"{error}. On another device or rank it may do so as well. `audit_every=0` leaves this out.",
                DeterminismWarning,
                stacklevel=2,
            )

    if not in_thread or settings.kept:
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
def _without_caches(users: Iterable[object]) -> Iterator[None]:
    """Replace the cached functions of modules by those that they wrap, so that no cache is read, filled or emptied."""
    names = defining_modules(users)
    modules = [sys.modules[name] for name in names if name in sys.modules and name.split(".")[0] not in LIBRARIES]
    cached = [(module, name, each) for module in modules for name, each in _cached(module)]
    for module, name, each in cached:
        setattr(module, name, each.__wrapped__)
    try:
        yield
    finally:
        for module, name, each in cached:
            setattr(module, name, each)


def _cached(module: ModuleType) -> list[tuple[str, Any]]:
    return [(name, each) for name, each in vars(module).items() if isinstance(each, _lru_cache_wrapper)]
