"""Store the gradients of all parameters end to end in one tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from lockstep.plan import ALIGNMENT
from lockstep.strides import gradient_strides
from lockstep.tree import Tensors


class FlatGradients:
    """One tensor for the gradients of all parameters, with a view of it for each parameter.

    Each parameter begins at a multiple of `ALIGNMENT` elements, and the gaps are zero. A view has the strides that
    autograd uses for the parameter's gradient: the gradient of a channels_last weight is laid out like the weight.

    Args:
        parameters: The parameters, all on one device.
        dtype: The dtype of the gradients.

    Raises:
        ValueError: If the parameters are on several devices.

    >>> flat = FlatGradients([nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))], torch.float32)
    >>> gradients = flat.store([torch.ones(3), None])
    >>> flat.tensor.shape, flat.tensor.sum().item(), gradients[1]
    (torch.Size([128]), 3.0, None)
    """

    def __init__(self, parameters: Sequence[nn.Parameter], dtype: torch.dtype) -> None:
        devices = {parameter.device for parameter in parameters}
        if len(devices) != 1:
            raise ValueError(f"`flat_gradients` must be of one device, got {len(devices)}.")
        # At these offsets a kernel processes an element in the same vector lane as in a separate tensor, so the bits of
        # elementwise operations do not depend on the neighbours.
        sizes = [-(-parameter.numel() // ALIGNMENT) * ALIGNMENT for parameter in parameters]
        self.tensor = torch.zeros(sum(sizes), device=devices.pop(), dtype=dtype)
        self._views = [
            part.as_strided(parameter.shape, gradient_strides(parameter))
            for part, parameter in zip(torch.split(self.tensor, sizes), parameters, strict=True)
        ]

    def store(self, gradients: Tensors) -> Tensors:
        """Copy gradients into the flat tensor.

        Args:
            gradients: One gradient per parameter, None where there is none.

        Returns:
            The views that now hold the gradients; None where there was none, and the view is filled with zeros.
        """
        stored: Tensors = []
        for view, gradient in zip(self._views, gradients, strict=True):
            # Otherwise the flat tensor would still contain the gradient of an earlier update.
            if gradient is None:
                view.zero_()
            else:
                view.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
            stored.append(None if gradient is None else view)
        return stored
