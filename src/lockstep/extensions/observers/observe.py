"""Observe the learning rates, or the result of any function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

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
