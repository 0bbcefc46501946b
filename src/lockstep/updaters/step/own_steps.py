"""Notice calls of `step` between updates, which repeat what an update does."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lockstep.precision import ChangesOnlyGradients
from lockstep.updaters.step.checks import USED_VERSION

WATCHED_UPDATES: Final = 3
"""The number of updates after each of which steps of optimizers are noticed, so that this costs nothing later."""


class _Check(ChangesOnlyGradients):
    """A step hook that changes nothing at all.

    Args:
        check: Called with the optimizer.
    """

    def __init__(self, check: Callable[[Optimizer], None]) -> None:
        self._check = check

    def __call__(self, optimizer: Optimizer, *_: object) -> None:
        self._check(optimizer)


class OwnSteps:
    """Warns once if an optimizer steps again by the gradient of an update, and once if a scheduler steps twice."""

    def __init__(self) -> None:
        self.left = WATCHED_UPDATES
        """The number of updates after which steps are still to be noticed."""
        self.watches: list[Any] = []
        """The handles of the hooks; empty while nothing is noticed."""
        self._positions: dict[int, int] = {}
        self._warned: set[str] = set()

    def begin(self, optimizers: Iterable[Optimizer]) -> None:
        """Notice steps of optimizers from the end of an update to the next one.

        Args:
            optimizers: The optimizers of the updater.
        """
        self.end()
        if self.left:
            self.left -= 1
            check = _Check(self._check_gradients)
            self.watches = [each.register_step_pre_hook(check) for each in optimizers]

    def end(self) -> None:
        """Stop noticing, before optimizers step in an update."""
        for handle in self.watches:
            handle.remove()
        self.watches.clear()

    def forget(self) -> None:
        """Forget where schedulers stood, because a state is loaded."""
        self._positions.clear()

    def check(self, schedulers: Mapping[str, LRScheduler]) -> None:
        """Warn of a scheduler that has stepped since the updater stepped it, before the updater steps it again.

        Args:
            schedulers: The schedulers by name.
        """
        for scheduler in schedulers.values():
            if scheduler.last_epoch > self._positions.get(id(scheduler), scheduler.last_epoch):
                self._warn(
                    "scheduler",
                    f"A {type(scheduler).__name__} has stepped between two updates, although the updater steps it "
                    "(`scheduler`), so that it steps twice. Leave out your call of scheduler.step() or the "
                    "StepScheduler, or do not give it to the updater.",
                )

    def note(self, schedulers: Mapping[str, LRScheduler]) -> None:
        """Remember where schedulers stand after the updater has stepped them.

        Args:
            schedulers: The schedulers by name.
        """
        self._positions.update((id(each), each.last_epoch) for each in schedulers.values())

    def _check_gradients(self, optimizer: Optimizer) -> None:
        gradients = [each.grad for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
        # Without any gradient it is called by a loss function, while an update runs, or is in vain.
        if not gradients or any(each.__dict__.get(USED_VERSION) == each._version for each in gradients):
            self._warn(
                "optimizer",
                f"{type(optimizer).__name__}.step() is called although update() steps, by the gradient by which it has "
                "moved the weights already, or by none. Leave the call out.",
            )

    def _warn(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(message, stacklevel=5)
