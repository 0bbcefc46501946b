"""Pull weights towards zero by their size."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from lockstep.optim.adding import add_scaled_
from lockstep.optim.hooks.gradient_hook import GradientHook
from lockstep.precision import ChangesOnlyGradients


@dataclass(frozen=True)
class WeightDecay(GradientHook, ChangesOnlyGradients):
    """Add the gradient of half the weights' squared norm, times a rate: g ← g + rate·w.

    Args:
        rate: At least 0.

    Raises:
        ValueError: The rate is out of range.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.tensor([2.0]))
    >>> weight.grad = torch.tensor([1.0])
    >>> WeightDecay(0.25)(torch.optim.SGD([weight]))
    >>> weight.grad
    tensor([1.5000])
    """

    rate: float

    def __post_init__(self) -> None:
        if not 0 <= self.rate < math.inf:
            raise ValueError(f"`rate` must be finite and at least 0, got {self.rate}.")

    def change_(self, weights: list[Tensor], grads: list[Tensor]) -> None:
        """Add rate·w to each gradient."""
        add_scaled_(grads, weights, self.rate)
