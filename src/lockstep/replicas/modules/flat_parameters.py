"""Store parameters end to end in one tensor, and their gradients in another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn


class FlatParameters(NamedTuple):
    """All parameters as one tensor, to read or write them at once.

    Attributes:
        values: The memory of the parameters, end to end. It is a parameter itself, so that it can be passed to an
            optimizer.
        gradients: The memory of their gradients, which is also ``values.grad``.
    """

    values: nn.Parameter
    gradients: torch.Tensor


def lay_end_to_end(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """Move parameters to one new tensor, of which they become views. They remain the same objects.

    Args:
        parameters: The parameters, at least one, all of one dtype on one device.

    Returns:
        The new tensor.
    """
    with torch.no_grad():
        whole = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
    parts = torch.split(whole, [parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        # By `data`, so that the parameters keep their identity in optimizers and hooks.
        parameter.data = part.view(parameter.shape)
    return whole


class FlattenedParameters:
    """Parameters that have been moved to one tensor, with their gradients.

    Args:
        parameters: The parameters in order, each one once. They remain the same objects.

    Raises:
        ValueError: If there is no parameter, or they have several dtypes or devices.

    >>> layer = nn.Linear(2, 1)
    >>> flat = FlattenedParameters(list(layer.parameters()))
    >>> flat.tensors.values.data.fill_(3.0)
    tensor([3., 3., 3.])
    >>> layer.bias
    Parameter containing:
    tensor([3.], requires_grad=True)
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        kinds = {(parameter.dtype, parameter.device) for parameter in parameters}
        if len(kinds) != 1:
            raise ValueError(
                "`module` must have parameters of one dtype on one device to lay them end to end, got "
                f"{sorted(f'{dtype} on {device}' for dtype, device in kinds) or 'none'}."
            )
        self._parameters = list(parameters)
        values = nn.Parameter(lay_end_to_end(parameters))
        gradients = torch.zeros_like(values, requires_grad=False)
        self.tensors = FlatParameters(values, gradients)
        values.grad = gradients
        parts = torch.split(gradients, [parameter.numel() for parameter in parameters])
        self._views = [part.view(each.shape) for part, each in zip(parts, parameters, strict=True)]
        self._memory = _memory_of(parameters)
        self.gather_gradients()

    def holds(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Return whether these are the parameters, and they are still in this memory.

        Args:
            parameters: The current parameters of the module.
        """
        # `module.to()` replaces the memory of a parameter or the parameter itself.
        return _memory_of(parameters) == self._memory

    @torch.no_grad()
    def gather_gradients(self) -> None:
        """Move every gradient to the flat one, so that backward adds to it there.

        A gradient that is None counts as zeros. If the flat gradient is None, all gradients count as zeros.
        """
        values, gradients = self.tensors
        # An optimizer of the flat parameter has replaced or dropped its gradient, which decides for all parameters.
        if values.grad is not gradients:
            if values.grad is None:
                gradients.zero_()
            else:
                gradients.copy_(values.grad)
            values.grad = gradients
            self._bind()
            return
        for parameter, view in zip(self._parameters, self._views, strict=True):
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad.data_ptr() != view.data_ptr():
                view.copy_(parameter.grad)
        self._bind()

    def _bind(self) -> None:
        """Set the gradient of each parameter that requires one to its part of the flat gradient."""
        for parameter, view in zip(self._parameters, self._views, strict=True):
            if parameter.requires_grad:
                parameter.grad = view


def _memory_of(parameters: Sequence[nn.Parameter]) -> list[tuple[int, int, torch.dtype]]:
    return [(id(each), each.data_ptr(), each.dtype) for each in parameters]
