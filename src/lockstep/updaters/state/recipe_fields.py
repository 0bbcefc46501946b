"""Describe what the result of a run depends on, as JSON values by name, to compare a run with a saved one."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from functools import partial
from typing import Any, Final, TypeAlias

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lockstep._version import __version__
from lockstep.data import BatchIterator, IterableBatches, Iterator as BatchSource, Parts
from lockstep.digest import digest
from lockstep.optim import HookedOptimizer
from lockstep.precision import LossScale
from lockstep.updaters.loss import Supervised
from lockstep.updaters.setup.names import MAIN
from lockstep.updaters.setup.recipe import Recipe
from lockstep.updaters.state.carried import CarriedValues
from lockstep.updaters.state.checkpoint import frozen_names, frozen_text
from lockstep.updaters.state.training import TrainingState


def name_of(value: object) -> str | None:
    """Return the qualified name of a function, or of the class of an object; None for None.

    >>> name_of(nn.functional.relu), name_of(partial(nn.functional.relu, inplace=True)), name_of(nn.ReLU())
    ('relu', 'relu', 'ReLU')
    """
    if value is None:
        return None
    if isinstance(value, partial):
        return name_of(value.func)
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def code_text(value: Any) -> str | None:
    """Return the name of a function, with the options of PyTorch's criteria and the numbers of a partial.

    >>> code_text(partial(nn.functional.cross_entropy, label_smoothing=0.1))
    'cross_entropy(label_smoothing=0.1)'
    """
    if isinstance(value, Supervised):
        return f"supervised({code_text(value.criterion)})"
    options: dict[str, Any] = {}
    if isinstance(value, nn.Module) and is_of_torch(value):
        options = {name: each for name, each in vars(value).items() if name != "training" and name[0] != "_"}
    elif isinstance(value, partial):
        # Text may be the name of a device.
        options = {name: each for name, each in value.keywords.items() if not isinstance(each, str)}
    shown = [
        f"{name}={option!r}" for name, option in sorted(options.items()) if isinstance(option, bool | int | float | str)
    ]
    return f"{name_of(value)}({', '.join(shown)})" if shown else name_of(value)


def is_of_torch(module: nn.Module) -> bool:
    """Return whether the class of a module is PyTorch's own."""
    return type(module).__module__.startswith("torch.nn.")


def module_text(module: nn.Module) -> str:
    """Return the class of a module; with its options if it is PyTorch's own and has its shape.

    >>> module_text(nn.Dropout(0.1))
    'Dropout(p=0.1, inplace=False)'
    """
    # Other classes may describe themselves by what differs between processes, such as addresses.
    if not is_of_torch(module) or any(map(is_lazy, module.parameters(recurse=False))):
        return type(module).__qualname__
    return f"{type(module).__qualname__}({module.extra_repr()})"


RecipeFields: TypeAlias = dict[str, Any]
"""JSON values by name."""

CODE: Final = "code."
"""The prefix of fields that describe code by its name alone. The same name may stand for other code."""

UNKNOWN_SHAPE: Final = "unknown shape"
"""The value of a parameter that gets its shape in the first update."""

_ARGUMENTS: Final = (
    *("seed", "accumulate", "split", "reduction", "precision", "buffers", "batch_dim"),
    *("on_overflow", "max_tries", "on_exhausted", "auto_new_epoch"),
)
_ITERATOR_ARGUMENTS: Final = ("batch_size", "shuffle", "repeat", "last_batch", "sample_streams")
_MOVED: Final = frozenset({"params", "initial_lr"})
"""Entries of an optimizer's groups that are no options: `initial_lr` belongs to schedulers, which list it."""


def settings_of(training: TrainingState) -> RecipeFields:
    """Describe the settings of the parts of a run that change during training, and must be read before it.

    Args:
        training: The training state.
    """
    models = training.models
    described = dict(_loss_scale_fields(training.loss_scale)) | dict(_carried_fields(training.carried))
    # A run that freezes nothing has the fields that it had before these existed.
    described |= {_joined(name, "frozen"): frozen_text(paths) for name, paths in frozen_names(models).items()}
    paths = {id(each): _joined(name, path) for name, model in models.items() for path, each in model.named_parameters()}
    parts: tuple[tuple[str, Mapping[str, Any], Callable[[Any], Iterator[tuple[str, Any]]]], ...] = (
        ("", training.iterators, _iterator_fields),
        ("optimizer", training.optimizers, partial(_optimizer_fields, paths=paths)),
        ("scheduler", training.schedulers, scheduler_fields),
    )
    for kind, named, describe in parts:
        for name, each in named.items():
            described.update({_joined(name, kind, field): value for field, value in describe(each)})
    return described


