"""Describe what makes a run's result, beside the data itself, for processes to compare."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lockstep._version import __version__
from lockstep.data import BatchIterator
from lockstep.data import Iterator as BatchSource
from lockstep.updaters.recipe import Recipe
from lockstep.updaters.training import Training

Fields = dict[str, str]
"""Text by name."""


def described(training: Training, recipe: Recipe) -> Fields:
    """Describe a run as it stands."""
    return {
        "lockstep": __version__,
        **{f"`{each.name}`": _text(getattr(recipe, each.name)) for each in fields(recipe)},
        "loss scale": f"{type(training.loss_scale).__name__} {training.loss_scale.state_dict()}",
        "number of updates": f"{training.iteration}",
        **_joined("model", training.models, _model_fields),
        **_joined("optimizer", training.optimizers, _optimizer_fields),
        **_joined("iterator", training.iterators, _iterator_fields),
        **_joined("scheduler", training.schedulers, _kind_field),
        **_joined("epoch scheduler", training.epoch_schedulers, _kind_field),
    }


def _joined(what: str, named: Mapping[str, Any], describe: Any) -> Fields:
    """Describe things of one kind, each field under the thing's name."""
    return {f"{field} of {what} {name!r}": text for name, each in named.items() for field, text in describe(each)}


def _model_fields(model: nn.Module) -> Iterator[tuple[str, str]]:
    for path, module in model.named_modules():
        yield f"kind of module {path!r}", f"{type(module).__name__}{'' if module.training else ' (eval)'}"
    for name, parameter in model.named_parameters():
        trained = "" if parameter.requires_grad else " (frozen)"
        yield f"parameter {name!r}", f"{_shape(parameter)}{trained}"
    for name, buffer in model.named_buffers():
        yield f"buffer {name!r}", _shape(buffer)


def _shape(tensor: torch.Tensor) -> str:
    return "of unknown shape" if is_lazy(tensor) else f"{tensor.dtype} {tuple(tensor.shape)}"


def _optimizer_fields(optimizer: Optimizer) -> Iterator[tuple[str, str]]:
    yield from _kind_field(optimizer)
    for index, group in enumerate(optimizer.param_groups):
        yield f"number of parameters in group {index}", f"{len(group['params'])}"
        for key in sorted(group.keys() - {"params"}):
            yield f"{key!r} in group {index}", _text(group[key])


def _iterator_fields(iterator: BatchSource) -> Iterator[tuple[str, str]]:
    yield from _kind_field(iterator)
    yield "epoch", f"{iterator.epoch_detail}"
    if isinstance(iterator, BatchIterator):
        yield "number of samples", f"{len(iterator.dataset)}"
        for name in ("batch_size", "shuffle", "repeat", "last_batch", "seed", "sample_streams"):
            yield f"`{name}`", f"{vars(iterator)[name]!r}"


def _kind_field(thing: object) -> Iterable[tuple[str, str]]:
    return [("kind", type(thing).__name__)]


def _text(value: object) -> str:
    """Write a value so that equal ones read alike in every process: no addresses."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {value.tolist()}"
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_text, value))}]"
    if inspect.isroutine(value):
        return value.__qualname__
    return type(value).__name__
