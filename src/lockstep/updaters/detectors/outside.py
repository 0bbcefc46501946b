"""Find the tensors outside of a model that a loss function refers to."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final

import torch
from torch import nn

from lockstep.digest import checksum
from lockstep.updaters.detectors.draws import generator_states
from lockstep.updaters.detectors.references import attributes, listed, of_function
from lockstep.updaters.loss import BatchLoss, Supervised
from lockstep.updaters.setup import NamedLoss

MOST_LEVELS: Final = 3
"""The number of objects at most on the way from the loss function, which is the first, to a tensor or a module."""

MOST_OBJECTS: Final = 10_000
"""The number of objects that are looked at most, so that a large data structure costs little time."""

LOSSES: Final = (Supervised, BatchLoss, NamedLoss)
"""Loss functions of this library that call functions of yours."""

SEQUENCES: Final = (list, tuple, deque)
OF_MODULES: Final = frozenset(vars(nn.Module()))
"""The attributes of every module, among them those with parameters, buffers and hooks."""

PLAIN: Final = (torch.Tensor, nn.Parameter, nn.Buffer)
"""The types of tensors that are looked at; another type may run code of yours, or have no values yet."""


def states(loss_fn: Any, models: Iterable[nn.Module]) -> dict[str, object]:
    """Return the states by name of what may move while shards are computed: generators, and tensors beside the model.

    Args:
        loss_fn: The loss function.
        models: The model and its replicas.
    """
    tensors = outside_tensors(loss_fn, models)
    return generator_states([loss_fn], models) | {
        f"`{name}`": checksum(each)
        for name, each in tensors.items()
        # A tensor whose memory was freed has no values.
        if not each.is_meta and (each.layout is not torch.strided or each.untyped_storage().nbytes())
    }


def outside_tensors(loss_fn: Any, models: Iterable[nn.Module]) -> dict[str, torch.Tensor]:
    """Return the floating-point tensors that a loss function refers to, by name, such as ``"criterion.center"``.

    No code of yours is run to find them.

    Args:
        loss_fn: The loss function.
        models: The model and its replicas, of which nothing is looked at.
    """
    return _Search(loss_fn, models).values


class _Search:
    """Looks for tensors outside of models."""

    def __init__(self, loss_fn: Any, models: Iterable[nn.Module]) -> None:
        self.values: dict[str, torch.Tensor] = {}
        self._seen: set[int] = set()
        for model in models:
            self._seen.update(id(each) for each in (*model.modules(), *model.parameters(), *model.buffers()))
        self._most = len(self._seen) + MOST_OBJECTS
        self._loss_fn = loss_fn
        self._visit(type(loss_fn).__name__, loss_fn, MOST_LEVELS)

    def _visit(self, path: str, value: Any, levels: int) -> None:
        """Record a tensor, or those that an object refers to.

        Types are compared instead of calling isinstance, which asks a proxy for its class and so runs its code.
        """
        kind = type(value)
        if kind in PLAIN:
            self._record(path, value)
        elif id(value) in self._seen or len(self._seen) >= self._most:
            return
        elif issubclass(kind, nn.Module):
            self._seen.add(id(value))
            self._visit_module(path, value, levels)
        elif kind in LOSSES:
            for name, each in attributes(value).items():
                self._visit(name, each, levels)
        elif (
            levels > 0
            and not issubclass(kind, type | ModuleType)
            and (value is self._loss_fn or not _is_of_library(value))
        ):
            self._seen.add(id(value))
            for name, each in _parts(path, value):
                self._visit(name, each, levels - 1)

    def _visit_module(self, path: str, module: nn.Module, levels: int) -> None:
        """Record the parameters, buffers and attributes of a module and of its submodules."""
        own = attributes(module)
        for registry in ("_parameters", "_buffers"):
            for name, tensor in listed(own.get(registry, {}).items):
                if type(tensor) in PLAIN:
                    self._record(f"{path}.{name}", tensor)
        for name, submodule in listed(own.get("_modules", {}).items):
            self._visit(f"{path}.{name}", submodule, levels)
        for name, value in own.items():
            if name not in OF_MODULES:
                self._visit(f"{path}.{name}", value, levels - 1)

    def _record(self, path: str, tensor: Any) -> None:
        """Record a floating-point tensor. Counters and single elements are left out."""
        if id(tensor) not in self._seen and tensor.is_floating_point() and not tensor.is_nested and tensor.numel() > 1:
            self._seen.add(id(tensor))
            self.values.setdefault(path, tensor)


def _is_of_library(value: Any) -> bool:
    """Check whether a function, or a base of an object's class, was defined in PyTorch or in this package."""
    owners = [value] if type(value) is FunctionType else type(value).__mro__
    return any(str(owner.__module__).split(".")[0] in ("torch", "lockstep") for owner in owners)


def _parts(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a function, a container or any other object refers to directly, with names."""
    kind = type(value)
    if kind is FunctionType:
        yield from of_function(value)
    elif kind is MethodType:
        yield type(value.__self__).__name__, value.__self__
        yield from _parts(path, value.__func__)
    elif kind is partial:
        yield path, value.func
        yield from ((f"args[{index}]", each) for index, each in enumerate(value.args))
        yield from value.keywords.items()
    elif issubclass(kind, dict):
        for index, (key, each) in enumerate(listed(lambda: dict.items(value))):
            yield f"{path}[{key!r}]" if type(key) in (str, int) else f"{path}[{index}]", each
    elif issubclass(kind, SEQUENCES):
        base = next(each for each in SEQUENCES if issubclass(kind, each))
        yield from ((f"{path}[{index}]", each) for index, each in enumerate(listed(lambda: base.__iter__(value))))
    else:
        yield from ((f"{path}.{name}", each) for name, each in attributes(value).items())
        call = next((vars(base)["__call__"] for base in kind.__mro__ if "__call__" in vars(base)), None)
        if type(call) is FunctionType:
            yield path, call
