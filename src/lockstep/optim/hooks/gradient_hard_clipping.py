"""Bound every element of the gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.optim.hooks.gradient_hook import GradientHook
from lockstep.precision import ChangesOnlyGradients


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
