"""Notice what a forward leaves in plain attributes and buffers of the replicas, and code that reads the original model.

The original model does not get plain attributes, and it gets buffers only when an update is applied.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from inspect import getattr_static
from types import FrameType
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from lockstep.digest import checksum
from lockstep.errors import DeterminismWarning, few, warn
from lockstep.nest import attributes, listed
from lockstep.updaters.attempt.attempt import Attempt
from lockstep.updaters.compute.prepared_model import PreparedModel
from lockstep.updaters.detectors import OF_MODULES, called_functions

OWN = ("torch", "lockstep")
"""The packages whose own reads are not those of a program."""
VALUES: Final = (bool, int, float, complex, str, bytes, type(None))
CONTAINERS: Final = (dict, list, tuple, set, deque)
REGISTRIES: Final = ("_parameters", "_buffers", "_modules")
MOST_LEVELS: Final = 3
"""The number of containers inside of each other whose contents are compared."""
READ: Final = (
    "Forward changes attributes of the model that your program reads elsewhere: {}. Each device has a copy of the "
    "model with attributes of its own, which the original does not get: between updates you read there the value from "
    "before the run, and what you reset there is not reset in the copies. Pass the value to lockstep.report in the "
    "loss function, or register it as a buffer with a rule (`buffers`). If your program does not use it, filter this "
    "warning."
)
COMPUTED: Final = (
    "`loss_fn` updates a {} of torchmetrics whose value your program computes. An audit calls the loss function once "
    "more for some samples, and each process calls it for its own samples only, so the value depends on where the "
    "program runs. Return its counts as `metrics` of a lockstep.Loss, or give the metric to an Evaluator."
)


@contextmanager
def noting_reads(model: nn.Module, reads: dict[tuple[int, str], str]) -> Iterator[None]:
    """Note which attributes of the modules of a model are read inside the ``with`` block, in any way and any thread.

    Args:
        model: The original model. Meanwhile its modules have classes that are derived from their own.
        reads: Receives, by the ``id`` of the module and the name of the attribute, the function that has read it first.
    """
    kinds = [(module, type(module)) for module in model.modules()]
    watched = {kind: _watched(kind, reads) for _, kind in kinds}
    try:
        for module, kind in kinds:
            # A class that is not written in Python may not allow it.
            with suppress(TypeError):
                object.__setattr__(module, "__class__", watched[kind])
        yield
    finally:
        for module, kind in kinds:
            # A module may have become one of another class meanwhile, as lazy ones do.
            if type(module) is watched[kind]:
                object.__setattr__(module, "__class__", kind)


def _watched(kind: type, reads: dict[tuple[int, str], str]) -> type:
    """Return a class like another one whose objects note what is read from them."""

    class Watched:
        def __init_subclass__(cls) -> None:
            """Call no such method of the class, which may register its subclasses."""

        def __getattribute__(self, name: str) -> Any:
            reader = sys._getframe(1)  # noqa: SLF001 - public in spirit, and a hundredth of the time of `inspect`
            if str(reader.f_globals.get("__name__")).partition(".")[0] not in OWN:
                code = reader.f_code
                reads.setdefault((id(self), name), getattr(code, "co_qualname", code.co_name))
            return super().__getattribute__(name)

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    # By `type` itself, because a metaclass may register classes, too.
    return type.__new__(type(kind), kind.__name__, (Watched, kind), names)


def watch_read(module: nn.Module, name: str, message: str) -> None:
    """Warn once a program reads a plain attribute of a module, unless a forward of the module itself has set it.

    Args:
        module: The module.
        name: The name of the attribute.
        message: The message of the warning.
    """
    kind = type(module)
    watch = vars(kind).get(name)
    if not isinstance(watch, _WatchedAttribute):
        watch = _WatchedAttribute(name, getattr_static(kind, name, None))
        # A class that is not written in Python may not allow it, and a property has its value elsewhere.
        with suppress(TypeError):
            if not hasattr(watch.former, "__set__"):
                setattr(kind, name, watch)
    watch.watched[id(module)] = weakref.ref(module), message


class _WatchedAttribute:
    """A descriptor that keeps an attribute where it was, and notices that it is read from some of the objects.

    Args:
        name: The name of the attribute.
        former: The value that the class has under this name, if it has one.

    Attributes:
        watched: Some objects, by their ``id``, with the messages of the warnings.
    """

    def __init__(self, name: str, former: Any) -> None:
        self.name = name
        self.former = former
        self.watched: dict[int, tuple[weakref.ref[Any], str]] = {}

    def __get__(self, instance: Any, owner: type) -> Any:
        """Return the value that the object has, or else that of the class."""
        if instance is not None and id(instance) in self.watched:
            self._note_read(instance, sys._getframe(1))  # noqa: SLF001 - as above
        # Not by `vars`, for which the compiler of torch 2.11 would ask this descriptor.
        if instance is not None and self.name in (own := object.__getattribute__(instance, "__dict__")):
            return own[self.name]
        if self.former is None:
            raise AttributeError(f"{owner.__name__!r} has no attribute {self.name!r}")
        return self.former.__get__(instance, owner) if hasattr(self.former, "__get__") else self.former

    def __set__(self, instance: Any, value: Any) -> None:
        if id(instance) in self.watched and _in_forward(instance):
            del self.watched[id(instance)]
        vars(instance)[self.name] = value

    def __delete__(self, instance: Any) -> None:
        if self.name not in vars(instance):
            raise AttributeError(self.name)
        del vars(instance)[self.name]

    def _note_read(self, instance: Any, reader: FrameType) -> None:
        if str(reader.f_globals.get("__name__")).partition(".")[0] not in (*OWN, "torchmetrics"):
            found, message = self.watched.pop(id(instance))
            # The number may be that of a former object.
            if found() is instance and not _in_forward(instance):
                warn(message, DeterminismWarning)


def _in_forward(module: object) -> bool:
    """Return whether this thread runs a forward of a module, which leaves there what a program expects."""
    frame, call = sys._getframe(1), nn.Module.__call__.__code__  # noqa: SLF001 - as above
    while frame.f_back is not None and not (frame.f_code is call and frame.f_locals["self"] is module):
        frame = frame.f_back
    return frame.f_back is not None


def check_attributes_read(reads: Mapping[tuple[int, str], str], changed: Iterable[Changed]) -> None:
    """Check that no plain attribute was read from the original model that the forward of a replica has changed.

    Args:
        reads: What was read from the original model while shards were computed; see `noting_reads`.
        changed: The attributes that a forward has changed; see `changed_attributes`.

    Raises:
        ValueError: If such an attribute was read, because only replicas have what the forward has left there.
    """
    for each in changed:
        if reader := reads.get((id(each.module), each.name)):
            raise ValueError(
                f"A function must read {each.name!r}, which a forward sets, from the replica that computes, got "
                f"{reader!r}, which reads it from your original model, whose forward is never run. Read it from the "
                "model that is given to the function."
            )


def check_buffers_read(
    loss_fn: Any, reads: Mapping[tuple[int, str], str], prepared: PreparedModel, attempt: Attempt
) -> None:
    """Check that no buffer was read from the original model that the forward of a replica has changed.

    Args:
        loss_fn: The loss function, which may hold buffers, too.
        reads: What was read from the original model while shards were computed; see `noting_reads`.
        prepared: The model as it was run.
        attempt: The attempt, whose shards are computed.

    Raises:
        ValueError: If such a buffer was read, because only replicas have what the forward has left there.
    """
    holders = {
        id(value): getattr(function, "__qualname__", type(function).__name__)
        for function, held in called_functions(loss_fn)
        for value in held
    }
    for index, ref in enumerate(prepared.buffer_refs):
        start = ref.get()
        reader = reads.get((id(ref.module), ref.name)) or holders.get(id(start))
        if start is None or reader is None:
            continue
        sums = [task.buffer_sum.resolve() for task in attempt.device_tasks]
        # What a shard leaves that has no other is taken as it is where the host does not compare it.
        left = [each.firsts[index] for each in sums if each.weights[index]]
        if not all(each is not None and torch.equal(each.cpu(), start.cpu()) for each in left):
            raise ValueError(
                f"`loss_fn` must read the buffers of the model that it is given, which is a replica, got {reader!r}, "
                f"which reads {ref.path!r} of your original model, which has the value of the last update until this "
                "one is applied. Read it from the argument of `loss_fn`, or return it from forward."
            )


class Changed(NamedTuple):
    """A plain attribute that a forward has set or changed, or what it has registered.

    Attributes:
        path: The name of the module in the model.
        module: The module of the original model.
        name: The name of the attribute.
        is_plain: Whether it is no parameter, buffer or module.
    """

    path: str
    module: nn.Module
    name: str
    is_plain: bool = True

    def __str__(self) -> str:
        return f"{self.path}.{self.name}".lstrip(".")


def changed_attributes(model: nn.Module, replica: nn.Module) -> list[Changed]:
    """List the plain attributes that a forward has set or changed, also in place, and what it has registered.

    Args:
        model: The model as it was.
        replica: A copy of it that has computed shards.
    """
    found, modules = [], dict(model.named_modules(remove_duplicate=False))
    for path, copied in replica.named_modules():
        # Of a module that a forward has registered, the module that has it is named.
        if (module := modules.get(path)) is None:
            continue
        before, after = attributes(module), attributes(copied)
        for name, value in after.items():
            is_plain = name not in OF_MODULES or name == "training"
            if is_plain and value is not before.get(name) and _summary(before.get(name)) != _summary(value):
                found.append(Changed(path, module, name))
        new = [name for each in REGISTRIES for name in after.get(each, ()) if name not in before[each]]
        found += [Changed(path, module, name, is_plain=False) for name in new]
    return found


def warn_of_registered(changed: Iterable[Changed], replica: nn.Module) -> None:
    """Warn of what a forward has registered in a replica, and the state of the model lacks.

    Args:
        changed: What a forward has changed; see `changed_attributes`.
        replica: The replica.
    """
    registered = [f"{each}" for each in changed if not each.is_plain]
    held = [*replica.state_dict()] if registered else []
    if missing := [each for each in registered if any(f"{key}.".startswith(f"{each}.") for key in held)]:
        warn(
            f"Forward registers {few(missing)} in the copies of the model, each in its own. No optimizer trains them, "
            "and neither the model nor a snapshot has them. Create parameters, buffers and modules in `__init__`, or "
            "run the model on a batch under torch.no_grad() before you create the optimizer. Register a cache by "
            "register_buffer(..., persistent=False)."
        )


def _summary(value: Any, levels: int = MOST_LEVELS) -> str:
    """Return a text that differs where values differ, as far as values of their type are compared."""
    kind = type(value)
    if kind is torch.Tensor and value.layout is torch.strided and not value.is_meta and not value.is_nested:
        # A tensor whose memory was freed has no values.
        return f"{value.shape} {checksum(value.detach()) if value.untyped_storage().nbytes() else None}"
    if kind in VALUES:
        return repr(value)
    if levels and issubclass(kind, CONTAINERS):
        base = next(each for each in CONTAINERS if issubclass(kind, each))
        items = listed(lambda: dict.items(value) if base is dict else base.__iter__(value))
        found = [_summary(each, levels - 1) for each in items]
        # A copy of a set may have another order.
        return repr(sorted(found) if base is set else found)
    return kind.__qualname__


def warn_of_reads(loss_fn: Any, model: nn.Module, changed: Iterable[Changed]) -> None:
    """Warn of attributes that a forward changes, once your program reads them from the original model.

    Metrics of torchmetrics in the model are named at once, and those that the loss function updates where your program
    computes their values.

    Args:
        loss_fn: The loss function.
        model: The original model.
        changed: The attributes that a forward has changed.
    """
    torchmetrics: Any = sys.modules.get("torchmetrics")
    metrics = {id(each) for each in model.modules() if torchmetrics and isinstance(each, torchmetrics.Metric)}
    told = dict.fromkeys(each.path for each in changed if id(each.module) in metrics)
    if told:
        warn(READ.format(few([*told])), DeterminismWarning)
    for each in changed:
        # What is registered is not there to be read.
        if id(each.module) not in metrics and each.is_plain:
            watch_read(each.module, each.name, READ.format(each))
    held: list[Any] = [each for _, found in called_functions(loss_fn) for each in found] if torchmetrics else []
    for metric in held:
        if issubclass(type(metric), torchmetrics.Metric) and metric.update_called:
            watch_read(metric, "compute", COMPUTED.format(type(metric).__name__))
