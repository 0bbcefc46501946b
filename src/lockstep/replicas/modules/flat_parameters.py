"""Lay parameters end to end in one tensor, and their gradients in another."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import nn


class FlatParameters(NamedTuple):
    """All parameters as one, for whoever wants to read or write them at once.

    Attributes:
        values: The parameters' own memory, end to end; a parameter itself, so that an optimizer takes it.
        gradients: The memory of their gradients, which is also ``values.grad``.
    """

    values: nn.Parameter
    gradients: torch.Tensor


def lay_end_to_end(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """Move parameters into one new tensor, of which each is a view afterwards; they stay the same objects.

    Args:
        parameters: At least one, all of one dtype on one device.
    """
    with torch.no_grad():
        whole = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
    parts = torch.split(whole, [parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.data = part.view(parameter.shape)
    return whole


class Flattened:
    """Parameters that have been moved into one tensor, and what keeps them there.

    Args:
        parameters: Each once, in the order they are to have; they stay the same objects.

    Raises:
        ValueError: There is none, or they are of several dtypes or on several devices.

    >>> layer = nn.Linear(2, 1)
    >>> flat = Flattened(list(layer.parameters()))
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
        sizes = [parameter.numel() for parameter in parameters]
        self._runs = list(pairwise(accumulate(sizes, initial=0)))
        self.gather_gradients()

    def holds(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Tell whether these are the parameters, and still lie where they were laid."""
        values = self.tensors.values
        begin, size = values.data_ptr(), values.element_size()
        return (
            len(parameters) == len(self._parameters)
            and all(map(_is, parameters, self._parameters))
            and all(
                parameter.data_ptr() == begin + start * size and parameter.dtype == values.dtype
                for parameter, (start, _) in zip(parameters, self._runs, strict=True)
            )
        )

    @torch.no_grad()
    def gather_gradients(self) -> None:
        """Let every gradient lie in the flat one, so that backward adds to it there.

        A gradient that has been set to None counts as zeros, be it that of a parameter or the flat one, with
        which all of them are gone.
        """
        values, gradients = self.tensors
        if values.grad is not gradients:
            if values.grad is None:
                gradients.zero_()
            else:
                gradients.copy_(values.grad)
            values.grad = gradients
            self._bind()
            return
        for parameter, (start, stop) in zip(self._parameters, self._runs, strict=True):
            view = gradients[start:stop].view(parameter.shape)
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad.data_ptr() != view.data_ptr():
                view.copy_(parameter.grad)
        self._bind()

    def _bind(self) -> None:
        """Make each part of the flat gradient the gradient of its parameter, where it asks for one."""
        for parameter, (start, stop) in zip(self._parameters, self._runs, strict=True):
            if parameter.requires_grad:
                parameter.grad = self.tensors.gradients[start:stop].view(parameter.shape)


def _is(one: object, other: object) -> bool:
    return one is other
