"""Compute as another place would: in another thread, with other numbers in fresh memory, and without caches."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from functools import _lru_cache_wrapper, partial
from math import inf, nan
from types import ModuleType
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from lockstep.errors import DeterminismWarning
from lockstep.replicas import ThreadSettings, Worker, inherited
from lockstep.updaters.detectors import defining_modules

ALLOCATIONS: Final = frozenset(
    {
        *(torch.empty, torch.empty_like, torch.empty_strided, torch.empty_permuted),
        *(torch.Tensor.new_empty, torch.Tensor.new_empty_strided),
    }
)
"""The functions that return memory without writing to it."""

LIBRARIES: Final = frozenset({"torch", "lockstep", "builtins"})
"""Packages whose caches hold nothing of a shard."""


class FreshMemory(TorchFunctionMode):
    """Fills the memory that functions leave unwritten.

    It sees calls from Python. A mode of the dispatcher would also see those within kernels, and change results: below
    it, kernels such as that of `affine_grid` call other operators without autocast.

    Args:
        value: The number to fill it with. In integers NaN becomes the largest one.
    """

    def __init__(self, value: float = nan) -> None:
        super().__init__()
        self.value = value

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function, and fill what it has allocated."""
        made = func(*args, **(kwargs or {}))
        if func in ALLOCATIONS and not made.is_meta:
            # Not shown to modes of the dispatcher, which compare what is called.
            with torch._C._DisableTorchDispatch(), torch.no_grad():  # noqa: SLF001 - no public way
                fill(made, self.value)
        return made


def fill(tensor: torch.Tensor, value: float) -> None:
    """Fill a tensor with a number, and one of integers with 0 or the largest one.

    Args:
        tensor: Changed in place.
        value: The number.
    """
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(value)
    elif tensor.dtype == torch.bool:
        tensor.fill_(value != 0)
    elif not tensor.is_quantized:
        tensor.fill_(0 if value == 0 else torch.iinfo(tensor.dtype).max)


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
