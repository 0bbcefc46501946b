"""Add the gradients of L2 and L1 penalties on the weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.optim.hooks.gradient_hook import GradientHook
from lockstep.optim.scaled_add import add_scaled_
from lockstep.precision import ChangesOnlyGradients


@dataclass(frozen=True)
class _Penalty(GradientHook, ChangesOnlyGradients):
    """A hook that adds the gradient of a penalty on the weights, times a rate."""

    rate: float

    def __post_init__(self) -> None:
        if not 0 <= self.rate < math.inf:
            raise ValueError(f"`rate` must be finite and at least 0, got {self.rate}.")


class WeightDecay(_Penalty):
    """Add the gradient of half the squared norm of the weights, times a rate: g ← g + rate·w.

    Args:
        rate: The weight decay, at least 0.

    Raises:
        ValueError: If the rate is out of range.

    >>> weight = torch.nn.Parameter(torch.tensor([2.0]))
    >>> weight.grad = torch.tensor([1.0])
    >>> WeightDecay(0.25)(torch.optim.SGD([weight]))
    >>> weight.grad
    tensor([1.5000])
    """

    def change_(self, weights: list[Tensor], grads: list[Tensor]) -> None:
        """Add rate·w to each gradient."""
        add_scaled_(grads, weights, self.rate)


class Lasso(_Penalty):
    """Add the gradient of the sum of the weights' absolute values, times a rate: g ← g + rate·sign(w).

    Args:
        rate: The factor of the penalty, at least 0.

    Raises:
        ValueError: If the rate is out of range.

    >>> weight = torch.nn.Parameter(torch.tensor([2.0, 0.0, -2.0]))
    >>> weight.grad = torch.tensor([1.0, 1.0, 1.0])
    >>> Lasso(0.25)(torch.optim.SGD([weight]))
    >>> weight.grad
    tensor([1.2500, 1.0000, 0.7500])
    """

    def change_(self, weights: list[Tensor], grads: list[Tensor]) -> None:
        """Add rate·sign(w) to each gradient."""
        signs = list(torch._foreach_sign(weights))  # noqa: SLF001 - torch's multi-tensor kernels have no other name
        add_scaled_(grads, signs, self.rate)
