"""Bound the gradient: its norm, or every element."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.optim.hooks.gradient_hook import GradientHook
from lockstep.optim.norm import global_norm
from lockstep.precision import ChangesOnlyGradients


@dataclass(frozen=True)
class GradientClipping(GradientHook, ChangesOnlyGradients):
    """Scale all gradients by one number so that their joint norm is at most a threshold.

    With the norm n of all gradients as one vector: g ← g · min(1, threshold/n). Directions stay, and
    so do zeros. A norm that is not finite makes every gradient zero or NaN, and so tells of itself.
    Added to one group (``add_hook(hook, group=0)``) it bounds the norm of that group alone.

    Args:
        threshold: Above 0.

    Raises:
        ValueError: The threshold is out of range.

    Determinism: the order of summation depends on the shapes and their order, not on the number of
    threads (see `lockstep.optim.norm`). Nothing waits for the device.

    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> GradientClipping(2.5)(torch.optim.SGD([weight]))
    >>> weight.grad
    tensor([1.5000, 2.0000])
    """

    threshold: float

    def __post_init__(self) -> None:
        if not self.threshold > 0:
            raise ValueError(f"`threshold` must be above 0, got {self.threshold}.")

    def change_(self, weights: list[Tensor], grads: list[Tensor]) -> None:  # noqa: ARG002 - gradients alone decide
        """Scale each gradient by the same number."""
        rate = (self.threshold / global_norm(grads)).clamp(max=1)
        rates = {device: rate.to(device) for device in {grad.device for grad in grads}}
        for device, local_rate in rates.items():
            torch._foreach_mul_([grad for grad in grads if grad.device == device], local_rate)


@dataclass(frozen=True)
class GradientHardClipping(GradientHook, ChangesOnlyGradients):
    """Put every element of the gradients between two bounds: g ← min(max(g, lower), upper).

    Args:
        lower: The least value an element may keep.
        upper: The greatest, at least ``lower``.

    Raises:
        ValueError: The bounds are out of order.

    >>> weight = torch.nn.Parameter(torch.zeros(3))
    >>> weight.grad = torch.tensor([-3.0, 0.5, 3.0])
    >>> GradientHardClipping(-1.0, 2.0)(torch.optim.SGD([weight]))
    >>> weight.grad
    tensor([-1.0000,  0.5000,  2.0000])
    """

    lower: float
    upper: float

    def __post_init__(self) -> None:
        if not self.lower <= self.upper:
            raise ValueError(f"`lower` must be at most `upper` ({self.upper}), got {self.lower}.")

    def change_(self, weights: list[Tensor], grads: list[Tensor]) -> None:  # noqa: ARG002 - gradients alone decide
        """Clamp each gradient."""
        torch._foreach_clamp_min_(grads, self.lower)
        torch._foreach_clamp_max_(grads, self.upper)
