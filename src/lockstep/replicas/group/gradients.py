"""The gradients of a group: how they are stored, and how the gradients of outputs are read.

`read_grad_modes` decides for each parameter whether its gradient is written, added or not computed. `GradientStore`
keeps the sum over devices where an optimizer expects it, in ``parameter.grad`` of the model, and in addition the part
of each device. If other code has changed ``parameter.grad`` in the meantime (such as ``zero_grad`` of an optimizer, or
clipping), the parts no longer add up to it and are dropped. `read_output_grads` converts what the user passes to
backward to one gradient per output.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lockstep import nest
from lockstep.errors import warn
from lockstep.replicas.batch.input_gradients import GradMode, check_grad_mode
from lockstep.replicas.batch.outputs import Outputs
from lockstep.replicas.passes.means import why_no_mean
from lockstep.replicas.passes.summing import apply_tensor_hooks
from lockstep.strides import laid_out_for
from lockstep.tree import Tensors


def read_grad_modes(
    model: nn.Module, grad_mode: GradMode | Mapping[str, GradMode], fixed: Iterable[str]
) -> dict[str, GradMode]:
    """Return the gradient mode of each parameter, and of each buffer that may have a gradient.

    Args:
        model: The model. Its parameters and buffers can be referred to by any of their names.
        grad_mode: One mode for all, or modes by name, where a parameter that is not named has "write".
        fixed: The names of parameters without a gradient, unless `grad_mode` names them.

    Raises:
        TypeError: If `fixed` is no list of names.
        ValueError: If a mode is not 'write', 'add' or 'null', or a name belongs to no parameter.
    """
    if isinstance(fixed, str) or not isinstance(fixed, Iterable):
        raise TypeError(f"`fixed` must be a list of names, got {fixed!r}.")
    # In reverse, so that the first name of a tied parameter remains in the dict.
    first = {tensor: name for name, tensor in reversed(list(_differentiable(model)))}
    names = {name: first[tensor] for name, tensor in _differentiable(model, remove_duplicate=False)}
    by_name = grad_mode if isinstance(grad_mode, Mapping) else {}
    default: GradMode = "write" if isinstance(grad_mode, Mapping) else check_grad_mode(grad_mode, "grad_mode")
    modes: dict[str, GradMode] = dict.fromkeys(first.values(), default)
    for name in fixed:
        modes[_first_name(name, names, "fixed")] = "null"
    for name, mode in by_name.items():
        modes[_first_name(name, names, "grad_mode")] = check_grad_mode(mode, f"grad_mode[{name!r}]")
    return modes


def _differentiable(model: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters, and then the buffers that can require a gradient, with their names."""
    yield from model.named_parameters(remove_duplicate=remove_duplicate)
    for name, buffer in model.named_buffers(remove_duplicate=remove_duplicate):
        if buffer.is_floating_point() or buffer.is_complex():
            yield name, buffer


def _first_name(name: str, names: Mapping[str, str], argument: str) -> str:
    if name not in names:
        raise ValueError(f"`{argument}` must name parameters of `model` ({', '.join(names)}), got {name!r}.")
    return names[name]


@dataclass(slots=True)
class _StoredGradient:
    """The gradient of one parameter after a backward.

    Attributes:
        total: The sum over devices.
        version: The version counter of the sum at that time.
        parts: The part of each device.
        adds: Whether the next backward adds to it.
    """

    total: torch.Tensor
    version: int
    parts: Tensors
    adds: bool

    def holds(self, parameter: torch.Tensor) -> bool:
        """Return whether the sum is still the gradient of the parameter and has not been changed.

        Args:
            parameter: The parameter.
        """
        return self.total is parameter.grad and self.version == self.total._version


