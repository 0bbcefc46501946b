"""Observe the learning rates, the norm of the gradient, statistics of the parameters, or the result of any function."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch

from lockstep.metrics import Observed
from lockstep.trainer import WRITER, Extension, Trainer
from lockstep.triggers import TriggerSpec

MAIN: Final = "main"
"""The name of the only model or optimizer, which is left out of the names of values."""


class ObserveValue(Extension):
    """Observes the result of a function of the trainer.

    Args:
        key: The name of the value.
        function: A function of the trainer that returns a number, a 0-d tensor or a `Mean`.
        trigger: The trigger that decides when to observe it.

    >>> momentum = ObserveValue("momentum", lambda trainer: trainer.updater.get_optimizer("main").defaults["momentum"])
    """

    priority = WRITER

    def __init__(
        self, key: str, function: Callable[[Any], Observed], *, trigger: TriggerSpec = (1, "iteration")
    ) -> None:
        self.key = key
        self.function = function
        self.trigger = trigger

    @property
    def name(self) -> str:
        """The default name, which contains that of the value."""
        return f"ObserveValue({self.key})"

    def __call__(self, trainer: Trainer) -> None:
        """Observe the value."""
        trainer.observe(self.key, self.function(trainer))


class ObserveLR(Extension):
    """Observes the learning rate of every optimizer and parameter group after an update, which is that of the next one.

    The first group of the only optimizer is ``"lr"``, that of an optimizer ``gen`` is ``"gen/lr"``, and further groups
    are ``"group1/lr"`` and so on. `LogReport` and loggers keep the last one of an interval.

    Args:
        trigger: The trigger that decides when to observe them.
    """

    priority = WRITER

    def __init__(self, *, trigger: TriggerSpec = (1, "iteration")) -> None:
        self.trigger = trigger

    def __call__(self, trainer: Trainer) -> None:
        """Observe the learning rates."""
        for name, optimizer in trainer.updater.get_all_optimizers().items():
            prefix = "" if name == MAIN else f"{name}/"
            for index, group in enumerate(optimizer.param_groups):
                trainer.observe(f"{prefix}group{index}/lr" if index else f"{prefix}lr", group["lr"])


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
