"""What becomes of the gradients that a group's backward gives: written, added, or not computed at all.

The sum over devices is kept where an optimizer looks for it, in ``parameter.grad`` of the model, and beside
it the part of each device. Where somebody else has changed ``parameter.grad`` since (an optimizer's
``zero_grad``, clipping), the parts no longer add up to it; they are forgotten, and begin anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lockstep import nest
from lockstep.replicas.batch import GradMode, Outputs, checked_mode
from lockstep.replicas.passes import apply_tensor_hooks
from lockstep.strides import laid_out_for
from lockstep.tree import Tensors


def read_grad_modes(
    model: nn.Module, grad_mode: GradMode | Mapping[str, GradMode], fixed: Iterable[str]
) -> dict[str, GradMode]:
    """Say for each parameter, and each buffer that may have one, what becomes of its gradient.

    Args:
        model: Its parameters and buffers, by any of the names they have.
        grad_mode: One word for all, or words by name; "write" for a parameter that is not named.
        fixed: Names of parameters without a gradient, unless `grad_mode` names them.

    Raises:
        TypeError: `fixed` is a single string.
        ValueError: A word is none of the three, or a name belongs to no parameter.
    """
    if isinstance(fixed, str):
        raise TypeError(f"`fixed` must be names in a list, got the string {fixed!r}.")
    first = {tensor: name for name, tensor in reversed(list(_differentiable(model)))}
    names = {name: first[tensor] for name, tensor in _differentiable(model, remove_duplicate=False)}
    by_name = grad_mode if isinstance(grad_mode, Mapping) else {}
    default: GradMode = "write" if isinstance(grad_mode, Mapping) else checked_mode(grad_mode, "grad_mode")
    modes: dict[str, GradMode] = dict.fromkeys(first.values(), default)
    for name in fixed:
        modes[_known(name, names, "fixed")] = "null"
    for name, word in by_name.items():
        modes[_known(name, names, "grad_mode")] = checked_mode(word, f"grad_mode[{name!r}]")
    return modes


def _differentiable(model: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters, then the buffers that can require a gradient, with their names."""
    yield from model.named_parameters(remove_duplicate=remove_duplicate)
    for name, buffer in model.named_buffers(remove_duplicate=remove_duplicate):
        if buffer.is_floating_point() or buffer.is_complex():
            yield name, buffer


def _known(name: str, names: Mapping[str, str], argument: str) -> str:
    if name not in names:
        raise ValueError(f"`{argument}` must name parameters of `model` ({', '.join(names)}), got {name!r}.")
    return names[name]


@dataclass(slots=True)
class _Kept:
    """The gradient of one parameter as it was left: the sum, its version, and the part of each device.

    Attributes:
        adds: Whether the next backward adds to it.
    """

    total: torch.Tensor
    version: int
    parts: Tensors
    adds: bool

    def holds(self, parameter: torch.Tensor) -> bool:
        """Tell whether nobody has changed the sum since."""
        return self.total is parameter.grad and self.version == self.total._version


@dataclass(slots=True)
class GradientStore:
    """The gradients of parameters, summed and by device; groups that share parameters share one."""

    _kept: dict[torch.Tensor, _Kept] = field(default_factory=dict)

    def put(self, parameter: torch.Tensor, total: torch.Tensor | None, parts: Tensors, *, add: bool) -> None:
        """Take in what a backward gave for one parameter.

        Args:
            parameter: Its ``grad`` is changed.
            total: The sum over devices, owned by this store from now on; None where no shard reached it.
            parts: The part of each device, likewise; one of them may be the very tensor of the sum.
            add: Add to what is there; else what is there is replaced.
        """
        if total is not None:
            if total.dtype != parameter.dtype or total.device != parameter.device:
                total = total.to(parameter)
            if parameter._backward_hooks:
                total = apply_tensor_hooks(parameter, total)
            if total.layout is torch.strided and total.stride() != parameter.stride():
                total = laid_out_for(parameter, total)
        if add and parameter.grad is not None:
            before = self.parts(parameter, len(parts))
            if total is not None:
                with torch.no_grad():
                    parameter.grad.add_(total)
                parts = [_sum(old, new, parameter.grad) for old, new in zip(before, parts, strict=True)]
            else:
                parts = before
        else:
            parameter.grad = total
        if parameter.grad is None:
            self._kept.pop(parameter, None)
        else:
            self._kept[parameter] = _Kept(parameter.grad, parameter.grad._version, parts, add)

    def parts(self, parameter: torch.Tensor, num_devices: int) -> Tensors:
        """Give the part of each device; None where there is none."""
        kept = self._kept.get(parameter)
        if kept is None or not kept.holds(parameter):
            return [None] * num_devices
        return (kept.parts + [None] * num_devices)[:num_devices]

    def make_room(self) -> None:
        """Let go of parts that the next backward replaces, and of those that add up to nothing any more."""
        for parameter, kept in list(self._kept.items()):
            if not kept.adds or not kept.holds(parameter):
                del self._kept[parameter]

    def clear(self, parameter: torch.Tensor) -> None:
        """Forget the gradient of one parameter."""
        parameter.grad = None
        self._kept.pop(parameter, None)