def recipe_fields(
    recipe: Recipe, settings: RecipeFields, models: Mapping[str, nn.Module], *, num_shards: int
) -> RecipeFields:
    """Describe a run: arguments of the updater, the settings of its parts, and the tensors of its models.

    Fields that begin with ``code.`` are names of code, and options of modules and functions.

    Args:
        recipe: The arguments of the updater.
        settings: What `settings_of` returned before the first update.
        models: The models by name.
        num_shards: The number of shards per batch.
    """
    code = {name: code_text(getattr(recipe, name)) for name in ("loss_fn", "step_fn", "converter")}
    described: RecipeFields = {"num_shards": num_shards}
    described |= {name: as_json(getattr(recipe, name)) for name in _ARGUMENTS}
    # A run that does not clip has the fields that it had before the argument existed.
    if recipe.clip_grad_norm is not None:
        described["clip_grad_norm"] = as_json(recipe.clip_grad_norm)
    described |= settings
    for name, model in models.items():
        described.update({_joined(name, "model", field): value for field, value in _model_fields(model)})
        code.update({_joined(name, "model", field): value for field, value in _module_fields(model)})
    return described | {f"{CODE}{name}": value for name, value in code.items()} | {f"{CODE}lockstep": __version__}


def as_json(value: object) -> Any:
    """Convert a value to a JSON value that is equal for equal values in every process.

    >>> as_json((0.9, float("inf"), {1: torch.float16}))
    [0.9, 'inf', {'1': 'torch.float16'}]
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, torch.Tensor):
        return as_json(value.tolist())
    if isinstance(value, tuple | list):
        return [as_json(each) for each in value]
    if isinstance(value, Mapping):
        return {str(key): as_json(each) for key, each in value.items()}
    return str(value) if isinstance(value, torch.dtype) else name_of(value)


def _joined(name: str, *parts: str) -> str:
    """Join the parts of a field's name; that of the only or the main object is left out."""
    return ".".join(part for part in ("" if name == MAIN else name, *parts) if part)


def _loss_scale_fields(scale: LossScale) -> Iterator[tuple[str, Any]]:
    yield "loss_scale", type(scale).__name__
    for field in fields(scale):
        # The fields that move are state.
        if field.name not in scale.moving:
            yield f"loss_scale.{field.name}", as_json(getattr(scale, field.name))


def _carried_fields(carried: CarriedValues | None) -> Iterator[tuple[str, Any]]:
    yield "carried", carried and dict(zip(carried.names, map(_tensor_text, carried.initial), strict=True))
    if carried is not None:
        yield "carried.dim", carried.dims
        yield "carried.each_epoch", carried.each_epoch
        if carried.each_epoch:
            # Later epochs begin with these values, which are in no state.
            yield "carried.initial", digest(carried.initial)


def _iterator_fields(iterator: BatchSource) -> Iterator[tuple[str, Any]]:
    yield "iterator", type(iterator).__name__
    if isinstance(iterator, BatchIterator):
        yield "num_samples", len(iterator.dataset)
        yield "data_seed", iterator.seed
        yield "sampler", iterator.order_sampler is not None
        for name in _ITERATOR_ARGUMENTS:
            yield name, getattr(iterator, name)
        if isinstance(iterator.dataset, Parts):
            yield "blocks_and_sections", iterator.dataset.fingerprint()
    if isinstance(iterator, IterableBatches):
        yield "batches_of", iterator.batches_of
        yield "repeat", iterator.repeat


def _optimizer_fields(optimizer: Optimizer, paths: Mapping[int, str]) -> Iterator[tuple[str, Any]]:
    yield "", type(optimizer).__qualname__
    groups = optimizer.param_groups
    yield "num_parameters", [len(group["params"]) for group in groups]
    # Their state is saved by their numbers.
    trained = [[paths.get(id(each), "") for each in group["params"]] for group in groups]
    yield "order_of_parameters", hashlib.sha256(repr(trained).encode()).hexdigest()[:16]
    for index, group in enumerate(groups):
        for option in sorted(group.keys() - _MOVED):
            yield f"{index}.{option}" if len(groups) > 1 else option, as_json(group[option])
    if isinstance(optimizer, HookedOptimizer):
        yield "hooks", [hook["hook"] for hook in optimizer.state_dict()["hooks"]]


def scheduler_fields(scheduler: LRScheduler) -> Iterator[tuple[str, Any]]:
    """Yield the name and the options of a scheduler that has not stepped yet."""
    yield "", type(scheduler).__qualname__
    # All of it has its first value here, the constants as well as what moves later.
    for key, value in sorted(scheduler.state_dict().items()):
        if key == "_schedulers" or not key.startswith("_"):
            yield key, as_json(value)


def _model_fields(model: nn.Module) -> Iterator[tuple[str, str]]:
    first: dict[torch.Tensor, str] = {}
    # The tensors themselves, not detached ones as in a state, so that tied weights are known by identity.
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor):
            tied = first.setdefault(tensor, name)
            yield name, _tensor_text(tensor) if tied == name else f"tied to {tied}"


def _module_fields(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield PyTorch's own modules with their options."""
    for name, module in model.named_modules():
        if is_of_torch(module) and next(module.children(), None) is None:
            yield name, UNKNOWN_SHAPE if any(map(is_lazy, module.parameters())) else module_text(module)


def _tensor_text(tensor: torch.Tensor) -> str:
    if is_lazy(tensor):
        return UNKNOWN_SHAPE
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
