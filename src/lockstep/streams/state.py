"""Redirect the functions of torch that read, write or seed random state to the stream of the calling thread.

Activation checkpointing saves and restores the random state around a part of the model. If the forward draws from the
stream of a thread and the recomputation starts from another state, the gradients are wrong, and no error is raised.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import ExitStack
from types import ModuleType
from typing import Any, Final

import torch

DEFAULT_GENERATOR: Final = torch.default_generator
"""The generator itself, while the name in torch may mean the stream of the calling thread."""


class ThreadStreams(threading.local):
    """The open stream of each thread.

    Attributes:
        generator: The innermost open stream of the calling thread, or None if no stream is open.
    """

    generator: torch.Generator | None = None

    @property
    def current(self) -> torch.Generator:
        """The generator that the calling thread draws from: its stream, or the default generator."""
        return DEFAULT_GENERATOR if self.generator is None else self.generator


# One per process, because the kernels of torch and the functions of `torch.random`, which read it, are shared too.
THREAD_STREAMS = ThreadStreams()


class GeneratorProxy(torch.Generator):
    """A proxy for the stream of the calling thread, or for the default generator if no stream is open.

    The functions of `torch.random` look up their generator under a name of that module, and code of yours under a name
    of torch. Changing what these names refer to, instead of the functions, also affects functions imported before.
    """

    def __getattribute__(self, name: str) -> object:
        return getattr(THREAD_STREAMS.current, name)


GENERATOR_PROXY = GeneratorProxy()


def default_addresses() -> tuple[int, int]:
    """Return the addresses by which the dispatcher identifies the default generator and its proxy.

    The dispatcher may create another Python object for the same C++ generator, so objects cannot be compared by
    identity. ``_cdata`` is the address of the C++ object.
    """
    # `object.__getattribute__` reads the attribute of the proxy itself instead of forwarding to a stream.
    default, proxy = (object.__getattribute__(each, "_cdata") for each in (DEFAULT_GENERATOR, GENERATOR_PROXY))
    return default, proxy


def replace_names(undo: ExitStack) -> None:
    """Replace the objects behind the names in torch that mean other ones while threads have streams.

    Args:
        undo: Gets what restores the original objects, except under names that other code has changed in the meantime.

    Raises:
        KeyError: If the installed torch lacks one of the names.
    """
    for module in (torch, torch.random):
        _replace(module, "default_generator", GENERATOR_PROXY, undo)
    for module in _seeding_modules():
        _replace(module, "manual_seed_all", _seed_own_device(module, module.manual_seed_all), undo)


def _replace(module: ModuleType, name: str, ours: object, undo: ExitStack) -> None:
    original = vars(module)[name]

    def restore() -> None:
        if vars(module)[name] is ours:
            setattr(module, name, original)

    undo.callback(restore)
    setattr(module, name, ours)


def _seeding_modules() -> list[ModuleType]:
    """List the modules with a function that seeds all accelerators: those of CUDA, and that of another accelerator."""
    accelerator = torch.accelerator.current_accelerator()
    others = [] if accelerator is None or accelerator.type == "cuda" else [torch.get_device_module(accelerator)]
    return [torch.cuda, torch.cuda.random, *(each for each in others if hasattr(each, "manual_seed_all"))]


def _seed_own_device(module: Any, original: Callable[[int], None]) -> Callable[[int], None]:
    """Keep a `torch.manual_seed` in one shard from seeding the devices of all other shards.

    Args:
        module: The module of a type of accelerator, or one of its parts.
        original: The function of torch that seeds all devices.
    """
    devices = torch.cuda if module is torch.cuda.random else module

    @functools.wraps(original)
    def manual_seed_all(seed: int) -> None:
        if THREAD_STREAMS.generator is None:
            original(seed)
        elif devices.is_initialized():
            devices.manual_seed(seed)

    return manual_seed_all


class DefaultGeneratorGuard:
    """A record of the state of the default CPU generator at the time when the guard was created.

    It takes about 1 µs to create one and a few µs to compare it.

    >>> guard = DefaultGeneratorGuard()
    >>> guard.moved()
    False
    >>> drawn = torch.rand(3)
    >>> guard.moved()
    True
    >>> guard.restore()
    >>> guard.moved()
    False
    """

    __slots__ = ("_state",)

    def __init__(self) -> None:
        self._state = DEFAULT_GENERATOR.get_state()

    def moved(self) -> bool:
        """Return whether the state of the generator differs from the recorded one."""
        return not torch.equal(DEFAULT_GENERATOR.get_state(), self._state)

    def restore(self) -> None:
        """Reset the generator to the recorded state."""
        DEFAULT_GENERATOR.set_state(self._state)
