"""Notice when tensors outside of the model change while shards are computed."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final

import torch
from torch import nn

from lockstep.errors import DeterminismWarning
from lockstep.replicas import as_bits
from lockstep.updaters.detectors.references import attributes, listed, of_function
from lockstep.updaters.loss import BatchLoss, Supervised
from lockstep.updaters.setup import NamedLoss

MOST_NAMES: Final = 3
"""The number of tensors that a warning names at most."""

MODEL_AND_REPLICA: Final = 2
"""The number of models that are left out if there is a single device."""

MOST_LEVELS: Final = 3
"""The number of objects at most on the way from the loss function, which is the first, to a tensor or a module."""

MOST_OBJECTS: Final = 10_000
"""The number of objects that are looked at most, so that a large data structure costs little time."""

MOST_ELEMENTS: Final = 2**24
"""The number of elements that are read at most. Larger tensors are compared by their versions."""

LOSSES: Final = (Supervised, BatchLoss, NamedLoss)
"""Loss functions of this library that call functions of yours."""

SEQUENCES: Final = (list, tuple, deque)
OF_MODULES: Final = frozenset(vars(nn.Module()))
"""The attributes of every module, among them those with parameters, buffers and hooks."""

PLAIN: Final = (torch.Tensor, nn.Parameter, nn.Buffer)
"""The types of tensors that are looked at; another type may run code of yours, or have no values yet."""

_CURE: Final = (
    "Such a value depends on which device and rank computes which shard, and in which order, changes again when an "
    "update is repeated, and is not part of a saved state. Make it a buffer of the model, or of a module that you pass "
    "among several models: its new values are averaged over the shards. Or change it once per update: in the criterion "
    "of a `BatchLoss`, which gets the outputs of all samples, or between updates, in an extension or a step function. "
    "Pass what belongs to positions in the batch as `carried`. Let a hook keep an output that the loss needs in an "
    "attribute of its module, of which each device has a copy. Call eval() of a network that is not trained, such as a "
    "teacher."
)


class StateDetector:
    """Detects tensors outside of the model that change while shards are computed, and warns once.

    The warning is also given for a single device, because the same program would have another result on two, and a
    resumed run, which begins with the first value again, another one than a run that was not stopped.
    """

    def __init__(self) -> None:
        self.has_warned = False
        """Whether the warning has been given."""

    @contextmanager
    def watching(self, loss_fn: Any, models: Sequence[nn.Module], sizes: Collection[int]) -> Iterator[None]:
        """Warn if a tensor has changed at the end.

        Args:
            loss_fn: The loss function.
            models: The model and its replicas, of which nothing is looked at.
            sizes: The numbers of samples of the shards. A tensor that was replaced by another one with so many rows is
                a record of the last output, and no average.
        """
        before = OutsideState(loss_fn, models).values
        yield
        after = OutsideState(loss_fn, models).values
        # A tensor that has several names is named once.
        changed = {
            id(after[name].held): name
            for name, old in reversed(before.items())
            if name in after and old.differs(after[name], sizes, in_threads=len(models) > MODEL_AND_REPLICA)
        }
        names = [*changed.values()][::-1]
        if names:
            self.has_warned = True
            more = len(names) - MOST_NAMES
            shown = ", ".join(f"`{name}`" for name in names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
            warnings.warn(
                f"{shown} changed while shards were computed, and {'is' if len(names) == 1 else 'are'} no part of the "
                f"model. {_CURE}",
                DeterminismWarning,
                stacklevel=2,
            )


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor at one moment.

    Attributes:
        held: The tensor itself.
        registered: Whether it is a parameter or buffer of a module.
        like: Its shape, dtype and device.
        version: The number of its in-place changes, or None if these are not counted.
        bits: A sum over the bits of its elements, or None if they were not read.
    """

    held: torch.Tensor
    registered: bool
    like: tuple[torch.Size, torch.dtype, torch.device]
    version: int | None
    bits: int | None

    def differs(self, new: Value, sizes: Collection[int], *, in_threads: bool) -> bool:
        """Check whether this is the former value of a tensor whose new value depends on the shards.

        Args:
            new: The value of the same name afterwards.
            sizes: The numbers of rows of a record of the last output.
            in_threads: Whether several devices compute at the same time. A record with a graph then counts: it is
                there for a loss, which may get that of another device.
        """
        is_replaced = new.held is not self.held
        if in_threads and is_replaced and not self.registered and new.held.grad_fn is not None:
            return True
        if self.like != new.like or (is_replaced and not self.registered and self.like[0][0] in sizes):
            return False
        if self.bits is None or new.bits is None:
            return is_replaced or self.version != new.version
        return self.bits != new.bits


class OutsideState:
    """The tensors that a loss function refers to, outside of the model. No code of yours is run to find them.

    Args:
        loss_fn: The loss function.
        models: The model and its replicas, of which nothing is looked at.

    Attributes:
        values: The floating-point tensors by name, for example ``"criterion.center"``.
    """

    def __init__(self, loss_fn: Any, models: Iterable[nn.Module]) -> None:
        self.values: dict[str, Value] = {}
        self._elements = MOST_ELEMENTS
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
            self._record(path, value, registered=False)
        if id(value) in self._seen or len(self._seen) >= self._most or _is_metric(kind):
            return
        if issubclass(kind, nn.Module):
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
                self._record(f"{path}.{name}", tensor, registered=True)
        for name, submodule in listed(own.get("_modules", {}).items):
            self._visit(f"{path}.{name}", submodule, levels)
        for name, value in own.items():
            if name not in OF_MODULES:
                self._visit(f"{path}.{name}", value, levels - 1)

    def _record(self, path: str, tensor: Any, *, registered: bool) -> None:
        """Record a floating-point tensor. Counters, and single elements that no module registers, are left out."""
        if type(tensor) not in PLAIN or id(tensor) in self._seen or not tensor.is_floating_point() or tensor.is_nested:
            return
        if tensor.dim() > 0 and (registered or tensor.numel() > 1):
            bits = None
            is_readable = tensor.device.type == "cpu" and tensor.layout is torch.strided
            # A tensor whose memory was freed has no values.
            if is_readable and tensor.numel() <= self._elements and tensor.untyped_storage().nbytes():
                self._elements -= tensor.numel()
                bits = int(as_bits(tensor.detach()).sum(dtype=torch.int64))
            version = None if tensor.is_inference() else tensor._version
            like = tensor.shape, tensor.dtype, tensor.device
            self.values.setdefault(path, Value(tensor, registered, like, version, bits))


def _is_metric(kind: type) -> bool:
    """Check whether the objects of a class are metrics: they have the methods `update`, `compute` and `reset`."""
    return all(any(name in vars(base) for base in kind.__mro__) for name in ("update", "compute", "reset"))


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