@dataclass(slots=True)
class GradientStore:
    """The gradients of parameters, summed and by device. Groups that share parameters share one store."""

    _stored: dict[torch.Tensor, _StoredGradient] = field(default_factory=dict)

    def store(self, parameter: torch.Tensor, total: torch.Tensor | None, parts: Tensors, *, add: bool) -> None:
        """Store the gradient that a backward computed for one parameter.

        Args:
            parameter: The parameter, whose ``grad`` is changed.
            total: The sum over devices, which the store takes ownership of, or None if no shard reached the parameter.
            parts: The part of each device, which the store takes ownership of. One of them may be the same tensor as
                `total`.
            add: Whether to add to the present gradient instead of replacing it.
        """
        if total is not None:
            if total.dtype != parameter.dtype or total.device != parameter.device:
                total = total.to(parameter)
            if parameter._backward_hooks:
                total = apply_tensor_hooks(parameter, total)
            # Fused optimizers require the gradient to have the strides of the parameter.
            if total.layout is torch.strided and total.stride() != parameter.stride():
                total = laid_out_for(parameter, total)
        if add and parameter.grad is not None:
            # Read before the addition, which changes the version counter and so outdates the parts.
            before = self.parts(parameter, len(parts))
            if total is not None:
                with torch.no_grad():
                    parameter.grad.add_(total)
                parts = [_add_part(old, new, parameter.grad) for old, new in zip(before, parts, strict=True)]
            else:
                parts = before
        else:
            parameter.grad = total
        if parameter.grad is None:
            self._stored.pop(parameter, None)
        else:
            self._stored[parameter] = _StoredGradient(parameter.grad, parameter.grad._version, parts, add)

    def parts(self, parameter: torch.Tensor, num_devices: int) -> Tensors:
        """Return the part of each device, or None.

        Args:
            parameter: The parameter.
            num_devices: The number of devices of the group.
        """
        stored = self._stored.get(parameter)
        if stored is None or not stored.holds(parameter):
            return [None] * num_devices
        # A group that shares the store may have another number of devices.
        return (stored.parts + [None] * num_devices)[:num_devices]

    def drop_outdated(self) -> None:
        """Drop the parts that the next backward replaces, and those that no longer add up to a gradient."""
        for parameter, stored in list(self._stored.items()):
            if not stored.adds or not stored.holds(parameter):
                del self._stored[parameter]

    def clear(self, parameter: torch.Tensor) -> None:
        """Drop the gradient of one parameter.

        Args:
            parameter: The parameter, whose ``grad`` is set to None.
        """
        parameter.grad = None
        self._stored.pop(parameter, None)


def _add_part(old: torch.Tensor | None, new: torch.Tensor | None, total: torch.Tensor) -> torch.Tensor | None:
    """Add to the part of a device in place, unless it is the sum of all devices, which has been added to already."""
    if old is None or new is None or old is total:
        return new if old is None else old
    return old.add_(new)


@dataclass(frozen=True, slots=True)
class _OutputIndex:
    """A placeholder for an output in the containers that the model returned."""

    index: int


def read_output_grads(outputs: Outputs, merged: list[torch.Tensor], given: Any) -> Tensors:
    """Return one gradient per output in the dtype of the output, or None where nothing flows back.

    Args:
        outputs: The outputs of the forward.
        merged: The merged outputs.
        given: None if the model returned a loss, which is a floating-point output without dimensions, whose gradient is
            1. Otherwise the containers that the model returned, with a gradient or None for each output, where keys of
            dicts may be missing.

    Raises:
        TypeError: If something other than a tensor was given for an output.
        ValueError: If None was given and there is no loss or more than one, or the containers or shapes differ from
            those of the outputs.
    """
    if given is None:
        return _loss_gradient(outputs, merged)
    if isinstance(given, torch.Tensor) and isinstance(outputs.results[0].returned, torch.Tensor):
        return [_check_output_grad(given, outputs.names[0], merged[0])]
    returned = outputs.unflatten([_OutputIndex(index) for index in range(len(merged))])
    if isinstance(returned, _OutputIndex) and isinstance(given, tuple | list):
        returned = [returned]
    grads: Tensors = [None] * len(merged)
    for index, grad in _pairs(returned, given):
        grads[index] = _check_output_grad(grad, outputs.names[index], merged[index])
    return grads


