"""Observe the norm of the gradients."""

from __future__ import annotations

import warnings

import torch

from lockstep.extensions.observers.observe import MAIN
from lockstep.trainer import WRITER, Extension, Trainer
from lockstep.triggers import TriggerSpec


class GradientNorm(Extension):
    """Observes the norm of the gradient of each model in the last update, as ``"gradient_norm"``.

    It is that of all gradients of a model together, as they are after the update: not multiplied by the loss scale, and
    after hooks of the optimizer that change them, such as those that clip. With models by name, the names are
    ``"gen/gradient_norm"`` and so on, and a model without gradients is left out. If no model has gradients, as with
    ``precision="bf16-true"`` and ``"fp16-true"``, which do not keep them, nothing is observed and a warning says so.

    Args:
        norm_type: The order p of the norm, above 0; infinity for the largest magnitude.
        trigger: The trigger that decides when to compute it.

    Raises:
        ValueError: If `norm_type` is not above 0.

    Determinism: computed from the gradient of the whole batch on one thread, so it is equal on all placements of the
    same kind of device. It stays on its device until it is read.
    """

    priority = WRITER

    def __init__(self, norm_type: float = 2.0, *, trigger: TriggerSpec = (1, "iteration")) -> None:
        if not norm_type > 0:
            raise ValueError(f"`norm_type` must be above 0, got {norm_type}.")
        self.norm_type = norm_type
        self.trigger = trigger
        self._warned = False

    def __call__(self, trainer: Trainer) -> None:
        """Compute and observe the norms."""
        found = False
        for name, model in trainer.updater.get_all_models().items():
            grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            if grads:
                found = True
                norm = torch.nn.utils.get_total_norm(grads, self.norm_type)
                trainer.observe("gradient_norm" if name == MAIN else f"{name}/gradient_norm", norm)
        if not found and not self._warned and trainer.is_main:
            self._warned = True
            warnings.warn(
                "No model has gradients after an update, so GradientNorm observes nothing. With precision='bf16-true' "
                "and 'fp16-true' gradients are not kept; use 'bf16' or 'fp16' to observe their norm.",
                stacklevel=2,
            )
