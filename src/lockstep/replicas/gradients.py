"""What becomes of the gradients that a group's backward gives: written, added, or not computed at all.

The sum over devices is kept where an optimizer looks for it, in ``parameter.grad`` of the model, and beside
it the part of each device. Where somebody else has changed ``parameter.grad`` since (an optimizer's
``zero_grad``, clipping), the parts no longer add up to it; they are forgotten, and begin anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from lockstep.replicas.input_gradients import GradMode, checked_mode
from lockstep.replicas.summing import hooked
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
                total = hooked(parameter, total)
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
