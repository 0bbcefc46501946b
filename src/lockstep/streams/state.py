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
_STAND_IN_ADDRESS: int = object.__getattribute__(STAND_IN, "_cdata")


def is_stand_in(generator: torch.Generator) -> bool:
    """Tell whether a generator that came through torch's dispatcher is the stand-in.

    The dispatcher hands out another Python object for the same C++ generator, so the addresses are compared.
    """
    address: int = generator._cdata  # type: ignore[attr-defined]  # noqa: SLF001 - its only identity
    return address == _STAND_IN_ADDRESS


class ThreadAwareState:
    """The names of torch that mean something else while threads have streams."""

    def __init__(self) -> None:
        self._replaced: list[tuple[ModuleType, str, object, object]] = []

    def install(self) -> None:
        """Put our own behind the names."""
        self._replace(torch.random, "default_generator", STAND_IN)
        for module in (torch, torch.random):
            self._replace(module, "manual_seed", _manual_seed(module.manual_seed))
            self._replace(module, "seed", _seed(module.seed))

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


# torch's own two seed all devices, and so the streams of other shards. A shard may seed its own only.


def _manual_seed(original: Callable[[int], torch.Generator]) -> Callable[[int], torch.Generator]:
    @functools.wraps(original)
    def manual_seed(seed: int) -> torch.Generator:
        if THREAD.generator is None:
            return original(seed)
        _seed_current_device(int(seed))
        return THREAD.generator.manual_seed(int(seed))

    return manual_seed


def _seed(original: Callable[[], int]) -> Callable[[], int]:
    @functools.wraps(original)
    def seed() -> int:
        if THREAD.generator is None:
            return original()
        seed = THREAD.generator.seed()
        _seed_current_device(seed)
        return seed

    return seed


def _seed_current_device(seed: int) -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's gap
        torch.cuda.manual_seed(seed)
