"""Make torch's functions that read, write and seed random state act on the calling thread's stream.

Activation checkpointing saves and restores the random state around a part of the model. If its forward draws
from a thread's stream and its recomputation from another state, gradients are wrong and nobody notices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType

import torch

from lockstep.streams.thread import THREAD


class StandInGenerator(torch.Generator):
    """The calling thread's stream, or the default generator where none is open.

    The functions of `torch.random` look their generator up under a name of that module. To change what
    the name means, rather than the functions, also reaches those who took the functions before.
    """

    def __getattribute__(self, name: str) -> object:
        return getattr(_current(), name)


STAND_IN = StandInGenerator()


def default_addresses() -> tuple[int, int]:
    """Name the default generator and its stand-in as they come through torch's dispatcher.

    The dispatcher may hand out another Python object for the same C++ generator; ``_cdata`` is its address.
    """
    default, stand_in = (object.__getattribute__(each, "_cdata") for each in (torch.default_generator, STAND_IN))
    return default, stand_in


class ThreadAwareState:
    """The names of torch that mean something else while threads have streams."""

    def __init__(self) -> None:
        self._replaced: list[tuple[ModuleType, str, object, object]] = []

    def install(self) -> None:
        """Put our own behind the names.

        Raises:
            KeyError: This torch lacks a name; what was put before has to be removed.
        """
        self._replace(torch.random, "default_generator", STAND_IN)
        for module in (torch.cuda, torch.cuda.random):
            self._replace(module, "manual_seed_all", _seed_own_device(module.manual_seed_all))

    def remove(self) -> None:
        """Put the originals back, except behind names that somebody else has changed since."""
        while self._replaced:
            module, name, original, ours = self._replaced.pop()
            if vars(module)[name] is ours:
                setattr(module, name, original)

    def _replace(self, module: ModuleType, name: str, ours: object) -> None:
        self._replaced.append((module, name, vars(module)[name], ours))
        setattr(module, name, ours)


def _current() -> torch.Generator:
    return torch.default_generator if THREAD.generator is None else THREAD.generator


def _seed_own_device(original: Callable[[int], None]) -> Callable[[int], None]:
    """Keep `torch.manual_seed` in one shard from seeding the devices of all others."""

    @functools.wraps(original)
    def manual_seed_all(seed: int) -> None:
        if THREAD.generator is None:
            original(seed)
        elif torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's gap
            torch.cuda.manual_seed(seed)

    return manual_seed_all
