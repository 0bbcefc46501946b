"""Apply a gradient: the only place where the training state changes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.optim import Optimizer

from lockstep.replicas.buffers import combine
from lockstep.tree import Tensors
from lockstep.updaters.engine import Attempt
from lockstep.updaters.stepping import balanced, can_step_in_parts, step_in_parts, step_whole

Run = Callable[[Callable[[int], None]], None]


@torch.no_grad()
def hand_over(model: nn.Module, gradients: Tensors) -> None:
    """Put the gradient of the whole batch where an optimizer looks for it.

    Hooks that the user registered on a parameter see it once, as they would in a loop of one's own.
    """
    fresh = iter(gradients)
    for parameter in model.parameters():
        # One that was frozen since has a gradient of its last update, by which an optimizer would move it.
        gradient = next(fresh) if parameter.requires_grad else None
        parameter.grad = gradient if gradient is None else _hooked(parameter, gradient)


def _hooked(parameter: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
    """Run a parameter's tensor hooks on its gradient."""
    hooks = parameter._backward_hooks  # noqa: SLF001 - where Tensor.register_hook keeps them
    if hooks:
        for hook in hooks.values():
            replaced = hook(gradient)
            gradient = gradient if replaced is None else replaced
    return gradient


def refuse_accumulate_hooks(model: nn.Module) -> None:
    """Refuse hooks that wait for an accumulation of gradients, which replicas do not have.

    Raises:
        ValueError: A parameter has such a hook.
    """
    for name, parameter in model.named_parameters():
        if parameter._post_accumulate_grad_hooks:  # noqa: SLF001 - no public way to look
            raise ValueError(
                f"`model` must have no post-accumulate-grad hooks, got one on {name!r}. A shard's gradient "
                "is not the batch's; use Tensor.register_hook or a hook of the optimizer."
            )


class Committer:
    """Move the weights, then the buffers.

    Args:
        model: Its parameters hold the gradient.
        optimizer: Steps some or all of them.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer
        self._parts: list[frozenset[int]] = []
        self._dealt: list[int] = []

    def apply(self, attempt: Attempt, *, places: int, run: Run) -> None:
        """Take the optimizer's step and make the new buffers state.

        Args:
            attempt: One whose gradient is finite and has been handed over.
            places: How many threads the step may be dealt to; 1 for a step in the calling thread.
            run: Runs a function on every place at once.
        """
        if places > 1 and can_step_in_parts(self._optimizer):
            self._deal(places)
            step_in_parts(self._optimizer, self._parts, run)
        else:
            step_whole(self._optimizer)
        combine(attempt.buffers, self._model, weight=attempt.samples)

    def _deal(self, places: int) -> None:
        """Deal the parameters to the places, again where the optimizer has others than before."""
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        dealt = [places, *map(id, parameters)]
        if dealt != self._dealt:
            self._parts, self._dealt = balanced(parameters, places), dealt
