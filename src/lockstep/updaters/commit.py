"""Let an optimizer step, and tell an error before the weights moved from one after."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.optim import Optimizer

from lockstep.errors import LockstepError
from lockstep.optim import HookedOptimizer
from lockstep.precision import MasterWeights, left_out_if
from lockstep.updaters.fused import settle_layout
from lockstep.updaters.stepping import balanced, can_step_in_parts, step_in_parts, step_whole

Run = Callable[[Callable[[int], None]], None]


class Committer:
    """Move the weights of one optimizer.

    Args:
        optimizer: Its parameters hold the gradient when it is asked to step.
        masters: What it moves in the place of parameters in half precision, with the gradient of these.
    """

    def __init__(self, optimizer: Optimizer, masters: MasterWeights | None) -> None:
        self._optimizer = optimizer
        self._masters = masters
        self._parts: list[frozenset[int]] = []
        self._dealt: list[int] = []

    def step(self, *, places: int, run: Run, unless: torch.Tensor | None = None) -> BaseException | None:
        """Take the optimizer's step.

        Args:
            places: How many threads the step may be dealt to; 1 for a step in the calling thread.
            run: Runs a function on every place at once.
            unless: 0-d, on the device; above 0 where the step is to change nothing. Only for an optimizer
                that need not wait for it.

        Returns:
            What was raised once all weights had moved, by a hook for example; the step is taken all the same.

        Raises:
            BaseException: What was raised before any weight moved.
            LockstepError: The error came in between; the weights are neither those before nor those after.
        """
        if unless is not None:
            with left_out_if(self._optimizer, unless):
                return self.step(places=places, run=run)
        if self._masters is not None:
            with self._masters.in_place():
                return self._step(places, run)
        own = self._optimizer.masters if isinstance(self._optimizer, HookedOptimizer) else None
        if own is not None:
            own.take_gradients()
            with own.in_place():
                return self._step(places, run)
        return self._step(places, run)

    def _step(self, places: int, run: Run) -> BaseException | None:
        """Do the work of `step` on what is in the optimizer's groups now."""
        settle_layout(self._optimizer)
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        versions = [parameter._version for parameter in parameters]
        try:
            if places > 1 and can_step_in_parts(self._optimizer):
                self._deal(parameters, places)
                step_in_parts(self._optimizer, self._parts, run)
            else:
                step_whole(self._optimizer)
        except BaseException as error:
            moved = [
                parameter._version != version
                for parameter, version in zip(parameters, versions, strict=True)
                if parameter.grad is not None
            ]
            if not any(moved):
                raise
            if not all(moved):
                raise LockstepError(
                    f"The step of {type(self._optimizer).__name__} raised {type(error).__name__} between the "
                    f"first weight that moved and the last: {error}. Load a saved state."
                ) from error
            return error
        return None

    def _deal(self, parameters: list[torch.Tensor], places: int) -> None:
        """Deal the parameters to the places, again where the optimizer has others than before."""
        dealt = [places, *map(id, parameters)]
        if dealt != self._dealt:
            self._parts, self._dealt = balanced(parameters, places), dealt
