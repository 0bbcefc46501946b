"""Bound the norm of the whole gradient."""

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
