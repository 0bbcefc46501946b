"""Observe statistics of parameters and gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import torch

from lockstep.extensions.observers.observe import MAIN
from lockstep.trainer import WRITER, Extension, Trainer
from lockstep.triggers import TriggerSpec

Statistic = Callable[[torch.Tensor], torch.Tensor]


def _std(tensor: torch.Tensor) -> torch.Tensor:
    """Compute the standard deviation of all elements, 0 for a single one."""
    return tensor.std(correction=0)


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    """Compute the fraction of zeros."""
    return (tensor == 0).double().mean()


STATISTICS: Final[Mapping[str, Statistic]] = MappingProxyType(
    {"mean": torch.mean, "std": _std, "min": torch.amin, "max": torch.amax, "zeros": _zeros}
)
"""The default statistics by name."""


class ParameterStatistics(Extension):
    """Observes statistics of each parameter and of its gradient in the last update.

    The names are ``"<parameter>/data/mean"``, ``"<parameter>/grad/mean"`` and so on, with the name of the model before
    them unless it is the only one. Values stay on their device until they are read.

    Args:
        statistics: Functions of a tensor that return a 0-d tensor, by name; by default the mean, the standard
            deviation, the minimum, the maximum and the fraction of zeros.
        data: Whether to observe the parameters.
        grads: Whether to observe the gradients, where there are any: after updates with ``precision="bf16-true"`` and
            ``"fp16-true"`` there are none.
        prefix: A prefix of all names, such as ``"statistics/"``.
        trigger: The trigger that decides when to compute them.

    Determinism: computed from weights and gradients on one thread, so they are equal on all placements of the same kind
    of device.
    """

    priority = WRITER

    def __init__(
        self,
        statistics: Mapping[str, Statistic] = STATISTICS,
        *,
        data: bool = True,
        grads: bool = True,
        prefix: str = "",
        trigger: TriggerSpec = (1, "epoch"),
    ) -> None:
        self.statistics = dict(statistics)
        self.data = data
        self.grads = grads
        self.prefix = prefix
        self.trigger = trigger

    def __call__(self, trainer: Trainer) -> None:
        """Compute and observe the statistics."""
        for model_name, model in trainer.updater.get_all_models().items():
            prefix = self.prefix if model_name == MAIN else f"{self.prefix}{model_name}/"
            for name, parameter in model.named_parameters():
                tensors = {"data": parameter.detach() if self.data else None}
                tensors["grad"] = parameter.grad if self.grads else None
                for kind, tensor in tensors.items():
                    # An empty tensor has no minimum.
                    if tensor is not None and tensor.numel():
                        self._observe(trainer, f"{prefix}{name}/{kind}", tensor)

    def _observe(self, trainer: Trainer, name: str, tensor: torch.Tensor) -> None:
        for statistic, function in self.statistics.items():
            trainer.observe(f"{name}/{statistic}", function(tensor))
