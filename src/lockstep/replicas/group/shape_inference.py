"""Infer the shapes that a model returns for inputs of given shapes, without side effects.

A copy of the model is run on tensors that have shapes but no values, those of the device "meta", and random states are
restored. This is inconclusive if the model looks at values. The dtypes of the inputs are not known, so floating-point
inputs are tried before integer ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Final, TypeAlias

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lockstep.replicas.batch.inputs import Inputs
from lockstep.replicas.batch.outputs import named_outputs
from lockstep.replicas.group.bound_inputs import arguments_of, data_and_labels
from lockstep.replicas.modules.on_device import ModuleWrapper
from lockstep.replicas.pool.copies import HOOK_NAMES, copy_model
from lockstep.replicas.pool.probes import uncompiled
from lockstep.streams import restored_generators

MAX_MIXED_INPUTS: Final = 4
"""Up to this number of inputs, all mixtures of floating-point and integer inputs are tried. Beyond, all inputs have the
same dtype."""

META: Final = torch.device("meta")

Shapes: TypeAlias = "list[tuple[str, tuple[int, ...]]]"
"""The name and shape of each output for the whole batch."""


def infer_shapes(
    model: nn.Module, bound: Inputs, arguments: Sequence[str], *, training: bool
) -> tuple[Shapes | None, Exception | None]:
    """Infer the shapes of outputs.

    Args:
        model: The model. It is not modified, and its hooks are not called, except for those of torch that compute its
            weights.
        bound: The shapes of the inputs. Calls are tried with the labels as arguments, and without them.
        arguments: The names of the positional arguments of the model.
        training: Whether training mode is tried first.

    Returns:
        The shapes, or None if they cannot be inferred; and the error of the model if the shapes are the reason.
    """
    # A path leads into a nest of an unknown kind. A wrapper has devices of its own, and possibly threads. Lazy
    # parameters have no shapes yet.
    if (
        arguments_of(bound.names) != bound.names
        or any(isinstance(module, ModuleWrapper) for module in model.modules())
        or any(map(is_lazy, model.parameters()))
    ):
        return None, None
    copied = _without_own_hooks(copy_model(model, META, lambda _: False, {}))
    described, errors = dict(zip(bound.names, bound.tensors, strict=True)), list[Exception]()
    with uncompiled(), restored_generators(), torch.no_grad(), META:
        for mode, dtypes in product(dict.fromkeys((training, False)), _input_dtypes(model, bound)):
            if copied.training != mode:
                copied.train(mode)
            tensors = {path: described[path].to(dtype, copy=True) for path, dtype in dtypes.items()}
            try:
                by_name = tensors.keys() <= set(arguments)
                returned = copied(**tensors) if by_name else copied(*tensors.values())
            except Exception as error:  # noqa: BLE001 - errors of the user's code are the result
                errors.append(error)
            else:
                return [(name, tuple(tensor.shape)) for name, tensor in named_outputs(returned)], None
    # Whether the model would raise such an error for tensors with values, too, is not known.
    if any(isinstance(error, NotImplementedError) or "meta" in str(error).lower() for error in errors):
        return None, None
    # An error about a wrong dtype explains less than one about a shape.
    return None, next((error for error in errors if "scalar type" not in str(error)), errors[0])


def _input_dtypes(model: nn.Module, bound: Inputs) -> Iterator[dict[str, torch.dtype]]:
    """Yield the dtypes that inputs may have, by path, with the most common ones first."""
    model_dtypes = (each.dtype for each in model.parameters() if each.is_floating_point())
    both = (next(model_dtypes, torch.get_default_dtype()), torch.int64)
    data, every_label = data_and_labels(bound)
    for labels in (every_label, []) if every_label else ([],):
        # Labels are most often integers, so these come first.
        kinds = [both] * len(data) + [both[::-1]] * len(labels)
        for dtypes in product(*kinds) if len(kinds) <= MAX_MIXED_INPUTS else zip(*kinds, strict=True):
            yield dict(zip((*data, *labels), dtypes, strict=True))


def _without_own_hooks(model: nn.Module) -> nn.Module:
    """Remove the hooks of a model that do not come from torch, and return it."""
    for module in model.modules():
        for hooks in (vars(module)[name] for name in HOOK_NAMES):
            for key, hook in list(hooks.items()):
                if not type(hook).__module__.startswith("torch."):
                    del hooks[key]
    return model
