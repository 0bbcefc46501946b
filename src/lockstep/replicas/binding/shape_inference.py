"""Infer the shapes that a model returns for inputs of given shapes, without side effects.

The model is first run on tensors that have shapes but no values (those of the device "meta"). If this is inconclusive
because the model looks at values, it is run on zeros. Both use a copy of the model, and random states are restored. The
dtypes of the inputs are not known, so floating-point inputs are tried before integer ones.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Final, TypeAlias

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lockstep.replicas.batch import named_outputs
from lockstep.replicas.binding.bound_inputs import BoundInputs
from lockstep.replicas.modules import ModuleWrapper
from lockstep.replicas.pool import HOOK_NAMES, copy_model
from lockstep.streams import restored_generators

MAX_MIXED_INPUTS: Final = 3
"""Up to this number of inputs, all mixtures of floating-point and integer inputs are tried. Beyond, all inputs have the
same dtype."""

Call: TypeAlias = "tuple[bool, dict[str, torch.dtype]]"
"""Whether the model is in training mode, and the dtypes of the inputs by path."""


@dataclass(slots=True)
class InferredShapes:
    """The result of an inference.

    Attributes:
        shapes: The name and shape of each output for the whole batch, or None if they cannot be inferred.
        errors: The errors that the model raised, in order.
        refuses: Whether it raised because of the shapes alone, for all dtypes and values of the inputs.
    """

    shapes: list[tuple[str, tuple[int, ...]]] | None = None
    errors: list[Exception] = field(default_factory=list)
    refuses: bool = False


def infer(model: nn.Module, binding: BoundInputs, *, training: bool) -> InferredShapes:
    """Infer the shapes of outputs.

    Args:
        model: The model. It is not modified, and its hooks are not called, except for those of torch that compute its
            weights.
        binding: The shapes of the inputs. Calls are tried with the labels as arguments, and without them.
        training: Whether training mode is tried first.
    """
    found = InferredShapes()
    # A path with a dot leads into a dataclass, of which the fields are known but not the class. A wrapper has devices
    # of its own, and possibly threads. Lazy parameters have no shapes yet.
    if (
        any("." in re.sub(r"\[.*?\]", "", path) for path in binding.paths)
        or any(isinstance(module, ModuleWrapper) for module in model.modules())
        or any(map(is_lazy, model.parameters()))
    ):
        return found
    found.refuses = True
    calls = [(mode, dtypes) for mode in dict.fromkeys((training, False)) for dtypes in _input_dtypes(model, binding)]
    meta, own = torch.device("meta"), _model_device(model)
    # The compiler is slow to import, so it is disabled only if it has been imported already.
    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    with eager, restored_generators(), torch.random.fork_rng(), torch.no_grad():
        for device in (meta, own):
            with device if device is meta else nullcontext():
                copied = _convert_copy(model, _without_memory if device is meta else torch.Tensor.clone)
                _try_calls(copied, device, binding, calls, found)
            if found.shapes is not None:
                break
    return found


def check_shapes(model: nn.Module, binding: BoundInputs, before: BoundInputs | None, *, training: bool) -> None:
    """Check that a model can compute with inputs of given shapes, if that can be found out.

    Args:
        model: The model. It is not modified.
        binding: The new shapes.
        before: The previous shapes, which the model can compute with, or None.
        training: Whether training mode is tried first.

    Raises:
        ValueError: If it cannot. The message names the inputs.
    """
    shapes = binding.data | binding.labels
    suspects = [path for path in shapes if before is None or binding.differs(before, path)]
    if not suspects:
        return
    found = infer(model, binding, training=training)
    if not found.refuses:
        return
    # An error about a wrong dtype explains less than one about a shape.
    error = next((each for each in found.errors if "scalar type" not in str(each)), found.errors[0])
    got = ", ".join(f"{path} {shapes[path]}" for path in suspects)
    names = ", ".join(f"`{path}`" for path in suspects)
    raise ValueError(
        f"{names} must have a shape that the model can compute with, got {got}: {type(error).__name__}: {error}"
    ) from error


def _input_dtypes(model: nn.Module, binding: BoundInputs) -> Iterator[dict[str, torch.dtype]]:
    """Yield the dtypes to try for the inputs by path, where labels that are missing are left out of the call."""
    model_dtypes = (each.dtype for each in model.parameters() if each.is_floating_point())
    both = (next(model_dtypes, torch.get_default_dtype()), torch.int64)
    count = len(binding.data)
    data = list(product(both, repeat=count)) if count <= MAX_MIXED_INPUTS else [(kind,) * count for kind in both]
    # Labels are most often integers, so these come first.
    for label in reversed(both) if binding.labels else ():
        for dtypes in data:
            yield {**dict(zip(binding.data, dtypes, strict=True)), **dict.fromkeys(binding.labels, label)}
    for dtypes in data:
        yield dict(zip(binding.data, dtypes, strict=True))


def _convert_copy(model: nn.Module, convert: Callable[[torch.Tensor], Any]) -> nn.Module:
    """Return a copy of a model with converted parameters and buffers, and without hooks of the user."""
    copied = copy_model(model, _model_device(model))
    for module in copied.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                tensors[name] = None if tensor is None else convert(tensor)
        for hooks in (vars(module)[name] for name in HOOK_NAMES):
            for key, hook in list(hooks.items()):
                if not type(hook).__module__.startswith("torch."):
                    del hooks[key]
    return copied


def _model_device(model: nn.Module) -> torch.device:
    """Return the device of the parameters of a model."""
    return next((each.device for each in model.parameters()), torch.device("cpu"))


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("meta")


def _try_calls(
    model: nn.Module, device: torch.device, binding: BoundInputs, calls: Sequence[Call], found: InferredShapes
) -> None:
    """Call a copy of the model in different ways until one of them succeeds, and add what it returns or raises."""
    shapes = binding.data | binding.labels
    for training, dtypes in calls:
        if model.training != training:
            model.train(training)
        tensors = {path: torch.zeros(shapes[path], dtype=kind, device=device) for path, kind in dtypes.items()}
        try:
            args, kwargs = _as_arguments(model, tensors)
            returned = model(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - errors of the user's code are the result
            found.errors.append(error)
            found.refuses &= not _is_inconclusive(error)
        else:
            found.refuses = False
            found.shapes = [(name, tuple(tensor.shape)) for name, tensor in named_outputs(returned)]
            return


def _is_inconclusive(error: Exception) -> bool:
    """Return whether an error is about tensors without values instead of shapes."""
    return isinstance(error, NotImplementedError) or "meta" in str(error).lower()


def _as_arguments(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call: by name if the model has such names, or else by position."""
    arguments = _nested(tensors)
    parameters = inspect.signature(model.forward).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    if arguments.keys() <= {each.name for each in parameters if each.kind in kinds}:
        return (), arguments
    return tuple(arguments.values()), {}


def _nested(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the containers that paths refer to.

    >>> _nested({"x": 1, "pair[0]": 2, "pair[1]['mask']": 3})
    {'x': 1, 'pair': (2, {'mask': 3})}
    """
    root: dict[Any, Any] = {}
    for path, tensor in tensors.items():
        name, *keys = [step for step in re.split(r"\[(.+?)\]", path) if step]
        *steps, last = (name, *map(ast.literal_eval, keys))
        inner = root
        for step in steps:
            inner = inner.setdefault(step, {})
        inner[last] = tensor
    return {name: _with_tuples(part) for name, part in root.items()}


def _with_tuples(part: Any) -> Any:
    """Convert dicts whose keys are all integers to tuples."""
    if not isinstance(part, dict):
        return part
    parts = {key: _with_tuples(each) for key, each in part.items()}
    return tuple(parts.values()) if all(type(key) is int for key in parts) else parts
