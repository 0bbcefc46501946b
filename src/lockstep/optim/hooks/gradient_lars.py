"""Scale the step of each parameter in proportion to its norm."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.optim.hooks.gradient_hook import GradientHook
from lockstep.optim.norm import norms
from lockstep.optim.scaled_add import add_scaled_
from lockstep.precision import ChangesOnlyGradients


@dataclass(frozen=True)
class GradientLARS(GradientHook, ChangesOnlyGradients):
    """Scale the gradient of each parameter so that its step is proportional to the norm of the parameter.

    With ‖·‖ the Euclidean norm of one parameter or its gradient, λ the weight decay and c the coefficient::

        r = c·‖w‖ / (ε + ‖g‖ + λ·‖w‖)   where ‖w‖ > threshold, else 1
        g ← r·(g + λ·w)

    With a bound b on the elements, g in the last line is min(max(g, -b), b): the norm is that before the clipping, as
    in MXNet's lars. To clip before the norm, add `GradientHardClipping` before this hook.

    With c = 1, the learning rate is the fraction of its own norm that a parameter moves in a step. Combined with
    `MomentumSGD`, this is the complete optimizer of the paper, where c is called the trust coefficient.

    Args:
        threshold: The norm up to which a parameter keeps its unscaled gradient, at least 0.
        weight_decay: The weight decay λ, at least 0.
        eps: The number ε that is added to the denominator, above 0.
        coefficient: The trust coefficient c, above 0.
        clip: The bound b, above 0; None for none.

    Raises:
        ValueError: If a number is out of range.

    Determinism: the order of summation depends on the shapes (see `lockstep.optim.norm`). Nothing
    synchronizes with the device.

    References: You, Gitman, Ginsburg, "Large Batch Training of Convolutional Networks", 2017,
    arXiv:1708.03888, section 4 and algorithm 1.

    >>> weight = torch.nn.Parameter(torch.tensor([6.0, 8.0]))
    >>> weight.grad = torch.tensor([0.0, 5.0])
    >>> GradientLARS()(torch.optim.SGD([weight]))
    >>> weight.grad
    tensor([ 0., 10.])
    """

    threshold: float = 1e-2
    weight_decay: float = 0.0
    eps: float = 1e-9
    coefficient: float = 1.0
    clip: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("threshold", self.threshold), ("weight_decay", self.weight_decay)):
            if not 0 <= value < math.inf:
                raise ValueError(f"`{name}` must be finite and at least 0, got {value}.")
        if not self.eps > 0:
            raise ValueError(f"`eps` must be above 0, got {self.eps}.")
        if not 0 < self.coefficient < math.inf:
            raise ValueError(f"`coefficient` must be finite and above 0, got {self.coefficient}.")

        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"`clip` must be above 0 or None, got {self.clip}.")

    def change_(self, weights: list[Tensor], grads: list[Tensor]) -> None:
        """Clip each gradient, add the weight decay, and scale the sum."""
        rates = [
            torch.where(
                weight_norm > self.threshold,
                self.coefficient * weight_norm / (self.eps + grad_norm + self.weight_decay * weight_norm),
                1.0,
            )
            for weight_norm, grad_norm in zip(norms(weights), norms(grads), strict=True)
        ]
        # After the norms: ‖g‖ in the rule is that of the gradient without clipping and decay.
        if self.clip is not None:
            torch._foreach_clamp_min_(grads, -self.clip)
            torch._foreach_clamp_max_(grads, self.clip)
        if self.weight_decay != 0:
            add_scaled_(grads, weights, self.weight_decay)
        for grad, rate in zip(grads, rates, strict=True):
            grad.mul_(rate)
