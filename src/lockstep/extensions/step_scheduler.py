"""Step a learning rate scheduler, by an observed value if it needs one."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lockstep.arguments import check_instance
from lockstep.errors import DeterminismWarning, StateError, warn
from lockstep.metrics import Average
from lockstep.state import check_keys
from lockstep.trainer import Extension, Trainer
from lockstep.triggers import TriggerSpec
from lockstep.updaters import scheduler_fields


class StepScheduler(Extension):
    """Steps a learning rate scheduler whenever its trigger fires, such as a `ReduceLROnPlateau` after each epoch.

    With `value` the scheduler is stepped by the mean of that value since the last step, in which samples count equally.
    A value of an evaluation is observed once, and is then the mean. The mean of a run over several ranks is that of the
    whole run, so that all ranks step alike.

    Args:
        scheduler: The scheduler, of an optimizer of the run. Its state is saved with the extension.
        value: The name of the observed value, such as ``"validation/main/loss"``. None steps without a value.
        trigger: The trigger that decides when to step.

    Raises:
        TypeError: If the scheduler is not a scheduler of PyTorch.
        ValueError: If the scheduler is a `ReduceLROnPlateau` and no value is named, or if one is named for a scheduler
            that takes none.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        >>> plateau = ReduceLROnPlateau(optimizer, patience=2)
        >>> extension = StepScheduler(plateau, value="validation/main/loss", trigger=(1, "epoch"))
    """

    def __init__(
        self, scheduler: LRScheduler, value: str | None = None, *, trigger: TriggerSpec = (1, "epoch")
    ) -> None:
        check_instance("scheduler", scheduler, LRScheduler, "a torch.optim.lr_scheduler.LRScheduler")
        if value is None and isinstance(scheduler, ReduceLROnPlateau):
            raise ValueError(
                "`value` must name the observed value that a ReduceLROnPlateau is stepped by, got None. Pass "
                'value="validation/main/loss", for example.'
            )
        if value is not None and not _takes_value(scheduler):
            raise ValueError(
                f"`value` must be None for a {type(scheduler).__name__}, whose step() takes no observed value, got "
                f"{value!r}. Leave it out, or pass a ReduceLROnPlateau."
            )
        self.scheduler = scheduler
        self.value = value
        self.trigger = trigger
        self._average = Average()
        self._options = dict(scheduler_fields(scheduler))

    def initialize(self, trainer: Trainer) -> None:
        """Check that the scheduler belongs to an optimizer of the run, and that no other extension steps it.

        Raises:
            ValueError: If it does not, or if another one does.
        """
        optimizers = trainer.updater.get_all_optimizers()
        if not any(optimizer is self.scheduler.optimizer for optimizer in optimizers.values()):
            raise ValueError(
                f"`scheduler` must belong to an optimizer of the updater ({', '.join(optimizers)}), got a "
                f"{type(self.scheduler).__name__} of another one."
            )
        steppers = [each for each in trainer.extensions.values() if isinstance(each, StepScheduler)]
        if sum(each.scheduler is self.scheduler for each in steppers) > 1:
            raise ValueError(
                f"`scheduler` must be stepped by one StepScheduler, got a {type(self.scheduler).__name__} that several "
                "extensions of the trainer step. Remove all but one."
            )

    def collect(self, trainer: Trainer) -> None:
        """Add the value, if this update has observed it; nothing is read from the device."""
        if self.value is not None and self.value in trainer.observation:
            self._average.update(trainer.observation[self.value])

    def __call__(self, trainer: Trainer) -> None:
        """Step the scheduler.

        Raises:
            ValueError: If the value was not observed since the last step.
        """
        if self.value is None:
            self.scheduler.step()
            return
        if self._average.empty:
            raise ValueError(
                f"`value` must have been observed since the last step of {trainer.name_of(self)}, got {self.value!r}. "
                f"Values of this iteration: {', '.join(sorted(trainer.observation)) or 'none'}. A value of an "
                "Evaluator must be observed by the same trigger, and before this extension is called."
            )
        mean = self._average.compute()
        self._average.reset()
        # What ReduceLROnPlateau takes, and schedulers of your own that define `step` alike.
        self.scheduler.step(mean)  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, object]:
        """Return the state of the scheduler, its options, and the mean of the current interval."""
        own = {"options": self._options, "average": self._average.state_dict()}
        return {"scheduler": self.scheduler.state_dict(), **own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state.

        Raises:
            StateError: If it is that of another kind of scheduler, or of one with other options.
        """
        check_keys(state, ("scheduler", "options", "average"), of="StepScheduler")
        saved = state["options"]
        for name in {**self._options, **saved}:
            if (own := self._options.get(name)) != saved.get(name):
                raise StateError(
                    f"The scheduler of StepScheduler must be the one that was saved, got {name or 'the kind'} = "
                    f"{own!r} instead of {saved.get(name)!r}. Pass the same scheduler with the same options, "
                    "or add the extension by another `name`, which starts the schedule anew."
                )
        average = Average()
        average.load_state_dict(state["average"])
        self.scheduler.load_state_dict(dict(state["scheduler"]))
        self._average = average


def warn_of_unsaved_schedulers(trainer: Trainer) -> None:
    """Warn of schedulers whose position no snapshot holds, because your own code steps them.

    Args:
        trainer: The trainer, whose updater and extensions are searched for schedulers.
    """
    held = [value for each in trainer.extensions.values() for value in vars(each).values()]
    held += trainer.updater.get_all_schedulers().values()
    known = [id(each.optimizer) for each in held if isinstance(each, LRScheduler)]
    for name, optimizer in trainer.updater.get_all_optimizers().items():
        # PyTorch's mark of an optimizer that a scheduler was created for.
        if hasattr(optimizer.step, "_wrapped_by_lr_sched") and id(optimizer) not in known:
            warn(
                f"The snapshots lack the position of a learning rate scheduler of optimizer {name!r}, so that the "
                "schedule of a resumed run begins anew: neither the updater nor an extension has the scheduler. Pass "
                "it to the updater as `scheduler`, which steps it after each update, or add "
                "extensions.StepScheduler(scheduler), and leave out your call of scheduler.step().",
                DeterminismWarning,
            )


def _takes_value(scheduler: LRScheduler) -> bool:
    """Return whether `step` of a scheduler takes an observed value; most take the number of an epoch, or nothing."""
    return next(iter(inspect.signature(scheduler.step).parameters), "epoch") != "epoch"