def _check_output_grad(grad: Any, name: str, output: torch.Tensor) -> torch.Tensor:
    """Return the gradient of an output in the dtype of the output, after checking its type and shape."""
    if not isinstance(grad, torch.Tensor):
        raise TypeError(f"`output_grads` must hold a tensor for {name!r}, got a {type(grad).__name__}.")
    if grad.shape != output.shape:
        raise ValueError(
            f"`output_grads` must have the shape {tuple(output.shape)} for {name!r}, got {tuple(grad.shape)}."
        )
    return grad.detach().to(output.dtype)


def _loss_gradient(outputs: Outputs, merged: list[torch.Tensor]) -> Tensors:
    """Return 1 for the only output that is a loss, and None for all others."""
    scalars = [index for index, each in enumerate(merged) if each.dim() == 0 and each.is_floating_point()]
    if len(scalars) > 1:
        shards = [each.tensors for each in outputs.results]
        # Values that are returned for logging, without a graph, are not losses.
        scalars = [index for index in scalars if any(tensors[index].requires_grad for tensors in shards)]
    if len(scalars) != 1:
        found = ", ".join(f"{name}: {tuple(each.shape)}" for name, each in zip(outputs.names, merged, strict=True))
        raise ValueError(
            "`output_grads` must be given unless the model returns one loss, a floating-point number without "
            f"dimensions; got outputs of shapes {found}."
        )
    return [torch.ones_like(each) if index in scalars else None for index, each in enumerate(merged)]


def warn_of_no_mean(outputs: Outputs, grads: Tensors) -> None:
    """Warn if the loss that the model returned is seen to be no mean over samples, and the batch was split.

    Args:
        outputs: The outputs of the forward.
        grads: The gradient of the loss, and None for all other outputs.
    """
    (index,) = (index for index, grad in enumerate(grads) if grad is not None)
    shards = outputs.results if len(outputs.results) > 1 else []
    found = {why_no_mean(each.tensors[index], len(each.shard.samples)) for each in shards}
    for what in sorted(found - {""}):
        warn(
            "`output_grads` must be given unless the model returns the mean over its samples as the loss, but it "
            f"returns {what} over them, so that the gradient depends on how the batch is split. Return one loss for "
            "each sample, and pass their gradients: ones for the sum.",
        )


def _pairs(returned: Any, given: Any) -> list[tuple[int, Any]]:
    """Pair the indices of outputs with the gradients given for them."""
    if given is None:
        return []
    if isinstance(returned, _OutputIndex):
        return [(returned.index, given)]
    if isinstance(returned, Mapping):
        if not isinstance(given, Mapping) or given.keys() - returned.keys():
            raise ValueError(f"`output_grads` must have the keys of the output, {list(returned)}, got {_kind(given)}.")
        return [pair for key, part in given.items() for pair in _pairs(returned[key], part)]
    if nest.is_record(returned):
        parts = nest.record_parts(given) if nest.is_record(given) else given
        return _pairs(nest.record_parts(returned), parts)
    if isinstance(returned, tuple | list):
        if not isinstance(given, tuple | list) or len(given) != len(returned):
            raise ValueError(
                f"`output_grads` must hold {len(returned)} gradients, as the output does, got {_kind(given)}."
            )
        return [pair for parts in zip(returned, given, strict=True) for pair in _pairs(*parts)]
    return []


def _kind(given: Any) -> str:
    """Describe what was given for a container, for error messages."""
    if isinstance(given, Mapping):
        return str(list(given))
    if isinstance(given, tuple | list):
        return str(len(given))
    return f"a {type(given).__name__}"
