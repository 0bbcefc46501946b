"""Notice what a forward leaves in plain attributes of the replicas, because the original model does not get it."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from lockstep.digest import checksum
from lockstep.errors import DeterminismWarning, few, warn
from lockstep.nest import attributes, listed
from lockstep.updaters.detectors import OF_MODULES, called_functions
from lockstep.updaters.step.originals import watch_read

VALUES: Final = (bool, int, float, complex, str, bytes, type(None))
CONTAINERS: Final = (dict, list, tuple, set, deque)
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


class Changed(NamedTuple):
    """A plain attribute that a forward has set or changed.

    Attributes:
        path: The name of the module in the model.
        module: The module of the original model.
        name: The name of the attribute.
    """

    path: str
    module: nn.Module
    name: str

    def __str__(self) -> str:
        return f"{self.path}.{self.name}".lstrip(".")


def changed_attributes(model: nn.Module, replica: nn.Module) -> list[Changed]:
    """List the plain attributes that a forward has set or changed, also in place.

    Args:
        model: The model as it was.
        replica: A copy of it that has computed shards.
    """
    found = []
    for (path, module), copied in zip(model.named_modules(), replica.modules(), strict=False):
        before = attributes(module)
        for name, value in attributes(copied).items():
            is_plain = name not in OF_MODULES or name == "training"
            if is_plain and value is not before.get(name) and _summary(before.get(name)) != _summary(value):
                found.append(Changed(path, module, name))
    return found


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
        if id(each.module) not in metrics:
            watch_read(each.module, each.name, READ.format(each))
    held: list[Any] = [each for _, found in called_functions(loss_fn) for each in found] if torchmetrics else []
    for metric in held:
        if issubclass(type(metric), torchmetrics.Metric) and metric.update_called:
            watch_read(metric, "compute", COMPUTED.format(type(metric).__name__))
