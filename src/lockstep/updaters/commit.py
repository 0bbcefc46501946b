"""Apply a gradient: the only place where the training state changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.optim import Optimizer

from lockstep.replicas.buffers import Slot, combine
from lockstep.updaters.engine import Attempt
from lockstep.updaters.stepping import balanced, can_step_in_parts, step_in_parts, step_whole

Run = Callable[[Callable[[int], None]], None]


class Committer:
    """Move the weights, then the buffers.

    Args:
        optimizer: Its parameters hold the gradient when it is asked to step.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._parts: list[frozenset[int]] = []
        self._dealt: list[int] = []

    def apply(self, attempt: Attempt, slots: Sequence[Slot], *, places: int, run: Run) -> None:
        """Take the optimizer's step and make the new buffers state.

        Args:
            attempt: One whose gradient is finite and has been handed over.
            slots: The model's buffers.
            places: How many threads the step may be dealt to; 1 for a step in the calling thread.
            run: Runs a function on every place at once.
        """
        if places > 1 and can_step_in_parts(self._optimizer):
            self._deal(places)
            step_in_parts(self._optimizer, self._parts, run)
        else:
            step_whole(self._optimizer)
        if slots:
            combine(attempt.buffers, slots, weight=attempt.samples)

    def _deal(self, places: int) -> None:
        """Deal the parameters to the places, again where the optimizer has others than before."""
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        dealt = [places, *map(id, parameters)]
        if dealt != self._dealt:
            self._parts, self._dealt = balanced(parameters, places), dealt