def _sum(old: torch.Tensor | None, new: torch.Tensor | None, total: torch.Tensor) -> torch.Tensor | None:
    """Add to the part of a device in place, unless it is the sum of all devices, which has been added to."""
    if old is None or new is None or old is total:
        return new if old is None else old
    return old.add_(new)


@dataclass(frozen=True, slots=True)
class _Output:
    """Stands for an output, by its number."""

    index: int


def read_output_grads(outputs: Outputs, merged: list[torch.Tensor], given: Any) -> Tensors:
    """Give one gradient for each output, in its dtype; None where nothing flows back.

    Args:
        outputs: Of the forward.
        merged: The outputs put together.
        given: None where the model returned a loss: one floating-point output without dimensions, whose
            gradient is 1. Else the containers that the model returned with a gradient, or None, in the place
            of each output; keys of dicts may be left out.

    Raises:
        TypeError: Something else than a tensor stands for an output.
        ValueError: None was given where there is no loss or more than one, or what was given has other
            containers or shapes than the outputs.
    """
    if given is None:
        return _of_the_loss(outputs, merged)
    if isinstance(given, torch.Tensor) and isinstance(outputs.shards[0].returned, torch.Tensor):
        return [_checked(given, outputs.names[0], merged[0])]
    returned = outputs.nest([_Output(index) for index in range(len(merged))])
    if isinstance(returned, _Output) and isinstance(given, tuple | list):
        returned = [returned]
    grads: Tensors = [None] * len(merged)
    for index, grad in _pairs(returned, given):
        grads[index] = _checked(grad, outputs.names[index], merged[index])
    return grads


def _checked(grad: Any, name: str, output: torch.Tensor) -> torch.Tensor:
    """Give what stands for the gradient of one output in that one's dtype."""
    if not isinstance(grad, torch.Tensor):
        raise TypeError(f"`output_grads` must hold a tensor for {name!r}, got a {type(grad).__name__}.")
    if grad.shape != output.shape:
        raise ValueError(
            f"`output_grads` must have the shape {tuple(output.shape)} for {name!r}, got {tuple(grad.shape)}."
        )
    return grad.detach().to(output.dtype)


def _of_the_loss(outputs: Outputs, merged: list[torch.Tensor]) -> Tensors:
    """Let the gradient of the only loss be 1."""
    scalars = [index for index, each in enumerate(merged) if each.dim() == 0 and each.is_floating_point()]
    if len(scalars) > 1:
        shards = [each.tensors for each in outputs.shards]
        scalars = [index for index in scalars if any(tensors[index].requires_grad for tensors in shards)]
    if len(scalars) != 1:
        found = ", ".join(f"{name}: {tuple(each.shape)}" for name, each in zip(outputs.names, merged, strict=True))
        raise ValueError(
            "`output_grads` must be given unless the model returns one loss, a floating-point number without "
            f"dimensions; got outputs of shapes {found}."
        )
    return [torch.ones_like(each) if index in scalars else None for index, each in enumerate(merged)]


def _pairs(returned: Any, given: Any) -> list[tuple[int, Any]]:
    """Pair the numbers of outputs with what was given for them."""
    if given is None:
        return []
    if isinstance(returned, _Output):
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
    """Describe what was given in the place of a container."""
    if isinstance(given, Mapping):
        return str(list(given))
    if isinstance(given, tuple | list):
        return str(len(given))
    return f"a {type(given).__name__}"
