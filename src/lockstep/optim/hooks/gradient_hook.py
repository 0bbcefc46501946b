"""The common shape of hooks that change gradients before the step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer


class GradientHook(ABC):
    """A hook that changes all gradients in place, at once, before the weights move.

    It may be called in three ways: ``hook(optimizer)``, as lockstep's optimizers do;
    ``hook(optimizer, parameter)``, for one parameter alone; ``hook(optimizer, args, kwargs)``, as
    torch does after ``register_step_pre_hook``. (Torch calls before the closure of ``step(closure)``
    has made new gradients; lockstep's optimizers call after it.)

    Parameters without gradient take no part, nor do groups whose option ``frozen`` is true.
    """

    timing: ClassVar[str] = "pre"
    per_parameter: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """What ``add_hook`` calls it by default: the name of its class."""
        return type(self).__name__

    @torch.no_grad()
    def __call__(self, optimizer: Optimizer, *where: Any) -> None:
        """Change the gradients.

        Args:
            optimizer: Whose parameters' gradients; or, with ``where``, the caller.
            *where: Nothing, one parameter, or torch's two arguments of the step.
        """
        weights = list(where) if len(where) == 1 else _parameters(optimizer)
        pairs = [(weight.detach(), weight.grad) for weight in weights if weight.grad is not None]
        if pairs:
            self.change_([weight for weight, _ in pairs], [grad for _, grad in pairs])

    @abstractmethod
    def change_(self, weights: list[Tensor], grads: list[Tensor]) -> None:
        """Change these gradients in place.

        Shapes: both lists hold P tensors, at least one; the p-th of both have one shape.
        """


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    """List an optimizer's parameters but those of frozen groups, an option only lockstep's have."""
    groups = [group for group in optimizer.param_groups if not group.get("frozen", False)]
    return [weight for group in groups for weight in group["params"]]
