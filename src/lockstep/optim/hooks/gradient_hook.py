"""The base class of hooks that change gradients before the step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer


class GradientHook(ABC):
    """A hook that changes all gradients in place before the weights are updated.

    It can be called in three ways: ``hook(optimizer)``, as lockstep's optimizers do;
    ``hook(optimizer, parameter)``, for a single parameter; and ``hook(optimizer, args, kwargs)``, as torch
    does after ``register_step_pre_hook``. (With ``step(closure)``, torch calls it before the closure has
    computed new gradients; lockstep's optimizers call it after that.)

    Parameters without a gradient are left out, and so are groups whose option ``frozen`` is True.
    """

    timing: ClassVar[str] = "pre"
    per_parameter: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """The default name for ``add_hook``: the name of the class."""
        return type(self).__name__

    @torch.no_grad()
    def __call__(self, optimizer: Optimizer, *where: Any) -> None:
        """Change the gradients.

        Args:
            optimizer: The optimizer whose gradients are changed; with a parameter in ``where``, it is not used.
            *where: Nothing, a single parameter, or the two arguments that torch passes to a step hook.
        """
        # torch passes the two arguments of the step, lockstep's optimizers nothing or a parameter.
        weights = list(where) if len(where) == 1 else _parameters(optimizer)
        pairs = [(weight.detach(), weight.grad) for weight in weights if weight.grad is not None]
        if pairs:
            self.change_([weight for weight, _ in pairs], [grad for _, grad in pairs])

    @abstractmethod
    def change_(self, weights: list[Tensor], grads: list[Tensor]) -> None:
        """Change these gradients in place.

        Shapes: both lists hold P tensors, at least one; the p-th of both have one shape.

        Args:
            weights: The weights, which must be left untouched.
            grads: The gradients, changed in place.
        """


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    """List the parameters of an optimizer except those of frozen groups, which only lockstep's optimizers have."""
    groups = [group for group in optimizer.param_groups if not group.get("frozen", False)]
    return [weight for group in groups for weight in group["params"]]
