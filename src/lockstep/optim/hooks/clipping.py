"""Clip the gradients by their norm or by value."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.optim.hooks.gradient_hook import GradientHook
from lockstep.optim.norm import global_norm
from lockstep.precision import ChangesOnlyGradients


@dataclass(frozen=True)
class GradientClipping(GradientHook, ChangesOnlyGradients):
    """Scale all gradients by one factor so that their total norm is at most a threshold.

    With the norm n of all gradients as one vector: g ← g · min(1, threshold/n). The direction does not change,
    and zeros stay zero. If the norm is not finite, every gradient becomes zero or NaN, which makes it visible.
    When added to one group (``add_hook(hook, group=0)``), it limits the norm of that group alone.

    Args:
        threshold: The largest norm, above 0.

    Raises:
        ValueError: If the threshold is out of range.

    Determinism: the order of summation depends on the shapes and their order, not on the number of
    threads (see `lockstep.optim.norm`). Nothing synchronizes with the device.

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
        """Scale all gradients by the same factor."""
        # Kept on the device: reading the norm on the host would wait for the whole backward.
        rate = (self.threshold / global_norm(grads)).clamp(max=1)
        rates = {device: rate.to(device) for device in {grad.device for grad in grads}}
        for device, local_rate in rates.items():
            torch._foreach_mul_([grad for grad in grads if grad.device == device], local_rate)


@dataclass(frozen=True)
class GradientHardClipping(GradientHook, ChangesOnlyGradients):
    """Clamp every element of the gradients between two bounds: g ← min(max(g, lower), upper).

    Args:
        lower: The smallest value of an element.
        upper: The largest value of an element, at least ``lower``.

    Raises:
        ValueError: If ``lower`` is greater than ``upper``.

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
