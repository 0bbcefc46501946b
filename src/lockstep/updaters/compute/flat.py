"""Lay the gradients of all parameters end to end in one tensor, for those who want them so."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from lockstep.plan import ALIGNMENT
from lockstep.strides import gradient_strides
from lockstep.tree import Tensors


class FlatGradients:
    """One tensor for the gradients of all parameters, and a view of it for each.

    Each parameter begins at a multiple of `ALIGNMENT` elements, where kernels meet the same vector lanes as
    in a tensor of its own; what lies between is zero. A view has the strides that autograd gives a gradient:
    the elements of a channels_last weight's gradient follow each other as the weight's do.

    Args:
        parameters: All on one device.
        dtype: Of the gradients.

    Raises:
        ValueError: The parameters are on several devices.

    >>> flat = FlatGradients([nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))], torch.float32)
    >>> gradients = flat.store([torch.ones(3), None])
    >>> flat.tensor.shape, flat.tensor.sum().item(), gradients[1]
    (torch.Size([128]), 3.0, None)
    """

    def __init__(self, parameters: Sequence[nn.Parameter], dtype: torch.dtype) -> None:
        devices = {parameter.device for parameter in parameters}
        if len(devices) != 1:
            raise ValueError(f"`flat_gradients` must be of one device, got {len(devices)}.")
        sizes = [-(-parameter.numel() // ALIGNMENT) * ALIGNMENT for parameter in parameters]
        self.tensor = torch.zeros(sum(sizes), device=devices.pop(), dtype=dtype)
        self._views = [
            part.as_strided(parameter.shape, gradient_strides(parameter))
            for part, parameter in zip(torch.split(self.tensor, sizes), parameters, strict=True)
        ]

    def store(self, gradients: Tensors) -> Tensors:
        """Copy gradients to their places.

        Returns:
            The views that now hold them; None where there was none, whose place is zero.
        """
        stored: Tensors = []
        for view, gradient in zip(self._views, gradients, strict=True):
            if gradient is None:
                view.zero_()
            else:
                view.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
            stored.append(None if gradient is None else view)
        return stored
